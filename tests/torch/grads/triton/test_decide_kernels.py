"""Kernels decide and move states as the policies do, in one launch with the read or without it.

Every tensor here names its device and its format, because the file is run once more under other
defaults (test_other_settings.py).
"""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernel_tables
from gradscale.policy import Dynamic, GradStats, Headroom, Off, Policy, Static
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads import packed
from gradscale.torch.grads.fields import DECISION, RECORD, REPORT, SUMMARY, offset, value_at

# numpy warns of overflows that are meant to happen in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton", minversion="3.4")
policy_kernel = importlib.import_module("policy_kernel")
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
KINDS = [packed.LOSS_OFF, packed.LOSS_FLAG, packed.LOSS_RAW]
POLICIES: list[Policy] = [
    Off(),
    Static(init_scale=4.0),
    Dynamic(init_scale=2.0**10, growth_interval=2, hysteresis=2),
    Dynamic(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=1, exact=False),
    Headroom(),
    Headroom(memory=3, forget=2, pause=1, min_scale=2.0**-4, max_scale=2.0**40),
]


def single(value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=HERE)


class Step(NamedTuple):
    """One step: a gradient without its scale, the binades of the scale besides, and the loss."""

    size: float
    binades: int
    loss: float


STEPS = st.builds(
    Step,
    st.sampled_from([0.0, 1.0, -2.5, 2.0**-30, 2.0**12, 2.0**120, math.inf, math.nan]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([1.0, 1.0, 1.0, -math.inf, math.nan]),
)


class Model:
    """The rules of a step in plain Python, with states in float32 on the CPU."""

    def __init__(self, policy: Policy, patience: int, period: int) -> None:
        self.policy: Any = policy
        like = torch.zeros((), dtype=torch.float32, device="cpu")
        self.state = policy.init(torch, like=like)
        self.row = self.bad_losses = self.steps = 0
        self._forgiven, self._period = patience, period

    def step(self, grad: float, used: Tensor, loss_finite: bool | None) -> dict[str, Any]:
        """The expected decision and record."""
        non_finite = not math.isfinite(grad)
        amax = torch.tensor(abs(grad), dtype=torch.float32, device="cpu")
        fits = non_finite or bool(torch.isfinite(amax * (1 / used)))
        skipped = non_finite or not fits
        self.row = self.row + 1 if skipped else 0
        self.steps += 1
        counts = True
        if loss_finite is not None:
            self.bad_losses = 0 if loss_finite else self.bad_losses + 1
            over = self.bad_losses - self._forgiven
            counts = loss_finite or (over > 0 and over % self._period == 0)
        before = float(self.state.scale)
        here = amax * (self.state.scale / used)
        stats = GradStats(
            finite=not non_finite,
            amax=here,
            loss_finite=counts,
            fits=fits,
            exponent=torch.frexp(here).exponent.to(torch.int32),
        )
        self.state = self.policy.update(self.state, stats, torch)
        after = float(self.state.scale)
        common = {
            "applied": not skipped,
            "loss_finite": loss_finite is not False,
            "skipped_in_a_row": self.row,
        }
        return {
            "decision": {
                **common,
                "finite": not non_finite,
                "fits": fits,
                "skip": float(skipped),
                "divisor": float(used),
                "amax": "NaN" if math.isnan(grad) else abs(grad),
                "underflow": 0.0,
                "finite_amax": 0.0 if non_finite else abs(grad),
                "grad_norm": "NaN" if skipped else float(amax * (1 / used)),
            },
            "record": {
                **common,
                "step": self.steps,
                "scale": after,
                "before": before,
                "after": after,
            },
            "state": [self.bad_losses, self.steps, *(value.item() for value in self.state)],
            "row": self.row,
            "copy": after,
        }


class Way:
    """A way to decide by kernels, with a state of its own."""

    def __init__(self, policy: Policy, patience: int, period: int) -> None:
        first = policy.init()
        self._type = type(first)
        self.state = packed.pack(first, device=HERE)
        self.row = single(0, torch.int32)
        self.moves = {
            "state": self.state,
            "settings": packed.pack_settings(policy, device=HERE, patience=patience, period=period),
            "rule": packed.rule_of(policy),
        }
        self.record = torch.zeros(len(RECORD), dtype=torch.int32, device=HERE)
        self.copy = single(-1.0)
        self.places = {"row": self.row, "record": self.record, "copy": self.copy}

    def seen(self, decision: Tensor | None) -> dict[str, Any]:
        """What the kernel has written, in plain numbers."""
        counters = [value_at(self.state, f.name, packed.COUNTERS) for f in packed.COUNTERS]
        views = [*counters, *packed.views(self.state, self._type)]
        found = {
            "record": {f.name: value_at(self.record, f.name, RECORD).item() for f in RECORD},
            "state": [value.item() for value in views],
            "row": self.row.item(),
            "copy": self.copy.item(),
        }
        if decision is not None:
            values = {f.name: value_at(decision, f.name).item() for f in DECISION}
            found["decision"] = {k: "NaN" if v != v else v for k, v in values.items()}
        return found


def loss_for(kind: int, loss: float) -> Tensor | None:
    if kind == packed.LOSS_OFF:
        return None
    if kind == packed.LOSS_FLAG:
        return single(math.isfinite(loss), torch.bool)
    return single(loss)


def check(policy: Policy, kind: int, history: list[Step], patience: int = 1) -> None:
    """Raises if one of the ways to decide differs from the model after some step."""
    model = Model(policy, patience, 2)
    fused, agreed, later = (Way(policy, patience, 2) for _ in range(3))
    measure, decide = kernels.module("measure"), kernels.module("decide")
    for step in history:
        used = single(float(model.state.scale) * 2.0**step.binades)
        grad = single(step.size) * used
        tables = kernel_tables.tables([grad.reshape(1)])
        loss_finite = None if kind == packed.LOSS_OFF else math.isfinite(step.loss)
        expected = model.step(float(grad), used.cpu(), loss_finite)
        everything = copy.deepcopy(expected)
        told: dict[str, Any] = {"loss": loss_for(kind, step.loss), "loss_kind": kind}

        decision, counts = measure.measure_and_decide(
            tables, used, **fused.places, **told, **fused.moves
        )
        assert fused.seen(decision) == expected
        assert counts.tolist() == [[int(math.isinf(grad)), int(math.isnan(grad))]]

        summary, counts = measure.measure(tables, 1 / used)
        assert counts.tolist() == [[int(math.isinf(grad)), int(math.isnan(grad))]]
        consensus = kernels.module("consensus")
        norm = value_at(summary, "norm", SUMMARY)
        words = consensus.report(summary, norm, **told, checksum=None, rank=0)
        decision = decide.decide(
            consensus.fold(words[None]),
            summary,
            used,
            **agreed.places,
            loss_kind=kind,
            **agreed.moves,
        )
        seen = agreed.seen(decision)
        if math.isnan(grad):
            assert seen["decision"].pop("amax") == math.inf  # what ranks make of NaN
            del expected["decision"]["amax"]
        assert seen == expected

        before = later.seen(None)
        decision, _ = measure.measure_and_decide(
            tables, used, **later.places, **told, **later.moves, advance=False
        )
        assert later.seen(None) == before
        decide.advance(decision, used, **later.places, **told, **later.moves)
        assert later.seen(decision) == everything


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        # Every policy, and every kind of loss with one policy of each rule that is moved by it.
        pytest.param(policy, kind, id=f"{policy}-{kind}", marks=() if usual else pytest.mark.soak)
        for policy in POLICIES
        for kind in KINDS
        for usual in [kind == packed.LOSS_RAW or policy in (POLICIES[2], POLICIES[5])]
    ],
)
def test_a_short_history_is_that_of_the_policy(policy: Policy, kind: int) -> None:
    losses = (1.0, math.nan, -math.inf, 1.0)
    sizes = (1.0, 2.0**-30, math.inf, math.nan)
    check(policy, kind, [Step(size, 0, loss) for size, loss in zip(sizes, losses, strict=True)])


