"""The rules that move the scale, each written once.

A policy is frozen settings and two pure functions: `init` gives the first state, `update` the state
after a step. The functions use only operations that numpy, torch, jax.numpy and keras.ops spell
alike, so one text serves every framework; `scalars` below is the same vocabulary for plain Python
numbers. A state is float32 and int32 everywhere: constants are made with the state's own type,
because a bare Python float would promote it.
"""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32


class GradStats(NamedTuple):
    """What one backward pass told us, in plain values or those of the framework that measured."""

    finite: Any
    """bool: every scaled gradient element is finite; if not, the scale was too high."""
    amax: Any = None
    """The largest magnitude among the scaled gradients; None where it is not measured."""
    loss_finite: Any = True
    """bool: the unscaled loss was finite; if not, no scale is to blame."""
    underflow: Any = None
    """Share of the nonzero elements below the smallest normal number; None = not measured."""
    fits: Any = True
    """bool: every unscaled element is finite where it is stored; if not, the scale was too low."""
    exponent: Any = None
    """int32: the frexp exponent of amax, taken by the engine (log2 differs between frameworks)."""


class ScaleState(NamedTuple):
    """The state of a policy that only has a scale."""

    scale: Any
    """The loss is multiplied by this (float32)."""


class DynamicState(NamedTuple):
    """The state of `Dynamic`.

    >>> policy = Dynamic(init_scale=8.0, growth_interval=2)
    >>> state = policy.update(policy.init(), GradStats(finite=True))
    >>> state
    DynamicState(scale=8.0, good_steps=1, bad_steps=0)
    >>> policy.update(state, GradStats(finite=False))
    DynamicState(scale=4.0, good_steps=0, bad_steps=1)
    """

    scale: Any
    """The loss is multiplied by this (float32)."""
    good_steps: Any
    """Consecutive finite steps since the scale last grew (int32)."""
    bad_steps: Any
    """Consecutive steps that were not finite (int32)."""


class _Scalars:
    """The array operations that the rules use, for plain numbers kept at float32 precision."""

    float32 = float
    int32 = int

    def full(self, shape: tuple[()], value: float, dtype: type) -> Any:
        return _float32(value) if dtype is float else int(value)

    def full_like(self, like: Any, value: float, dtype: type | None = None) -> Any:
        return self.full((), value, dtype or type(like))

    def where(self, condition: bool, a: Any, b: Any) -> Any:
        chosen = a if condition else b
        return _float32(chosen) if isinstance(chosen, float) else chosen

    minimum = staticmethod(min)
    maximum = staticmethod(max)


