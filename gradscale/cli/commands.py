"""The sub-commands: parsing arguments and printing tables; the work is done elsewhere.

Engines and the demo are imported inside the sub-command that needs them, so `--help` is quick and
`info` works where they are missing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradscale import __version__
from gradscale.cli import tables, training
from gradscale.cli.info import gather
from gradscale.cli.launch import Script
from gradscale.errors import SettingError, StateError
from gradscale.policy import as_policy
from gradscale.report import compare as compare_runs
from gradscale.report import comparison_page, report_page, summarise
from gradscale.report.layers import underflow_by_layer
from gradscale.runlog import Run, read

DEMO_STEPS = 1000
"""The NaN batches come when float32 has learned half of what it will, and 7 runs take a minute."""
QUICK_STEPS = 40
ENGINES = ("torch", "jax")
"""What the demo can train with; `jax` leaves out the runs with torch's GradScaler."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    """Prints the version and exits, if `wanted`."""
    if wanted:
        typer.echo(f"gradscale {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Loss scaling for mixed-precision training."""


@contextmanager
def reported(extra: str) -> Iterator[None]:
    """Exits with status 1 and one line if a package of `extra` is missing or a setting is wrong."""
    try:
        yield
    except ImportError as error:
        message = f'{extra} cannot start ({error}): pip install "gradscale[{extra}]".'
    except (SettingError, StateError, OSError) as error:
        message = str(error)
    else:
        return
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"Error: {escape(message)}")
    raise typer.Exit(1)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Number of steps of each run.")] = DEMO_STEPS,
    output: Annotated[
        Path, typer.Option(help="File for the picture, with the ending .png, .svg or .pdf.")
    ] = Path("gradscale-demo.png"),
    html: Annotated[
        Path | None,
        typer.Option(
            help="File for the report page of the run with gradscale and NaN batches. By default, "
            "no page is written."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the batches.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Run {QUICK_STEPS} steps, too few for a result, and exit with status 0.",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="Framework for the training, torch or jax. Weights and batches are the same."
        ),
    ] = "torch",
) -> None:
    """Train a small network on the CPU in float32 and float16, with torch's scaler and gradscale.

    Prints a table and the result, and writes a picture. Takes about a minute. Exits with status 1
    if the runs do not show the expected result.
    """
    with reported("demo"):
        from gradscale.demo import digits, picture, summary, train

        train.check(steps, seed)
        if engine not in ENGINES:
            raise SettingError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}.")
        picture.check_path(output)
        training.check_page(html, engine)
    console = Console(highlight=False)
    images = digits.load_digits()
    mean_loss = train.loss_of_the_mean(images)
    with reported(engine), train.one_thread(), TemporaryDirectory() as folder:
        log = Path(folder) if html is not None else None
        steps = QUICK_STEPS if quick else steps
        traces = training.run_all(console, images, steps, seed, engine, log)
        if html is not None:
            run = read_run(Path(folder))
            page = report_page(run, summarise(run, train.OURS_NAN.name))
            html.write_text(page, encoding="utf-8")
    console.print(training.table([summary.summarise(trace) for trace in traces]))
    console.print(summary.NOTES, style="dim")
    picture.draw(traces, mean_loss, output)
    console.print(f"\nPicture: {escape(str(output))}", soft_wrap=True)
    if html is not None:
        console.print(f"Page: {escape(str(html))}", soft_wrap=True)
    result = summary.result_of(traces, mean_loss)
    console.print(f"\n{escape(result.sentence)}", style="bold")
    if not result.holds and not quick:
        error = Console(stderr=True, soft_wrap=True, highlight=False)
        error.print("Error: the runs do not show the expected result; see the line above.")
        raise typer.Exit(1)


