"""The policies whose scale is constant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from gradscale.policy.arrays import new, scalars
from gradscale.policy.settings import as_flag, as_scale, call_of, store
from gradscale.policy.stats import GradStats


class ScaleState(NamedTuple):
    """The state of `Static` and `Off`: only a scale."""

    scale: Any
    """The factor that the loss is multiplied by (float32)."""


@dataclass(frozen=True, kw_only=True)
class Off:
    """No scaling: the scale is always 1. Steps with gradients that are not finite are skipped.

    Examples:
        >>> Off().update(Off().init(), GradStats(finite=False))
        ScaleState(scale=1.0)
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ()
    init_scale: ClassVar[float] = 1.0

    def init(self, xp: Any = scalars, like: Any = None) -> ScaleState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        return ScaleState(new(xp, like, 1.0))

    def update(self, state: ScaleState, stats: GradStats, xp: Any = scalars) -> ScaleState:
        """Returns the same state."""
        return state


@dataclass(frozen=True, kw_only=True)
class Static:
    """A constant scale. Steps with gradients that are not finite are skipped.

    Examples:
        >>> Static(1024.0).init()
        ScaleState(scale=1024.0)
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ()
    init_scale: float = field(kw_only=False)
    exact: bool = True
    """Whether the scale must be a power of two, so that unscaling is exact."""

    def __post_init__(self) -> None:
        as_flag("exact", self.exact)
        store(self, "init_scale", as_scale("init_scale", self.init_scale, self.exact))

    def init(self, xp: Any = scalars, like: Any = None) -> ScaleState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        return ScaleState(new(xp, like, self.init_scale))

    def update(self, state: ScaleState, stats: GradStats, xp: Any = scalars) -> ScaleState:
        """Returns the same state."""
        return state
