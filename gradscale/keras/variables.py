"""Where the state of a policy and the last outcome are kept: a few variables of Keras.

Numbers are packed, because a compiled step takes microseconds for each array that it is given. The
first two variables are those of Keras' own class, in its order: what reads those reads these.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from keras import ops

from gradscale.formats import Format
from gradscale.monitor import Outcome
from gradscale.policy import DynamicState, GradStats, Policy


class Layout:
    """How the state of a policy is spread over variables."""

    def __init__(self, policy: Policy) -> None:
        first: Any = policy.init()
        self._kind = type(first)
        self._counts = isinstance(first, DynamicState)
        """Whether the step counter is part of the state."""
        kept = {"scale", "good_steps"} if self._counts else {"scale"}
        rest = [name for name in first._fields if name not in kept]
        self._ints = [name for name in rest if isinstance(getattr(first, name), int)]
        self._floats = [name for name in rest if isinstance(getattr(first, name), float)]

    def specs(self, state: Any) -> list[Spec]:
        """The variables, in order, for a state in plain numbers before the first step."""
        counter = state.good_steps if self._counts else 0
        specs = [
            Spec("step_counter", "int32", counter),
            Spec("dynamic_scale", "float32", state.scale),
        ]
        for name, dtype, fields in self._packs():
            specs.append(Spec(name, dtype, [getattr(state, field) for field in fields]))
        floats = [state.scale, math.nan, 0.0, math.inf]
        return [
            *specs,
            Spec("outcome_floats", "float32", floats),
            Spec("outcome_ints", "int32", INTS),
        ]

    def read(self, values: list[Any]) -> tuple[Any, Last]:
        """The state of the policy, and the last outcome, in the values of the variables."""
        counter, scale, *rest = values
        fields = {"scale": scale} | ({"good_steps": counter} if self._counts else {})
        for (_, _, names), packed in zip(self._packs(), rest, strict=False):
            fields |= {name: packed[place] for place, name in enumerate(names)}
        return self._kind(**fields), Last(counter, *rest[-2:])

    def write(self, state: Any, last: Last) -> list[Any]:
        """The values of the variables for a state and an outcome."""
        counter = state.good_steps if self._counts else last.counter
        packs = [
            ops.stack([getattr(state, field) for field in names]) for *_, names in self._packs()
        ]
        return [counter, state.scale, *packs, last.floats, last.ints]

    def _packs(self) -> list[tuple[str, str, list[str]]]:
        """Name, type and fields of the variables that have several fields."""
        packs = [("policy_ints", "int32", self._ints), ("policy_floats", "float32", self._floats)]
        return [pack for pack in packs if pack[2]]


class Spec(NamedTuple):
    """A variable: its name, its type and its first value."""

    name: str
    dtype: str
    first: Any


INTS = [0, 1, 1, 1, 0, 0, 0, 0]
"""applied, finite, fits, loss_finite, skipped_in_a_row, steps, bad_losses, skipped: at first."""


class OnHost(NamedTuple):
    """What a monitor reads, as plain numbers."""

    outcome: Outcome
    steps: int
    """How many steps there have been, applied or skipped."""
    skipped: int
    """How many of them were skipped."""


class Last(NamedTuple):
    """The last outcome and counters, packed."""

    counter: Any
    """int32: finite steps in a row; of Dynamic, since the scale last moved."""
    floats: Any
    """float32, (4,): scale, grad_norm, amax, headroom."""
    ints: Any
    """int32, (8,): see `INTS`."""

    @property
    def outcome(self) -> Outcome:
        """The outcome alone, as tensors."""
        flags = [self.ints[place] != 0 for place in range(4)]
        return Outcome._make([*flags, *(self.floats[i] for i in range(4)), self.ints[4]])

    def on_host(self) -> OnHost:
        """The same as plain numbers, of which two arrays are read. **Waits for the device**."""
        floats: list[float] = ops.convert_to_numpy(self.floats).tolist()
        ints: list[int] = ops.convert_to_numpy(self.ints).tolist()
        flags = [flag != 0 for flag in ints[:4]]
        return OnHost(Outcome._make([*flags, *floats, ints[4]]), ints[5], ints[7])

    @property
    def steps(self) -> Any:
        """int32: how many steps there have been, applied or skipped."""
        return self.ints[5]

    @property
    def bad_losses(self) -> Any:
        """int32: how many losses in a row have not been finite."""
        return self.ints[6]

    def after(
        self, stats: GradStats, applied: Any, scale: Any, bad_losses: Any, format: Format
    ) -> Last:
        """What is kept after a step with these `stats` at `scale`."""
        skipped_before, steps, skipped = self.ints[4], self.steps, self.ints[7]
        none, one = ops.full_like(steps, 0), ops.full_like(steps, 1)
        unknown = ops.full_like(scale, math.nan)
        ceiling = ops.full_like(scale, format.max)
        floats = [
            scale,
            ops.where(applied, stats.norm, unknown),
            stats.amax,
            ops.log2(ceiling / stats.amax),
        ]
        flags = [applied, stats.finite, stats.fits, stats.loss_finite]
        ints = [
            *(ops.where(flag, one, none) for flag in flags),
            ops.where(applied, none, skipped_before + one),
            steps + one,
            bad_losses,
            ops.where(applied, skipped, skipped + one),
        ]
        counter = ops.where(stats.finite, self.counter + ops.full_like(self.counter, 1), none)
        return Last(counter, ops.stack(floats), ops.stack(ints))