@settings(max_examples=8 if HERE.type == "cpu" else 200)
@given(
    policy=st.sampled_from(POLICIES),
    kind=st.sampled_from(KINDS),
    history=st.lists(STEPS, min_size=1, max_size=10),
    patience=st.integers(0, 3),
)
def test_any_history_is_that_of_the_policy(
    policy: Policy, kind: int, history: list[Step], patience: int
) -> None:
    check(policy, kind, history, patience)


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_a_norm_above_the_limit_is_clipped_by_the_divisor(max_norm: float) -> None:
    way = Way(Static(init_scale=4.0), 0, 1)
    grads = [torch.full((n,), 8.0, dtype=torch.float32, device=HERE) for n in (1, 3)]
    tables, scale = kernel_tables.tables(grads), single(4.0)
    rest: dict[str, Any] = {"max_norm": max_norm, "loss_kind": packed.LOSS_OFF}
    rest |= {**way.places, **way.moves}
    measure = kernels.module("measure")
    decision, _ = measure.measure_and_decide(tables, scale, loss=None, **rest)
    expected = 4.0 if math.isinf(max_norm) else 4.0 / (0.5 / (4.0 + 1e-6))
    # A sum, two quotients and a product, each rounded once.
    assert value_at(decision, "divisor").item() == pytest.approx(expected, rel=4 * 2.0**-24)
    assert value_at(decision, "grad_norm").item() == 4.0
    summary, _ = measure.measure(tables, 1 / scale, max_norm=max_norm, smallest_normal=8.5)
    assert value_at(summary, "clip", SUMMARY).item() == pytest.approx(4 / expected, rel=2.0**-22)
    assert value_at(summary, "underflow", SUMMARY).item() == 1.0


