"""The generated section of docs/measurements/arena.md: the tables of every size and device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import stdev

from arena import measure
from arena.arms import BLOCKS, RETRIES, SKIPPING, STATIC_SCALES, static_name
from arena.rows import Row, Time, mean, of_arm
from arena.training import SIZES
from arena.trainings import TRAININGS

DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGES = DOCS / "measurements" / "arena.md", DOCS / "images"
BEGIN, END = "<!-- arena: begin -->", "<!-- arena: end -->"
TORCHS, HEADROOM = "torch's GradScaler", "Headroom"
ARMS = (
    "float32", "bfloat16", "float16, no scale", TORCHS, "Dynamic", HEADROOM, RETRIES,
    SKIPPING, "LogMax", "Histogram", BLOCKS,
)  # fmt: skip
UNSCALED = ARMS[:3]


def best_static(rows: Iterable[Row]) -> int | None:
    """The logarithm of the best static scale in the `rows` of one training; None if there is none.

    The best by the metric. Many are equally good as a rule; of those it is the one with the fewest
    skipped steps and dead tensors, and then the least underflow.
    """
    found = [row for row in rows if row.arm.startswith("static") and not math.isnan(row.value)]
    found = [row for row in found if row.seed == 0 and not _idle(row)]
    if not found:
        return None
    kind = TRAININGS[found[0].training]
    best = (max if kind.higher_is_better else min)(row.value for row in found)
    as_good = [row for row in found if abs(row.value - best) <= kind.noise * abs(best)]
    chosen = min(as_good, key=lambda row: (row.skipped + row.dead, row.underflow))
    return int(float(chosen.history.split("x")[0]))


def write(
    rows: Sequence[Row], times: Sequence[Time] = (), page: Path = PAGE, images: Path = IMAGES
) -> None:
    """Writes the section between the two marks of `page`, and its pictures into `images`.

    Rows of sizes that no longer exist are left out.
    """
    from arena import plots  # matplotlib: the processes that only run have no use for it

    parts = []
    for size, device in sorted({(row.size, row.device) for row in rows if row.size in SIZES}):
        group = [row for row in rows if (row.size, row.device) == (size, device)]
        ordinary = [row for row in group if " from 2^" not in row.arm]
        where = f"{size}, {device}"
        name = f"arena-{size}-{'cpu' if device.endswith('CPU') else 'cuda'}"
        clocked = [time for time in times if (time.size, time.device) == (size, device)]
        parts += [f"### {where[0].upper()}{where[1:]}", *big_table(ordinary, clocked)]
        parts += [*duel(ordinary), *starts(group), *statics(ordinary)]
        best = {t: best_static(_of(ordinary, t)) for t in TRAININGS}
        files = plots.draw(ordinary, best, images / name)
        parts += [_shown(text, file, page) for text, file in files]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    if not after and END not in rest:
        raise ValueError(f"{page.name} must have the marks {BEGIN} and {END}.")
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", "utf-8")


def _shown(text: str, picture: Path, page: Path) -> str:
    """The picture in Markdown, by its path from the folder of `page`, with `text` below it."""
    path = Path(os.path.relpath(picture, page.parent)).as_posix()
    return f"![{text}]({path})\n\n{text}"


def big_table(rows: Sequence[Row], times: Sequence[Time] = ()) -> Iterator[str]:
    """Every training, every arm."""
    lines = [
        "| training | arm | metric | ms per step | skipped | wasted | to a good scale | underflow "
        "| dead | moves |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ms = {(time.training, time.arm): f"{time.ms:.2f}" for time in times if time.ms > 0}
    for training in TRAININGS:
        group = _of(rows, training)
        best = best_static(group)
        names = [*ARMS] if best is None else [*ARMS[:3], f"static 2^{best}", *ARMS[3:]]
        first = True
        for name in names:
            runs = of_arm(group, training, name)
            if runs:
                title = f"{training} ({runs[0].metric})" if first else ""
                lines.append(_line(title, name, runs, best, ms.get((training, name), "")))
                first = False
    if len(lines) > 2:
        yield "\n".join(lines)


def _line(title: str, name: str, runs: Sequence[Row], best: int | None, ms: str) -> str:
    label = f"best static, {name.split()[1]}" if name.startswith("static") else name
    if all(run.note for run in runs):
        return f"| {title} | {label} | {runs[0].note} | | | | | | | |"
    metric = _spread([run.value for run in runs])
    if runs[0].second_metric:
        metric += f"; {runs[0].second_metric} {_spread([run.second_value for run in runs])}"
    cells = [metric, ms, _count(runs, "skipped")]
    if name in UNSCALED:
        cells += ["", "", _share(runs) if "16, no" in name else "", _dead(runs), ""]
        return f"| {title} | {label} | {' | '.join(cells)} |"
    good = "" if best is None or name.startswith("static") else _to_good(runs, best)
    if name == BLOCKS:
        cells += [_count(runs, "wasted"), "", "", _dead(runs), ""]
        return f"| {title} | {label} | {' | '.join(cells)} |"
    cells += [_count(runs, "wasted"), good, _share(runs), _dead(runs), _count(runs, "moves")]
    return f"| {title} | {label} | {' | '.join(cells)} |"


def duel(rows: Sequence[Row]) -> Iterator[str]:
    """torch's rule and Headroom, side by side."""
    lines = [
        "| training | skipped, torch | Headroom | underflow, torch | Headroom | "
        "metric, torch | Headroom | Headroom minus torch, per seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    skipped = [0, 0]
    for training in TRAININGS:
        sides = [of_arm(rows, training, name) for name in (TORCHS, HEADROOM)]
        # Only seeds that both have finished can be compared.
        seeds = set.intersection(*({run.seed for run in side if not run.note} for side in sides))
        if not seeds:
            continue
        sides = [[run for run in side if run.seed in seeds] for side in sides]
        cells = [str(sum(run.skipped for run in side)) for side in sides]
        cells += [_share(side) for side in sides]
        values = [{run.seed: run.value for run in side} for side in sides]
        cells += [_spread(list(side.values())) for side in values]
        cells.append(_spread([values[1][seed] - values[0][seed] for seed in sorted(seeds)]))
        lines.append(f"| {training} | {' | '.join(cells)} |")
        skipped = [total + int(cell) for total, cell in zip(skipped, cells[:2], strict=True)]
    if len(lines) > 2:
        lines.append(f"| total | {skipped[0]} | {skipped[1]} | | | | | |")
        yield "torch's rule and `Headroom`, for the seeds that both have finished:"
        yield "\n".join(lines)


def statics(rows: Sequence[Row]) -> Iterator[str]:
    """The metric with every static scale; a dash where every step was skipped."""
    found = [row for row in rows if row.arm.startswith("static") and row.seed == 0]
    scales = [scale for scale in STATIC_SCALES if any(r.arm == static_name(scale) for r in found)]
    if not scales:
        return
    lines = ["| static scale | " + " | ".join(f"2^{scale}" for scale in scales) + " |"]
    lines.append("|---" * (len(scales) + 1) + "|")
    for training in TRAININGS:
        runs = {row.arm: row for row in found if row.training == training}
        cells = []
        for scale in scales:
            run = runs.get(static_name(scale))
            cells.append("" if run is None else "-" if _idle(run) else f"{run.value:.3f}")
        if runs:
            lines.append(f"| {training} | {' | '.join(cells)} |")
    yield "The metric with every static scale. A dash means that every step was skipped."
    yield "\n".join(lines)


def starts(rows: Sequence[Row]) -> Iterator[str]:
    """Wasted steps from many first scales: the most over all trainings and seeds."""
    begun = [(row.arm.split(" from 2^"), row) for row in rows if " from 2^" in row.arm]
    firsts = sorted({int(words[1]) for words, _ in begun})
    if not firsts:
        return
    lines = ["| from | " + " | ".join(f"2^{first}" for first in firsts) + " |"]
    lines.append("|---" * (len(firsts) + 1) + "|")
    for arm in (TORCHS, HEADROOM, "LogMax", "Histogram"):
        cells = []
        for first in firsts:
            wasted = [r.wasted for w, r in begun if w == [arm, str(first)] and not r.note]
            cells.append(str(max(wasted)) if wasted else "")
        if any(cells):
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    yield "The most wasted steps at the start of a run, over all trainings, by initial scale:"
    yield "\n".join(lines)


def _of(rows: Iterable[Row], training: str) -> list[Row]:
    return [row for row in rows if row.training == training]


def _idle(row: Row) -> bool:
    """Whether every step was skipped."""
    return row.skipped + row.excused == row.steps


def _spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there is one."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "NaN"
    middle = f"{mean(known):.4f}"
    return f"{middle} +- {stdev(known):.4f}" if len(known) > 1 else middle


def _count(runs: Sequence[Row], column: str) -> str:
    return _number(mean(getattr(run, column) for run in runs))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _share(runs: Sequence[Row]) -> str:
    share = mean(run.underflow for run in runs if not math.isnan(run.underflow))
    if math.isnan(share):
        return ""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _dead(runs: Sequence[Row]) -> str:
    return f"{_count(runs, 'dead')} of {runs[0].tensors}"


def _to_good(runs: Sequence[Row], best: int) -> str:
    """Steps until the scale stays near the best; "never" if it is not near at the end."""
    counts: list[float] = []
    for run in runs:
        history = measure.unpack(run.history)
        if history and abs(history[-1] - best) > measure.NEAR:
            return f"never (2^{history[-1]:g} at the end)"
        counts.append(measure.steps_to_good(history, best, run.calm_after))
    return _number(mean(counts))
