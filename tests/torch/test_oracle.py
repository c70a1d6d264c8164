"""Random calls, legal and illegal, to torch's scaler and to ours: nothing may differ but the table.

A sequence is a plain list of actions, and every action means something in every state. So it is
drawn as a list rather than by a RuleBasedStateMachine: there are no preconditions or bundles to
keep track of, drawing takes two choices per action, hypothesis shrinks by deleting and simplifying
elements, and a rare sequence can be written down as an @example, which a state machine cannot take.

What an action does in both worlds is in support/oracle_pair.py, what torch must be made to do for
each row in support/oracle_reference.py.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from gradscale.torch import GradScaler
from oracle_ledger import OPTIMIZERS, Setup
from oracle_pair import Action, Mismatch, check
from oracle_reference import PATIENCE, PERIOD

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "differences.md"
ROWS = re.findall(r"^\| `([\w-]+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
INF, NAN = float("inf"), float("nan")
USUAL = tuple((v, 2.0, -0.25) for v in (1.0, -0.5, 4.0, 2.0**-12, 0.3, -7.1, 1000.0))
EXTREME = tuple(
    values
    for v in (0.0, INF, NAN, 1e38, -3e38, 1e-38)
    for values in ((v, 1.0, -2.0), (v, v, v), (0.5, 3.0, v))
)
ODD = (NAN, INF, 0.0, -1.0)
BAD_SETTINGS = (
    *product(["growth_factor"], (1.0, 0.5, *ODD)),
    *product(["backoff_factor"], (1.0, 2.0, *ODD)),
    *product(["growth_interval"], (0, -3)),
)


class Numbers(NamedTuple):
    """What scales and factors are drawn from."""

    scales: tuple[float, ...]
    growths: tuple[float, ...]
    backoffs: tuple[float, ...]


POWERS = Numbers(
    (1.0, 8.0, 2.0**10, 2.0**16, 2.0**-13, 2.0**-14, 2.0**63, 2.0**66, 2.0**-16, 0.25),
    (2.0, 4.0),
    (0.5, 0.25),
)
ANY = Numbers((1000.0, 0.3, 3e-5, 7e10, 65536.0, 1.7), (1.5, 3.0, 2.0, 1.001), (0.3, 0.9, 0.5))


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's scaler asks to see whether it must disable itself."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)


def setups(numbers: Numbers) -> st.SearchStrategy[Setup]:
    """How worlds begin."""
    arguments = st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from(numbers.scales),
            "growth_factor": st.sampled_from(numbers.growths),
            "backoff_factor": st.sampled_from(numbers.backoffs),
            "growth_interval": st.sampled_from((1, 2, 3, 2000)),
            "enabled": st.sampled_from((True,) * 19 + (False,)),
        }
    )
    return st.builds(
        Setup,
        st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=3).map(tuple),
        st.integers(1, 2),
        st.sampled_from((False, False, True)),
        st.sampled_from(("float32",) * 6 + ("float16", "bfloat16")),
        arguments.map(lambda chosen: tuple(chosen.items())),
        st.sampled_from(("cpu",) * 9 + ("cuda",)),
        st.booleans(),
    )


def pools(numbers: Numbers) -> list[tuple[int, list[Action]]]:
    """Concrete actions by kind, the simplest first, and how often a kind is drawn."""
    dice = random.Random(0)
    params, optimizers, both = range(6), range(3), (True, False)
    values, often = [*USUAL, *EXTREME], [*USUAL] * 4 + [*EXTREME]
    terms = [((k, v),) for v in values for k in params]
    terms += [tuple((k, dice.choice(often)) for k in dice.sample(params, 3)) for _ in range(300)]
    batches = [(v,) for v in values]
    batches += [tuple(dice.choices([*often, None], k=3)) for _ in range(300)]
    forms = ("one", "one", "list", "tuple", "map", "half")
    good = [
        *product(["set"], ["growth_factor"], numbers.growths),
        *product(["set"], ["backoff_factor"], numbers.backoffs),
        *product(["set"], ["growth_interval"], (1, 2, 3, 4)),
    ]
    bad = [(call, *setting) for call in ("set", "construct") for setting in BAD_SETTINGS]
    bad += [*product(["update"], (*ODD, 1e39, 1e-45), both), *product(["load_bad"], ODD)]
    edits = product(["edit"], params, (0.5, 3.0, 0.0, 1e38, *ODD), ("fill", "new", "mul"))
    others: list[Action] = [("get",), ("copy", "pickle"), ("copy", "deepcopy")]
    ways, zeros = ("step", "clip", "spoil", "early"), ("none", "zeros", "keep")
    return [
        (6, [*product(["iteration"], batches, ways, zeros)]),
        (6, [*product(["backward"], terms, forms)]),
        (5, [*product(["step"], optimizers)]),
        (3, [*product(["unscale"], optimizers)]),
        (3, [("update",)]),
        (2, [*product(["zero"], optimizers, both)]),
        (2, [*edits]),
        (1, [*product(["clip"], optimizers, (1.0, 0.01, 1e30))]),
        (1, [*product(["closure"], optimizers, often, both)]),
        (1, [*product(["update"], (*numbers.scales, 8, 1024), both)]),
        (1, good),
        (1, bad),
        (1, [*product(["load"], ("torch", "ours", "own"), ("same", "fresh")), ("save",)]),
        (1, [*others * 10, *product(["scale"], terms[:30], forms)]),
    ]


def sequences(numbers: Numbers) -> st.SearchStrategy[list[Action]]:
    """Lists of actions."""
    kinds = [st.sampled_from(pool) for weight, pool in pools(numbers) for _ in range(weight)]
    # Three lists, because hypothesis seldom makes one longer than 6.
    part = st.lists(st.one_of(kinds), max_size=10)
    return st.tuples(part, part, part).map(lambda parts: [*parts[0], *parts[1], *parts[2]])


# One sequence per row that surely exercises it.

A, BAD = (1.0, 2.0, -0.25), (INF, 1.0, -2.0)
GOOD_STEP, BAD_STEP = ("iteration", (A,), "step", "none"), ("iteration", (BAD,), "step", "none")


def start(scale: float = 8.0, interval: int = 1, **changes: Any) -> Setup:
    """A setup with that scale."""
    arguments = (("init_scale", scale), ("growth_interval", interval))
    return Setup(**{"settings": arguments, **changes})


EXAMPLES: dict[str, tuple[Setup, list[Action]]] = {
    "bounds": (
        start(2.0**-14),
        [("backward", ((0, A),), "one"), ("edit", 0, INF, "fill"), ("step", 0), ("update",)],
    ),
    "nonfinite-loss": (start(), [BAD_STEP] * (PATIENCE + PERIOD + 1) + [GOOD_STEP, BAD_STEP]),
    "fits": (
        start(2.0**-13),
        [("scale", ((0, A),), "one"), ("edit", 0, 1e38, "new"), ("step", 0), ("update",)],
    ),
    "counter": (
        start(interval=3),
        [GOOD_STEP, GOOD_STEP, ("set", "growth_interval", 1), GOOD_STEP],
    ),
    "skipped-gradients": (start(), [("iteration", (BAD,), "step", "keep"), GOOD_STEP]),
    "recheck": (start(recheck=True), [("iteration", (A,), "spoil", "none"), GOOD_STEP]),
    "closure": (start(), [("closure", 0, A, True), ("update",), ("closure", 0, A, False)]),
    "half-gradients": (start(dtype="float16"), [GOOD_STEP, GOOD_STEP]),
    "half-loss": (
        start(2.0**16),
        [("backward", ((0, A),), "half"), ("step", 0), ("update",), GOOD_STEP],
    ),
    "shared-parameter": (start(optimizers=("sgd", "adamw"), shared=True), [GOOD_STEP, GOOD_STEP]),
    "no-gradients": (start(), [("scale", ((0, A),), "one"), ("step", 0), ("update",), GOOD_STEP]),
    "dummy-step": (
        start(interval=1),
        [("iteration", (A,), "step", "zeros"), ("step", 0), ("update",), GOOD_STEP],
    ),
    "stale-scale": (
        start(optimizers=("sgd", "adamw")),
        [
            *(("backward", ((0, A), (1, A)), "list"), ("update", 64.0), ("step", 0), ("step", 1)),
            *(("update",), ("step", 1), GOOD_STEP),
        ],
    ),
    "unscaled-sum": (
        start(),
        [
            *(("backward", ((0, A),), "one"), ("unscale", 0)),
            ("backward", ((0, A),), "one"),
            ("step", 0),
        ],
    ),
    "validation": (start(), [("set", "backoff_factor", NAN), ("load_bad", 0.0), GOOD_STEP]),
    "update-number": (start(), [GOOD_STEP, ("update", 1024), GOOD_STEP]),
    "fused-momentum": (start(optimizers=("sgd-fused",)), [BAD_STEP, GOOD_STEP, GOOD_STEP]),
    "never-disabled": (start(device="cuda"), [GOOD_STEP, BAD_STEP]),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_a_sequence(row: str) -> None:
    assert check(*EXAMPLES[row])[row]


EXPLORE = settings(
    max_examples=3000,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)


def explore(numbers: Numbers, exact: bool, count: int) -> Counter[str]:
    """Runs `count` sequences and the examples; how often each row was exercised."""
    rows: Counter[str] = Counter()

    @settings(EXPLORE, max_examples=count)
    @given(setups(numbers), sequences(numbers))
    def run(setup: Setup, actions: list[Action]) -> None:
        rows.update(check(setup, actions, exact=exact))
        rows["sequences"] += 1

    for sequence in EXAMPLES.values():
        run = example(*sequence)(run)
    run()
    return rows


@pytest.mark.parametrize(
    ("numbers", "exact", "count"),
    [
        (POWERS, True, 300),
        (ANY, False, 150),
        pytest.param(POWERS, True, 3000, marks=pytest.mark.soak),
        pytest.param(ANY, False, 1500, marks=pytest.mark.soak),
    ],
)
def test_random_calls_differ_from_torch_in_nothing_but_the_table(
    numbers: Numbers, exact: bool, count: int
) -> None:
    rows = explore(numbers, exact, count)
    assert rows["sequences"] > count
    assert set(ROWS) <= set(rows)
    told = {name for name in rows if name not in ("sequences", "actions")}
    assert {name for name in told if not name.startswith("ended")} <= set(ROWS)


# The comparison itself: each planted fault is found by a short random search.


class HalvesTwice(GradScaler):
    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if new_scale is None and self.get_scale() < before:
            self._scale = self._scale * 0.5


class GrowsLate(GradScaler):
    def update(self, new_scale: Any = None) -> None:
        late = self._get_growth_tracker() + 1 == self.get_growth_interval()
        live = self._growth_tracker is not None and new_scale is None
        if late and live and self.get_growth_interval() > 1:
            self._growth_tracker = self._growth_tracker - 1
        super().update(new_scale)


class DividesByTheScaleOfNow(GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for iteration in (self._pipeline.passes.last, self._pipeline.passes.iteration):
            if iteration is not None:
                iteration.scale = self._state.current()
        for entry in self._pipeline.entries.all:
            entry.left = None
        return super().step(optimizer, *args, **kwargs)


class UnscalesTooLittleBeforeGrowth(GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self._get_growth_tracker() + 1 == self.get_growth_interval():
            for param in optimizer.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad.mul_(2)


class ForgetsTheCounter(GradScaler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_growth_tracker": 0}


class StepsOnInfinity(GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and not self.outcome(optimizer).applied:
            optimizer.step()
        return result


@pytest.mark.parametrize(
    "wrong",
    [
        HalvesTwice,
        GrowsLate,
        DividesByTheScaleOfNow,
        UnscalesTooLittleBeforeGrowth,
        ForgetsTheCounter,
        StepsOnInfinity,
    ],
)
def test_a_planted_fault_is_found(wrong: type[GradScaler]) -> None:
    def search() -> None:
        for setup, actions in EXAMPLES.values():
            check(setup, actions, scaler=wrong)

        @settings(EXPLORE, max_examples=200, phases=(Phase.generate,))
        @given(setups(POWERS), sequences(POWERS))
        def run(setup: Setup, actions: list[Action]) -> None:
            check(setup, actions, scaler=wrong)

        run()

    with pytest.raises(Mismatch) as caught:
        search()
    assert not isinstance(caught.value.__cause__, TypeError | AttributeError)