def words_of(**changes: float) -> Tensor:
    """The folded words of ranks that found nothing wrong, but for `changes`."""
    told = torch.zeros(len(SUMMARY), dtype=torch.float32, device=HERE)
    told[offset(SUMMARY, "fits")] = 1.0
    kind = packed.LOSS_OFF
    report = kernels.module("consensus").report
    words = report(told, told[0], loss=None, loss_kind=kind, checksum=None, rank=0)[0]
    for name, value in changes.items():
        words[offset(REPORT, name)] = value
    return words


@pytest.mark.parametrize(
    ("changes", "applied", "loss_finite", "scale"),
    [
        ({}, True, True, 8.0),
        ({"non_finite": 1.0}, False, True, 2.0),
        ({"unfit": 1.0}, False, True, 8.0),  # Dynamic does not look at it
        ({"has_gradients": 0.0}, False, True, 8.0),
        ({"loss_non_finite": 1.0}, True, False, 4.0),
        ({"penalty_non_finite": 1.0}, True, True, 2.0),
        ({"loss_non_finite": 1.0, "penalty_non_finite": 1.0}, True, True, 2.0),
    ],
)
def test_what_any_rank_found_decides(
    changes: dict[str, float], applied: bool, loss_finite: bool, scale: float
) -> None:
    way = Way(Dynamic(init_scale=4.0, growth_interval=1), 32, 8)
    summary = torch.zeros(len(SUMMARY), dtype=torch.float32, device=HERE)
    decision = kernels.module("decide").decide(
        words_of(**changes),
        summary,
        single(4.0),
        **way.places,
        loss_kind=packed.LOSS_FLAG,
        **way.moves,
    )
    assert value_at(decision, "applied").item() is applied
    assert value_at(decision, "loss_finite").item() is loss_finite
    assert value_at(way.record, "after", RECORD).item() == scale


def rows_of(policy: Policy, histories: int) -> Tensor:
    return packed.pack(policy.init(), device=HERE).repeat(histories, 1)


def columns(rows: Tensor, state_type: Any) -> Any:
    """The fields of several packed states, each as a vector."""
    fields = packed.state_fields(state_type)[len(packed.COUNTERS) :]
    words = rows[:, len(packed.COUNTERS) :].unbind(1)
    return state_type(*(w.contiguous().view(f.dtype) for w, f in zip(words, fields, strict=True)))


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(growth_interval=3, hysteresis=2, min_scale=2.0**-4, max_scale=2.0**20),
        Dynamic(init_scale=2.0**126, growth_interval=1, max_scale=2.0**127),
        Dynamic(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, exact=False),
        Headroom(),
        Headroom(margin=1, memory=3, forget=2, pause=1, min_scale=2.0**-4, max_scale=2.0**40),
        Headroom(init_scale=2.0**-100, memory=2**20, min_scale=2.0**-126, max_scale=2.0**127),
    ],
)
def test_updates_are_the_policys_bit_for_bit(policy: Dynamic | Headroom) -> None:
    histories, steps = (100_000, 64) if HERE.type == "cuda" else (8, 24)
    generator = torch.Generator(HERE).manual_seed(0)
    rows = rows_of(policy, histories)
    kind = type(policy.init())
    if kind._fields[1] == "good_steps":
        rows[0, 3] = 2**31 - 2  # the end of the counter
    slow = columns(rows, kind)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=HERE, dtype=torch.float32)

    level = torch.floor(random(histories) * 42 - 30)
    settings = packed.pack_settings(policy, device=HERE)
    for step in range(steps):
        flags = random(4, histories)
        loss_finite, fits = flags[0] < 0.9, flags[1] < 0.9
        amax = torch.exp2(level + 6 * flags[2]) * slow.scale * (flags[3] < 0.95)
        finite = amax < 65504 if isinstance(policy, Headroom) else flags[3] < 0.7
        losses = loss_finite if step % 3 else None
        policy_kernel.update(rows, finite, fits, amax, losses, settings, packed.rule_of(policy))
        told = GradStats(
            finite=finite,
            amax=amax,
            loss_finite=True if losses is None else losses,
            fits=fits,
            exponent=torch.frexp(amax).exponent.to(torch.int32),
        )
        slow = policy.update(slow, told, torch)  # type: ignore[arg-type]
        fast = columns(rows, kind)
        assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True)), step
    assert len(set(fast.scale.tolist())) > 2  # else this shows little
    assert not rows[:, : len(packed.COUNTERS)].any()


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_gradients_are_multiplied(dtype: torch.dtype) -> None:
    grads = [torch.full((n,), 3.0, dtype=dtype, device=HERE) for n in (1, 5000)]
    tables, rescale = kernel_tables.tables(grads), kernels.module("rescale")
    rescale.multiply(tables, single(0.5))
    assert all(bool((grad == 1.5).all()) for grad in grads)