@app.command()
def simulate(
    histories: Annotated[
        list[str] | None,
        typer.Argument(help="Kinds of synthetic histories, or CSV files. Default: all kinds."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy with the settings that differ from its defaults, such as "
            "'Headroom(margin=3)'. Can be repeated."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps of a synthetic history.")] = 2000,
    runs: Annotated[int, typer.Option(help="Number of runs of each synthetic history.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic histories.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run policies on recorded or synthetic histories of gradients, without a GPU.

    Prints the means over all runs for each history and policy.
    """
    with reported("simulate"):
        from gradscale.simulate import compare

        rows = compare.compare(histories or [], policy or [], steps, runs, seed)
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    console = Console(highlight=False)
    table = Table(padding=(0, 0))
    for heading in compare.HEADINGS:
        if heading in ("history", "policy"):
            # Long calls take several lines in a narrow terminal, so that no number is cut off.
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, no_wrap=True, justify="right")
    for row in rows:
        table.add_row(*map(escape, compare.cells(row)))
    console.print(table)
    console.print(compare.NOTES, style="dim")


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print versions, the path of each device with the reason, and missing packages."""
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False)
    console.print(
        f"gradscale {facts['gradscale']}, Python {facts['python']}, {escape(facts['platform'])}\n"
    )
    table = Table("package", "version", "gradscale")
    for name, found in facts["packages"].items():
        version = "broken" if found["error"] else found["version"] or "not installed"
        table.add_row(name, escape(version), escape(found["use"]))
    console.print(table)
    console.print(escape(f"\npath: {facts['path']['name']} ({facts['path']['why']})"))
    if facts["devices"]:
        table = Table("device", "name", "path", "why")
        for found in facts["devices"]:
            table.add_row(*(escape(found[key]) for key in ("device", "name", "path", "why")))
        console.print(table)
    for extra, names in facts["missing"].items():
        missing = f'missing {", ".join(names)}: pip install "gradscale[{extra}]"'
        console.print(escape(f"extra {extra}: {missing if names else 'complete'}"))


def read_run(path: Path) -> Run:
    """The run of a log; lines that cannot be read are one line on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = read(path)
    for warning in caught:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(escape(f"Warning: {warning.message}"))
    return run


def name_of(path: Path) -> str:
    """What a run is called: its folder, or its file without the ending."""
    return path.resolve().stem if path.is_file() else path.resolve().name


@app.command()
def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder or file of a run log.")],
    html: Annotated[
        Path | None,
        typer.Option(help="File for the page. Default: report.html in RUN."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON instead of tables. Writes a page only with --html."
        ),
    ] = False,
) -> None:
    """Print the findings and numbers of a run, and write them to one HTML page.

    The page is self-contained and loads nothing from the network.
    """
    with reported("report"):
        run = read_run(path)
        summary = summarise(run, name_of(path))
        if html is None and not as_json:
            html = path.with_suffix(".html") if path.is_file() else path / "report.html"
        if html is not None:
            html.write_text(report_page(run, summary), encoding="utf-8")
    layers = underflow_by_layer(run.samples[-1]) if run.samples else []
    if as_json:
        typer.echo(json.dumps(summary.as_dict() | {"underflow_by_layer": layers}, indent=2))
        return
    console = Console(highlight=False)
    tables.print_summary(console, summary, layers)
    console.print(f"Page: {tables.shown(str(html))}", soft_wrap=True)


@app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder or file of the first run log.")
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Folder or file of the second.")],
    html: Annotated[Path, typer.Option(help="File for the page with both runs.")] = Path(
        "gradscale-compare.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and write no page.")] = False,
) -> None:
    """Print two runs side by side, and write an HTML page with both."""
    with reported("report"):
        runs = read_run(first), read_run(second)
        names = name_of(first), name_of(second)
        if names[0] == names[1]:
            names = str(first), str(second)
        found = compare_runs(*runs, names)
        if not as_json:
            html.write_text(comparison_page(*runs, found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    console = Console(highlight=False)
    tables.print_comparison(console, found)
    console.print(f"Page: {tables.shown(str(html))}", soft_wrap=True)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]", help="Script and its arguments, as for `python`."),
    ],
    module: Annotated[
        bool, typer.Option("-m", help="Run SCRIPT as a module, as `python -m` does.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            "--log-to",  # torchrun takes --log for the beginning of one of its own options
            help="Folder of the log. Default: a new folder in gradscale-runs.",
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy of scalers that set none, such as headroom.")
    ] = None,
    panel: Annotated[
        bool,
        typer.Option("--panel/--no-panel", help="Show scale, headroom and skips during the run."),
    ] = True,
) -> None:
    """Run a training script with gradscale in place of torch's GradScaler or Apex, and log it.

    The script is not changed. Options come before its name; what follows are its arguments.
    """
    if policy is not None:
        with reported("torch"):
            as_policy(policy)
    # The script runs when the command line is done with: its exceptions and signals are its own.
    context.obj.append(Script(command, module=module, log=log, policy=policy, panel=panel))
