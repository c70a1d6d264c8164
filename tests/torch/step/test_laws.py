"""The laws of the engine against random calls: the numbers of a loop without a scaler, or an error.

Losses are linear and everything is a power of two or a small whole number, so that the float64 loop
without a scaler is matched exactly. A user of these loops clears gradients that an optimizer has
had before the next backward pass; everything else, such as `update()` anywhere, gradients that are
left for later, a loss that is scaled in one iteration and run in another, is as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from cpu_graph import keep_in_tensors
from gradscale import CallOrderError
from gradscale.torch import GradScaler

Action = tuple[Any, ...]
COUNT = 3
LOSSES = [(1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, -1.0), (1.0, -2.0, 4.0), (3.0, 1.0, 0.0)]
ACTIONS: list[Action] = [
    *(("backward", loss, how) for loss in LOSSES for how in ("scale", "backward", "own")),
    *(("scale", loss) for loss in LOSSES[2:]),
    *[("run",), ("run again",)] * 3,
    *(("step", i) for i in range(COUNT) for _ in range(3)),
    *(("unscale_", i) for i in range(COUNT)),
    *(("clip_grad_norm_", i) for i in range(COUNT)),
    *(("by hand", i) for i in range(COUNT)),
    *(("zero_grad", i, none) for i in range(COUNT) for none in (True, False)),
    *(("apply", several) for several in ((0,), (1,), (0, 1), (0, 1, 2))),
    *[("update",)] * 6,
    *[("update", 2.0**6), ("update", 2.0**-3), ("load", 2.0**9), ("scale setter", 2.0**4)],
]


class Loop:
    """The same loop twice: with a scaler in float32, and without one in float64."""

    def __init__(self, shared: bool, fused: bool, **options: Any) -> None:
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=1, **options)
        self.params = [torch.ones(2, requires_grad=True) for _ in range(COUNT)]
        self.plain = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in self.params]
        self.members = [{k} for k in range(COUNT)]
        if shared:
            self.members[-1].add(0)
        self.optimizers, self.plain_optimizers = (
            [SGD([params[k] for k in sorted(ks)], lr=2.0**-3, fused=fused) for ks in self.members]
            for params in (self.params, self.plain)
        )
        for optimizer in self.optimizers:
            self.scaler.watch(optimizer)
        self.stage = ["ready"] * COUNT
        self.mixed: set[int] = set()
        """The optimizers that must not step."""
        self.unscaled: set[int] = set()
        """The parameters whose gradients are unscaled."""
        self.used: set[int] = set()
        """The parameters whose gradients must be cleared before the next pass."""
        self.waiting: Any = None

    def do(self, action: Action) -> None:
        """Does `action` in both loops, or sees it refused for a reason."""
        getattr(self, action[0].replace(" ", "_").strip("_"))(*action[1:])
        for k, (ours, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            assert ours.tolist() == plain.tolist(), f"parameter {k} after {action}"

    def refused(self, reason: bool, call: Callable[[], Any]) -> bool:
        """Whether `call` was refused, which it must be for a `reason` and not without one."""
        if not reason:
            call()
            return False
        with pytest.raises(CallOrderError):
            call()
        return True

    def owners(self, k: int) -> list[int]:
        return [i for i, ks in enumerate(self.members) if k in ks]

    def sharing(self, i: int) -> list[int]:
        return [j for j, ks in enumerate(self.members) if ks & self.members[i]]

    def has(self, i: int) -> set[int]:
        """The parameters of an optimizer that have gradients."""
        return {k for k in self.members[i] if self.params[k].grad is not None}

    def clear(self, k: int) -> None:
        self.params[k].grad = self.plain[k].grad = None
        self.unscaled.discard(k)
        self.used.discard(k)
        self.mixed -= {i for i in self.mixed if not self.has(i)}

    # Backward passes.

    def losses(self, factors: tuple[float, ...]) -> list[Any]:
        return [
            sum(f * p.sum() for p, f in zip(params, factors, strict=True) if f)
            for params in (self.params, self.plain)
        ]

    def clear_used(self) -> None:
        """What a user does before a pass."""
        for k in list(self.used):
            self.clear(k)

    def begin(self, reached: set[int]) -> None:
        """What a pass does to optimizers whose gradients are unscaled."""
        for i in range(COUNT):
            if self.stage[i] == "unscaled" and not self.has(i):
                self.stage[i] = "ready"
            if self.stage[i] == "unscaled" and reached & self.members[i]:
                self.mixed |= set(self.sharing(i))
        for k in reached & self.unscaled:
            self.mixed |= {i for i in self.owners(k) if self.stage[i] != "stepped"}

    def backward(self, factors: tuple[float, ...], how: str) -> None:
        ours, plain = self.losses(factors)
        reached = {k for k, factor in enumerate(factors) if factor}
        self.clear_used()
        if how == "own":
            there = {k for k in reached if self.params[k].grad is not None}
            unscaled = [i for i in range(COUNT) if self.stage[i] == "unscaled" and self.has(i)]
            spoils = there & self.unscaled or any(reached & self.members[i] for i in unscaled)
            if spoils:
                self.refused(True, lambda: self.scaler.backward(ours, loss_id=1))
                return
        self.begin(reached)
        if how == "own":
            self.scaler.backward(ours, loss_id=1)
        elif how == "scale":
            self.scaler.scale(ours).backward()
        elif how == "backward":
            self.scaler.backward(ours)
        plain.backward()

    def scale(self, factors: tuple[float, ...]) -> None:
        ours, plain = self.losses(factors)
        self.waiting = self.scaler.scale(ours), plain, {k for k, f in enumerate(factors) if f}

    def run(self) -> None:
        self.run_again()
        self.waiting = None

    def run_again(self) -> None:
        if self.waiting is not None:
            ours, plain, reached = self.waiting
            self.clear_used()
            self.begin(reached)
            ours.backward(retain_graph=True)
            plain.backward(retain_graph=True)

    # Steps.

    def cannot(self, i: int) -> bool:
        return self.stage[i] == "stepped" or (i in self.mixed and bool(self.has(i)))

    def may(self, i: int) -> bool:
        """Whether there are gradients for an optimizer, or an error to be seen."""
        fresh = self.has(i) and not self.used & self.members[i]
        return bool(fresh) or self.stage[i] == "stepped"

    def step(self, i: int) -> None:
        call = lambda: self.scaler.step(self.optimizers[i])  # noqa: E731
        if self.may(i) and not self.refused(self.cannot(i), call):
            self.had(i)

    def had(self, i: int) -> None:
        self.plain_optimizers[i].step()
        self.stage[i] = "stepped"
        self.unscaled |= self.has(i)
        stepped = {
            k for k in self.has(i) if all(self.stage[j] == "stepped" for j in self.owners(k))
        }
        self.used |= stepped

    def unscale(self, i: int) -> None:
        call = lambda: self.scaler.unscale_(self.optimizers[i])  # noqa: E731
        twice = self.stage[i] == "unscaled"
        if self.may(i) and not self.refused(twice or self.cannot(i), call):
            self.stage[i] = "unscaled"
            self.unscaled |= self.has(i)

    def clip_grad_norm(self, i: int) -> None:
        call = lambda: self.scaler.clip_grad_norm_(self.optimizers[i], 1e30)  # noqa: E731
        if self.may(i) and not self.refused(self.cannot(i), call):
            self.stage[i] = "unscaled"
            self.unscaled |= self.has(i)

    def by_hand(self, i: int) -> None:
        """`optimizer.step()` after `unscale_()`, without the scaler."""
        if self.stage[i] == "unscaled" and self.may(i) and i not in self.mixed:
            self.optimizers[i].step()
            self.plain_optimizers[i].step()
            self.used |= self.has(i)

    def zero_grad(self, i: int, none: bool) -> None:
        for optimizer in (self.optimizers[i], self.plain_optimizers[i]):
            optimizer.zero_grad(set_to_none=none)
        for k in self.members[i] if none else ():
            self.clear(k)

    def apply(self, several: tuple[int, ...]) -> None:
        optimizers = [self.optimizers[i] for i in several]
        if not all(map(self.may, several)):
            return
        if self.refused(any(map(self.cannot, several)), lambda: self.scaler.apply(optimizers)):
            # Some may be unscaled by now, which is no harm: they cannot be added to.
            raise Ended
        for i in several:
            self.plain_optimizers[i].step()
        for i in several:
            for k in self.members[i]:
                self.clear(k)
        self.end()

    # The scale.

    def end(self) -> None:
        """An iteration ends."""
        self.used |= {k for k in self.unscaled if self.params[k].grad is not None}
        for i in self.mixed:
            self.used |= self.has(i)
        self.stage = ["ready"] * COUNT
        self.unscaled, self.mixed = set(), set()

    def update(self, *new: float) -> None:
        idle = all(stage == "ready" for stage in self.stage) and not new
        if self.scaler._scale is not None:
            if not self.refused(idle, lambda: self.scaler.update(*new)):
                self.end()

    def load(self, scale: float) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale})
        self.end()

    def scale_setter(self, scale: float) -> None:
        self.scaler._scale = torch.tensor(scale)
        self.end()


class Ended(Exception):
    """The rest of a sequence cannot be compared."""


SEQUENCES = st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=24)


@pytest.mark.parametrize("tensors", [False, True])
@settings(max_examples=600, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
@given(actions=SEQUENCES, shared=st.booleans(), fused=st.booleans(), recheck=st.booleans())
def test_any_calls_give_the_numbers_of_the_loop_without_a_scaler_or_an_error(
    tensors: bool, actions: list[Action], shared: bool, fused: bool, recheck: bool
) -> None:
    loop = Loop(shared, fused, recheck=recheck)
    if tensors:
        keep_in_tensors(loop.scaler)
    try:
        for action in actions:
            loop.do(action)
    except Ended:
        return
