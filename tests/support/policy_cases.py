"""The policies and the histories that the tests of the rules walk through, and the plain walk.

Adding a policy to every test of them is one line in POLICIES.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradscale.policy import (
    Dynamic,
    GradStats,
    Headroom,
    Histogram,
    LogMax,
    LogMaxState,
    Off,
    Policy,
    State,
    Static,
    scalars,
)
from gradscale.policy.arrays import new

History = list[GradStats]
Walk = Callable[[Policy, History], list[State]]

GOOD = GradStats(finite=True, amax=1.5, exponent=1, upper=0.0)
BAD = GradStats(finite=False, amax=math.inf, exponent=0, upper=1.0)
BOTTOM, TOP = 2.0**-126, 2.0**127  # the powers of two that float32 holds as normal numbers
FLAGS = ("finite", "loss_finite", "fits")
NUMBERS = {"amax": "float32", "exponent": "int32", "upper": "float32"}
STEPS = 60


def dynamic(*numbers: float, exact: bool = True) -> Dynamic:
    """A Dynamic by its seven numbers in order, none of them left to its default."""
    others = ("exact", "slow_growth_above")
    names = [field.name for field in dataclasses.fields(Dynamic) if field.name not in others]
    return Dynamic(**dict(zip(names, numbers, strict=True)), exact=exact)


POLICIES: dict[str, Policy] = {
    "Off": Off(),
    "Static": Static(init_scale=2.0**11),
    "Static, inexact": Static(init_scale=1000.1, exact=False),
    "Dynamic": dynamic(2.0**10, 4.0, 0.25, 3, 2, 2.0**-8, 2.0**30),
    "Dynamic, tight bounds": dynamic(8.0, 8.0, 0.125, 2, 3, 4.0, 16.0),
    "Dynamic, restless": dynamic(2.0**-3, 16.0, 2.0**-7, 1, 4, 2.0**-20, 2.0**40),
    "Dynamic, inexact": dynamic(1000.1, 1.7, 0.3, 2, 2, 0.07, 54321.9, exact=False),
    "Dynamic, at the bottom": dynamic(2.0**-124, 4.0, 0.25, 2, 3, BOTTOM, 2.0**-80),
    "Dynamic, at the top": dynamic(2.0**126, 4.0, 0.25, 2, 2, 2.0**90, TOP),
    "Dynamic, inexact at the top": dynamic(3e38, 1.7, 0.3, 2, 2, 1e30, 3.4e38, exact=False),
    "Dynamic, slower above 2": replace(
        dynamic(2.0**2, 4.0, 0.25, 2, 2, 2.0**-8, 2.0**30), slow_growth_above=2.0
    ),
    "Headroom": Headroom(
        init_scale=2.0**9, margin=3, memory=5, forget=9, pause=2, min_scale=2.0**-9,
        max_scale=2.0**40, format="float8_e5m2",
    ),
    "Headroom, anywhere": Headroom(
        init_scale=2.0**-120, margin=1, memory=1, forget=1, pause=1, min_scale=BOTTOM,
        max_scale=TOP, format="bfloat16",
    ),
    "Headroom, skipping spikes": Headroom(
        init_scale=2.0**9, margin=3, memory=5, forget=9, pause=2, min_scale=2.0**-9,
        max_scale=2.0**40, format="float8_e5m2", spikes="skip",
    ),
    "LogMax": LogMax(
        init_scale=2.0**9, decay=0.9, slow_decay=0.95, deviations=2.0, min_scale=2.0**-9,
        max_scale=2.0**40, format="float8_e5m2",
    ),
    "Histogram": Histogram(
        init_scale=2.0**9, threshold=0.01, interval=2, min_scale=2.0**-9,
        max_scale=2.0**40, format="bfloat16",
    ),
}  # fmt: skip


def eager(xp: Any, flag: Callable[[bool], Any]) -> Walk:
    """A walk one step at a time; `flag` makes what the policy is told of a Python bool.

    Where that is no plain bool, numbers are no plain numbers either.
    """

    def told(value: Any) -> Any:
        if isinstance(value, bool):
            return flag(value)
        return value if value is None or flag is bool else new(xp, None, value)

    def walk(policy: Policy, history: History) -> list[State]:
        state, states = policy.init(xp), []
        for stats in history:
            state = policy.update(state, GradStats(*map(told, stats)), xp)
            states.append(state)
        return states

    return walk


def random_history(seed: int, steps: int) -> History:
    """Random flags in phases, so that long runs of either kind and every mixture occur."""
    # The first step changes nothing: what comes back is what init() gave.
    rng, history = random.Random(seed), [GOOD._replace(loss_finite=False)]
    while len(history) < steps:
        chance, level = rng.choice((0.1, 0.5, 0.95)), rng.randint(-30, 14)
        for _ in range(rng.randint(1, 12)):
            finite = rng.random() < chance
            amax = math.ldexp(0.5 + rng.random() / 4, level + rng.randint(-3, 2))
            amax = amax * rng.choice((0, 1, 1, 1)) if finite else math.inf
            history.append(
                GradStats(
                    finite=finite,
                    amax=amax,
                    loss_finite=rng.random() < 0.85,
                    fits=rng.random() < 0.7,
                    exponent=math.frexp(amax)[1] if finite else 0,
                    upper=rng.choice((0.0, 0.0, 0.005, 0.5)),
                )
            )
    return history[:steps]


HISTORIES = [random_history(seed, STEPS) for seed in range(2)]
plain = eager(scalars, bool)


def agree(kind: type[State], name: str, a: float, b: float) -> bool:
    """Whether two engines may say `a` and `b`: the same, or for `LogMax` nearly the same."""
    if kind is not LogMaxState or name == "scale":
        return a == b
    # 60 averages of logarithms up to 200, each rounded to float32 a few times, log2 to two units
    # in the last place: 60 * 4 * 200 * 2**-23 is below 0.006, and variances are products of two.
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-2)


def differences(expected: list[State], walked: list[State]) -> list[str]:
    """Where a walk leaves the plain one, in value, or float32 and int32, in type."""
    found = []
    if len(expected) != len(walked):
        found.append(f"{len(walked)} steps instead of {len(expected)}")
    for i, (want, got) in enumerate(zip(expected, walked, strict=False)):
        if type(want) is not type(got):
            found.append(f"step {i}: {type(got).__name__} instead of {type(want).__name__}")
            continue
        for name, a, b in zip(want._fields, want, got, strict=True):
            kind = "float32" if isinstance(a, float) else "int32"
            if str(b.dtype).removeprefix("torch.") != kind or b.shape != ():
                found.append(f"step {i}: {name} has type {b.dtype} and shape {tuple(b.shape)}")
            if not agree(type(want), name, a, b.item()):
                found.append(f"step {i}: {name} is {b.item()} instead of {a}")
    return found
