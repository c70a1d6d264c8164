"""The command line, through typer's runner; and without typer, in a fresh process."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import gradscale
from gradscale.cli import commands
from gradscale.cli import info as facts
from gradscale.cli.commands import app

ROOT = Path(__file__).parents[2]
RUN_NAMES = [
    "float32",
    "float16, no scale",
    "float16, static",
    "float16, torch",
    "float16, gradscale",
    "NaN data, torch",
    "NaN data, gradscale",
]


def invoke(*args: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, args)


# demo


def table_rows(output: str) -> list[list[str]]:
    rows = [re.split(r" *[|\u2502] *", line)[1:-1] for line in output.splitlines()]
    return [row for row in rows if row]


def test_demo_prints_a_row_for_each_run_and_writes_a_picture_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    path, page = tmp_path / "p.png", tmp_path / "p.html"
    result = invoke("demo", "--quick", "--output", str(path), "--html", str(page))
    assert result.exit_code == 0, result.output
    rows = table_rows(result.output)
    assert [row[0] for row in rows] == RUN_NAMES
    assert all(float(row[1]) > 0 for row in rows)
    assert [row[2] for row in rows] == ["0"] * 5 + ["8"] * 2
    assert [row[6] for row in rows[:4]] == ["1", "1", "2**10", "2**16"]
    assert rows[5][6] == "2**8"  # 8 batches of 40 are NaN
    assert "Too few steps for a result" in result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "loss not finite" in page.read_text(encoding="utf-8")
    assert set(tmp_path.iterdir()) == {path, page}
    assert max(map(len, result.output.splitlines())) <= max(80, len(str(page)) + 20)


def test_demo_without_its_result_exits_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    result = invoke("demo", "--steps", "3", "--output", str(tmp_path / "p.png"))
    assert result.exit_code == 1
    assert "Too few steps for a result" in result.stdout
    assert result.stderr.startswith("Error: the runs do not show the expected result")


@pytest.mark.soak
def test_demo_with_jax_leaves_out_the_scaler_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    result = invoke("demo", "--quick", "--engine", "jax", "--output", str(path))
    assert result.exit_code == 0, result.output
    names = [row[0] for row in table_rows(result.output)]
    assert names == [name for name in RUN_NAMES if "torch" not in name]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--steps", "0"], "steps must be >= 1, got 0."),
        (["--steps", "many"], "Invalid value for '--steps'"),
        (["--seed", "-1"], "seed must be >= 0 and < 2**63, got -1."),
        (["--engine", "keras"], "engine must be one of torch, jax, got 'keras'."),
        (["--output", "picture.txt"], "output must end in .png, .svg, .pdf, got picture.txt."),
        (["--output", "no/such/folder/p.png"], "output must be a file in a folder that exists"),
        (["--html", "no/such/folder/p.html"], "html must be a file in a folder that exists"),
        (["--html", "p.html", "--engine", "jax"], "html needs the engine torch"),
    ],
)
def test_bad_argument_is_named_before_anything_runs(args: list[str], complaint: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    result = invoke("demo", *args, columns=200)
    assert result.exit_code in (1, 2)
    assert complaint in result.stderr
    assert result.stdout == ""


def test_demo_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [n for n in sys.modules if n.startswith(("matplotlib.", "gradscale.demo"))]:
        monkeypatch.delitem(sys.modules, name)
    result = invoke("demo")
    assert result.exit_code == 1
    assert 'pip install "gradscale[demo]"' in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --version


def test_version_is_printed_without_a_command() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"gradscale {gradscale.__version__}\n")


# info


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The real report, found out once: it takes a process for each framework."""
    return facts.gather()


def test_info_tells_versions_path_and_what_is_missing(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "gather", lambda: report)
    result = invoke("info", columns=120)
    assert result.exit_code == 0, result.output
    assert f"gradscale {gradscale.__version__}" in result.output
    for word in (*facts.FRAMEWORKS, "path: ", "device", "cpu", "extra torch: ", "extra report: "):
        assert word in result.output


