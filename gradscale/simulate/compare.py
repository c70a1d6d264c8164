"""Several policies on several histories, as rows of a table."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradscale.errors import SettingError
from gradscale.policy import NAMES, POLICIES, Policy, as_policy
from gradscale.simulate.histories import KINDS, History, made_up, recorded
from gradscale.simulate.walk import walk

HEADINGS = ("history", "policy", "skipped", "wasted", "moves", "underflow", "scale", "below", "M/s")
NOTES = (
    "skipped: steps of 1,000 that were not applied although their loss was finite. wasted: those "
    "of them among the first 20 steps or before the first applied step. moves: changes of the "
    "scale in 1,000 steps. underflow: share of the elements below the smallest normal float16 "
    "number, for gradients whose logarithms have a logistic distribution with scale 1.2. scale: "
    "mean of log2(scale) over all steps. below: binades between the median scale and the highest "
    "constant scale that skips no more steps. M/s: million policy steps per second."
)
DEFAULT = ("Dynamic()", "Headroom()", "LogMax()", "Histogram()")


class Row(NamedTuple):
    """Means over all runs of one history under one policy."""

    history: str
    policy: str
    skipped: float
    wasted: float
    moves: float
    underflow: float
    log2_scale: float
    below: float
    steps_per_second: float


def compare(
    histories: Sequence[str], policies: Sequence[str], steps: int, runs: int, seed: int
) -> list[Row]:
    """A row for every history, by its kind or its file, and every policy, as it would be typed."""
    rules = [(text, parse(text)) for text in policies or DEFAULT]
    rows = []
    for name in histories or KINDS:
        is_file = name not in KINDS and Path(name).exists()
        history = recorded(Path(name)) if is_file else made_up(name, steps, runs, seed)
        rows += [_row(name, history, text, rule) for text, rule in rules]
    return rows


def parse(text: str) -> Policy:
    """The policy that `text` builds: a name, and settings that are numbers or strings.

    >>> parse("Headroom(margin=3)").margin
    3
    """
    try:
        call: Any = ast.parse(text.strip(), mode="eval").body
        call = call if isinstance(call, ast.Call) else ast.Call(call, [], [])
        settings = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if None in settings:
            raise ValueError
        if not call.args and call.func.id in NAMES:
            return as_policy(call.func.id, **settings)
        return POLICIES[call.func.id](*map(ast.literal_eval, call.args), **settings)
    except SettingError:
        raise
    except (SyntaxError, ValueError, KeyError, AttributeError, TypeError):
        raise SettingError(
            f"policy must be one of {', '.join(POLICIES)} with settings by name, such as "
            f"Headroom(margin=3), got {text!r}."
        ) from None


def _row(name: str, history: History, text: str, policy: Policy) -> Row:
    """The row of one walk."""
    begin = time.perf_counter()
    report = walk(policy, history)
    taken = time.perf_counter() - begin
    steps = len(history.amax)
    mean = {name: float(np.mean(value)) for name, value in report._asdict().items()}
    return Row(
        history=name,
        policy=text,
        skipped=mean["skipped"] / steps,
        wasted=mean["wasted"],
        moves=mean["moves"] / steps,
        underflow=mean["underflow"],
        log2_scale=mean["scales"],
        below=mean["below"],
        steps_per_second=history.amax.size / taken,
    )


def cells(row: Row) -> list[str]:
    """`row` as the table shows it."""
    return [
        row.history,
        row.policy,
        f"{row.skipped * 1000:.2f}",
        f"{row.wasted:.2f}",
        f"{row.moves * 1000:.1f}",
        f"{row.underflow * 100:.2f} %",
        f"{row.log2_scale:.1f}",
        f"{row.below:.1f}",
        f"{row.steps_per_second / 1e6:.1f}",
    ]