def _float32(value: float) -> float:
    """The float32 number nearest to `value`: what an engine's scale would be."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


scalars = _Scalars()


class DefaultBound(float):
    """A bound that nobody gave: it moves out of the way of an `init_scale` beyond it."""


MIN_SCALE = DefaultBound(2.0**-14)
"""The default floor: below it the seed of a float16 backward pass is itself subnormal."""
MAX_SCALE = DefaultBound(2.0**64)
"""The default ceiling."""


@dataclass(frozen=True, kw_only=True)
class Off:
    """No scaling: the scale is 1 for ever. Steps that are not finite are still skipped.

    >>> Off().update(Off().init(), GradStats(finite=False))
    ScaleState(scale=1.0)
    """

    @property
    def init_scale(self) -> float:
        """1.0."""
        return 1.0

    def init(self, xp: Any = scalars, like: Any = None) -> ScaleState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        return ScaleState(_new(xp, like, 1.0))

    def update(self, state: ScaleState, stats: GradStats, xp: Any = scalars) -> ScaleState:
        """The same state."""
        return state


@dataclass(frozen=True, kw_only=True)
class Static:
    """A scale that never moves. Steps that are not finite are skipped.

    >>> Static(init_scale=1024.0).init()
    ScaleState(scale=1024.0)
    """

    init_scale: float
    exact: bool = True
    """Whether the scale must be a power of two, so that unscaling is exact."""

    def __post_init__(self) -> None:
        _flag("exact", self.exact)
        _set(self, "init_scale", _scale("init_scale", self.init_scale, self.exact))

    def init(self, xp: Any = scalars, like: Any = None) -> ScaleState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        return ScaleState(_new(xp, like, self.init_scale))

    def update(self, state: ScaleState, stats: GradStats, xp: Any = scalars) -> ScaleState:
        """The same state."""
        return state


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Raise the scale while gradients stay finite, lower it when they do not.

        if not loss_finite:
            nothing changes
        elif finite:
            bad_steps = 0
            good_steps += 1
            if good_steps >= growth_interval:
                good_steps = 0
                scale = min(scale * growth_factor, max_scale)
        else:
            good_steps = 0
            bad_steps += 1
            if bad_steps >= hysteresis:
                scale = max(scale * backoff_factor, min_scale)

    So it grows *on* the n-th consecutive finite step, and backs off on the n-th consecutive bad one
    and on every further one; a finite step refills the patience.

    >>> policy = Dynamic(init_scale=2.0**16, growth_interval=1)
    >>> policy.update(policy.init(), GradStats(finite=True)).scale == 2.0**17
    True
    >>> policy.update(policy.init(), GradStats(finite=False)).scale == 2.0**15
    True
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    exact: bool = True
    """Whether scale, factors and bounds must be powers of two, so that unscaling is exact."""

    def __post_init__(self) -> None:
        _flag("exact", self.exact)
        for name in ("init_scale", "min_scale", "max_scale"):
            _set(self, name, _scale(name, getattr(self, name), self.exact))
        for name, above, below in (
            ("growth_factor", 1.0, FLOAT32.max),
            ("backoff_factor", 0.0, 1.0),
        ):
            _set(self, name, _factor(name, getattr(self, name), above, below, self.exact))
        for name in ("growth_interval", "hysteresis"):
            _set(self, name, _count(name, getattr(self, name)))
        self._place_bounds()

    def _place_bounds(self) -> None:
        """Lets default bounds give way to `init_scale`; refuses given bounds that exclude it."""
        kept = _float32(self.init_scale)  # what a state will hold
        if isinstance(self.min_scale, DefaultBound):
            _set(self, "min_scale", DefaultBound(min(self.min_scale, self.init_scale, kept)))
        if isinstance(self.max_scale, DefaultBound):
            _set(self, "max_scale", DefaultBound(max(self.max_scale, self.init_scale, kept)))
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise SettingError(
                f"init_scale must lie within min_scale {self.min_scale} and max_scale "
                f"{self.max_scale}, got {self.init_scale}."
            )

    def init(self, xp: Any = scalars, like: Any = None) -> DynamicState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        return DynamicState(_new(xp, like, self.init_scale), _new(xp, like, 0), _new(xp, like, 0))

    def update(self, state: DynamicState, stats: GradStats, xp: Any = scalars) -> DynamicState:
        """The state after a step with these `stats`; `fits` does not matter to this rule."""
        # An array where the state is one, so that a plain bool in `stats` becomes one as well.
        always = state.scale > 0
        finite, loss_finite = always & stats.finite, always & stats.loss_finite
        zero, one = xp.full_like(state.good_steps, 0), xp.full_like(state.good_steps, 1)
        # Held below the end of int32, where one more step would make a counter negative.
        last = xp.full_like(zero, 2**31 - 2)
        good_steps = xp.where(finite, xp.minimum(state.good_steps, last) + one, zero)
        bad_steps = xp.where(finite, zero, xp.minimum(state.bad_steps, last) + one)
        grow = good_steps >= xp.full_like(zero, self.growth_interval)
        lower = bad_steps >= xp.full_like(zero, self.hysteresis)

        def constant(value: float) -> Any:
            return xp.full_like(state.scale, value)

        # Beyond `room` the product would overflow, which numpy warns of.
        ceiling, room = constant(self.max_scale), constant(room_below(self.growth_factor))
        raised = xp.minimum(state.scale, room) * constant(self.growth_factor)
        raised = xp.where(state.scale > room, ceiling, xp.minimum(raised, ceiling))
        lowered = xp.maximum(state.scale * constant(self.backoff_factor), constant(self.min_scale))
        moved = DynamicState(
            scale=xp.where(grow, raised, xp.where(lower, lowered, state.scale)),
            good_steps=xp.where(grow, zero, good_steps),
            bad_steps=bad_steps,
        )
        return DynamicState(
            *(xp.where(loss_finite, new, old) for new, old in zip(moved, state, strict=True))
        )


Policy = Off | Static | Dynamic
State = ScaleState | DynamicState
POLICIES: dict[str, type[Policy]] = {policy.__name__: policy for policy in (Off, Static, Dynamic)}
"""Every policy by its name, as checkpoints spell it."""


def _new(xp: Any, like: Any, value: float) -> Any:
    """A float32 or int32 constant, by the type of `value`."""
    name = "float32" if isinstance(value, float) else "int32"
    dtype = getattr(xp, name, name)  # keras.ops has no dtypes of its own and takes their names
    return (
        xp.full((), value, dtype=dtype) if like is None else xp.full_like(like, value, dtype=dtype)
    )


def room_below(factor: float) -> float:
    """The largest float32 number whose product with `factor` is still a float32 number."""
    factor = _float32(factor)
    room = _float32(FLOAT32.max / factor)
    return room if room * factor <= FLOAT32.max else _float32(room * (1 - 2.0**-24))


def _set(policy: Any, name: str, value: Any) -> None:
    """Settles a field while the frozen dataclass is being made."""
    object.__setattr__(policy, name, value)


def _number(name: str, value: Any) -> float:
    """`value` as a float, or a SettingError."""
    if isinstance(value, DefaultBound):
        return value
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise SettingError(f"{name} must be a number, got {value!r}.") from None


def _scale(name: str, value: Any, exact: bool) -> float:
    """`value` as a scale that float32 can hold, and its reciprocal too."""
    number = _number(name, value)
    lowest, highest = FLOAT32.smallest_normal, FLOAT32.max
    if not lowest <= number <= highest:
        raise SettingError(
            f"{name} must be finite, > 0 and within float32's normal numbers "
            f"({lowest} to {highest}), got {number}."
        )
    return _power_of_two(name, number, exact)


def _factor(name: str, value: Any, above: float, below: float, exact: bool) -> float:
    """`value` as a factor that lies strictly between two numbers, also once it is a float32."""
    number = _number(name, value)
    if not (above < number < below and above < _float32(number) < below) or (
        number < FLOAT32.smallest_normal  # JAX would take it for zero
    ):
        raise SettingError(
            f"{name} must be > {above:g} and < {below:g} in float32's normal numbers, got {number}."
        )
    return _power_of_two(name, number, exact)


def _power_of_two(name: str, number: float, exact: bool) -> float:
    """`number`, or a SettingError if `exact` and it is no power of two."""
    if exact and math.frexp(number)[0] != 0.5:
        raise SettingError(
            f"{name} must be a power of two so that unscaling is exact, got {number}. "
            "Pass exact=False to use it all the same."
        )
    return number


def _flag(name: str, value: Any) -> bool:
    """`value`, or a SettingError if it is no bool."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {value!r}.")
    return value


def _count(name: str, value: Any) -> int:
    """`value` as an int that an int32 counter can reach, or a SettingError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise SettingError(f"{name} must be a whole number, got {value!r}.") from None
    if isinstance(value, bool) or not 1 <= number < 2**31:
        raise SettingError(f"{name} must be a whole number from 1 to 2**31 - 1, got {value!r}.")
    return number