def test_info_as_json_holds_the_same(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "gather", lambda: report)
    result = invoke("info", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["gradscale"] == gradscale.__version__
    assert set(told["packages"]) == set(facts.FRAMEWORKS)
    assert set(told["missing"]) == set(facts.EXTRAS)
    torch = pytest.importorskip("torch")
    assert told["packages"]["torch"]["version"] == torch.__version__
    assert told["packages"]["torch"]["engine"]
    used = told["packages"]["triton"]["use"].startswith("used")
    assert used == (told["path"]["name"] == "triton")
    assert told["path"]["name"] == ("triton" if torch.cuda.is_available() else "reference")
    *_, cpu = told["devices"]
    assert cpu["device"] == "cpu"
    assert (cpu["path"], cpu["why"]) == ("reference", "the kernels are for CUDA")
    gpus = [found for found in told["devices"] if found["device"].startswith("cuda")]
    assert [gpu["name"] for gpu in gpus] == told["cuda_devices"]
    for index, gpu in enumerate(gpus):
        assert gpu["device"] == f"cuda:{index}"
        assert gpu["path"] == "triton", gpu
        assert f"compute capability {gpu['capability']}, Triton" in gpu["why"]


def device(name: str, path: str, why: str = "so it is") -> facts.Device:
    return facts.Device(name, "a GPU", "7.0" if name.startswith("cuda") else None, path, why)


GPU, OLD_GPU = device("cuda:0", "triton"), device("cuda:1", "reference", "a kernel fails (here)")
CPU = device("cpu", "reference")


@pytest.mark.parametrize(
    ("torch", "triton", "devices", "path", "use"),
    [
        ("2.13", "3.9", [GPU, CPU], "triton", "used: kernels on cuda:0, torch operations else"),
        ("2.13", "3.9", [GPU, OLD_GPU, CPU], "triton", "used: kernels on cuda:0, torch"),
        ("2.13", "3.9", [OLD_GPU, CPU], "reference", "not used: a kernel fails (here)"),
        (
            "2.13",
            "3.9",
            [CPU],
            "reference",
            "not used: the kernels need a CUDA device, and torch finds none",
        ),
        (None, "3.9", [], "none", "not used: gradscale.torch needs torch"),
        ("2.13", None, [device("cuda:0", "reference"), CPU], "reference", "pip install triton"),
        ("2.13", "3.9", [device("any", "unknown", "slow")], "unknown", "not used: slow"),
    ],
    ids=["GPU", "two GPUs", "old GPU", "no GPU", "no torch", "no Triton", "no answer"],
)
def test_info_says_whether_triton_is_used(
    torch: str | None, triton: str | None, devices: list[facts.Device], path: str, use: str
) -> None:
    found = {"torch": facts.Package("torch", torch), "triton": facts.Package("triton", triton)}
    assert facts.path(found, devices)["name"] == path
    assert facts.use_of(found["triton"], found, devices).startswith(use)


def test_info_prints_a_row_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "a kernel fails (compute capability 6.0, Triton 3.9.0): PTXASError: [sm_60]"
    monkeypatch.setattr(facts, "find_devices", lambda: [device("cuda:0", "reference", why), CPU])
    monkeypatch.setattr(facts, "look", lambda name: facts.Package(name, "1.0"))
    rows = invoke("info", columns=200).output.splitlines()
    (row,) = [row for row in rows if "cuda:0" in row]
    assert re.split(r" *[|\u2502] *", row)[1:-1] == ["cuda:0", "a GPU", "reference", why]
    assert f"path: reference ({why})" in rows


@pytest.mark.parametrize(
    ("program", "rows"),
    [
        ("raise OSError('libcuda.so')", [("any", "unknown", "OSError: libcuda.so")]),
        (
            "import time; time.sleep(60)",
            [("any", "unknown", "trying a kernel took longer than 1 s")],
        ),
        (
            "import os\nprint('[hello]')\n"
            'print(\'gradscale: [["cuda:0", "a", "9.0"], ["cuda:1", "b", "6.0"]]\')\n'
            'print(\'gradscale: ["triton", "it works"]\', flush=True)\n'
            "os.kill(os.getpid(), 11)",
            [
                ("cuda:0", "triton", "it works"),
                ("cuda:1", "unknown", "trying a kernel ended the process (SIGSEGV)"),
            ],
        ),
    ],
    ids=["error", "endless", "crash"],
)
def test_a_kernel_that_ends_its_process_is_a_row(
    monkeypatch: pytest.MonkeyPatch, program: str, rows: list[tuple[str, str, str]]
) -> None:
    monkeypatch.setattr(facts, "DEVICES", program)
    monkeypatch.setattr(facts, "TIMEOUT", 1.0 if "sleep" in program else 60.0)
    assert [(row.device, row.path, row.why) for row in facts.find_devices()] == rows


def test_info_says_what_each_framework_is_for() -> None:
    packages = {"torch": facts.Package("torch", "2.13")}
    broken = facts.Package("keras", error="OSError: libfoo")
    assert facts.use_of(packages["torch"], packages) == "engine gradscale.torch"
    assert facts.use_of(broken, packages) == "OSError: libfoo"
    assert "no engine" in facts.use_of(facts.Package("math", "1.0"), packages)


def plant(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called `brokenframework` that only these tests can import."""
    (folder / "brokenframework.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise OSError('libcudart.so: not found')", "OSError: libcudart.so: not found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended the process (SIGKILL)"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "longer than 1 s"),
    ],
)
def test_broken_framework_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    plant(tmp_path, source, monkeypatch)
    monkeypatch.setattr(facts, "TIMEOUT", 1.0 if "sleep" in source else 60.0)
    package = facts.look("brokenframework")
    assert package.version is None
    assert package.error is not None
    assert error in package.error
    assert package.remedy is None


def test_framework_that_talks_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, "__version__ = '1.2'\nprint('hello', end='')", monkeypatch)
    assert facts.look("brokenframework") == facts.Package("brokenframework", "1.2")


def test_the_current_directory_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "wave.py").write_text("raise OSError")
    monkeypatch.chdir(tmp_path)
    assert facts.look("wave") == facts.Package("wave", "unknown")


def test_absent_framework_comes_with_a_remedy() -> None:
    assert facts.look("noframework").remedy == "pip install noframework"
    assert facts.Package("torch").remedy == 'pip install "gradscale[torch]"'
    packages = {name: facts.Package(name) for name in facts.FRAMEWORKS}
    assert facts.path(packages, [])["name"] == "none"


def test_extras_are_those_of_pyproject() -> None:
    # pytest brings tomli where the library of Python has no tomllib.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def names(extra: str) -> list[str]:
        found = []
        for wanted in extras[extra]:
            own = re.fullmatch(r"gradscale\[(.*)\]", wanted)
            found += [n for e in own[1].split(",") for n in names(e)] if own else [wanted]
        return [re.split(r"[<>=~! ]", name)[0] for name in found]

    told = {extra: list(packages) for extra, packages in facts.EXTRAS.items()}
    assert told == {extra: names(extra) for extra in extras if extra != "dev"}
    assert project["scripts"] == {"gradscale": "gradscale.cli:main"}


# Without typer, and as a process.


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_package_is_one_line(name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; from gradscale.cli import main; main()"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f'The command line needs {name}: pip install "gradscale[cli]".\n'
    assert done.stdout == ""


def test_help_is_quick_because_no_framework_is_loaded() -> None:
    program = (
        "import sys; sys.argv = ['gradscale', '--help']\n"
        "from gradscale.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print({'torch', 'jax', 'matplotlib', 'numpy'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"
