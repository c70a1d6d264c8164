"""The rule of OpenSeq2Seq: the scale from the distribution of log2 of the largest gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32, format_named
from gradscale.policy.arrays import log2_of, new, power_of_two, scalars, where_all
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, call_of, check
from gradscale.policy.stats import GradStats, demand


class LogMaxState(NamedTuple):
    """The state of `LogMax`. Logarithms are log2 of the largest unscaled gradient."""

    scale: Any
    """The factor that the loss is multiplied by (float32)."""
    mean: Any
    """Mean of the logarithms over about 100 steps (float32)."""
    slow_mean: Any
    """Mean over about 1,000 steps, used for the variance (float32)."""
    variance: Any
    """Variance of the logarithms over about 1,000 steps (float32)."""
    weight: Any
    """Sum of the weights of the observations in `mean`, from 0 to 1 (float32)."""
    slow_weight: Any
    """The same for `slow_mean` and `variance` (float32)."""


@dataclass(frozen=True, kw_only=True)
class LogMax:
    """Models log2 of the largest gradient as normal; leaves a small probability of overflow.

        x = log2(amax / scale)
        scale = 2**floor(exponent of the ceiling - (mean of x + deviations * its deviation))

    This is the rule of OpenSeq2Seq with three changes: an overflow counts as an x that would just
    overflow, but at most four above the mean (not as 65536, which keeps the scale at its minimum
    for ten thousand steps); a gradient of 0 is ignored (not counted as minus infinity); and the
    ceiling is that of the format. The averages are float32, and their last bits differ between
    frameworks, so a scale at the edge of a binade may differ too.

    Examples:
        >>> policy = LogMax()
        >>> policy.update(policy.init(), GradStats(finite=True, amax=2.0**-10, exponent=-9)).scale
        4398046511104.0
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ("amax",)
    init_scale: float = 2.0**16
    decay: float = 0.99
    """Decay of the mean per step."""
    slow_decay: float = 0.999
    """Decay of the variance per step."""
    deviations: float = 3.09
    """Standard deviations above the mean that must fit; 3.09 leaves a probability of 1 in 1,000."""
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    format: str = "float16"
    """Narrowest format of the backward pass, which gives the ceiling."""

    def __post_init__(self) -> None:
        decay = (0.0, 1.0)
        limits = {"decay": decay, "slow_decay": decay, "deviations": (0.0, FLOAT32.max)}
        check(self, factors=limits)
        if self.deviations > 100:
            raise SettingError(f"deviations must be at most 100, got {self.deviations}.")

    def init(self, xp: Any = scalars, like: Any = None) -> LogMaxState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        zeros = [new(xp, like, 0.0) for _ in LogMaxState._fields[1:]]
        return LogMaxState(new(xp, like, self.init_scale), *zeros)

    def update(self, state: LogMaxState, stats: GradStats, xp: Any = scalars) -> LogMaxState:
        """Returns the state after a step with these `stats`, which must include `amax`."""
        demand(stats, "amax", "LogMax")

        def number(value: float) -> Any:
            return xp.full_like(state.scale, value)

        always = state.scale > 0
        finite = always & stats.finite
        shows = xp.where(finite, always & (stats.amax > 0), always)
        one, zero = number(1.0), number(0.0)
        log2_scale = log2_of(state.scale, xp, zero)
        amax = xp.where(shows & finite, zero + stats.amax, one)
        ceiling = format_named(self.format).ceiling
        x = xp.where(finite, xp.log2(amax), number(ceiling + 1.0)) - log2_scale
        # A long run of bad steps lowers the scale; that does not mean that gradients have grown.
        most = state.mean + number(4.0)
        x = xp.where(finite | (state.weight <= zero), x, xp.minimum(x, most))

        def averaged(old: Any, seen: Any, decay: float, now: Any) -> tuple[Any, Any]:
            """The average after the observation `now`, with bias correction, and its weight."""
            weight = seen * number(decay) + number(1.0 - decay)
            return old + (now - old) * (number(1.0 - decay) / weight), weight

        mean, weight = averaged(state.mean, state.weight, self.decay, x)
        off = x - state.slow_mean
        slow_mean, slow_weight = averaged(state.slow_mean, state.slow_weight, self.slow_decay, x)
        square = xp.where(state.slow_weight > zero, off * (x - slow_mean), zero)
        variance, _ = averaged(state.variance, state.slow_weight, self.slow_decay, square)
        deviation = xp.sqrt(xp.maximum(variance, zero))
        wanted = number(ceiling) - (mean + number(self.deviations) * deviation)
        wanted = xp.minimum(xp.maximum(wanted, number(-126.0)), number(127.0))
        scale = power_of_two(wanted, xp, one)
        scale = xp.where(finite, scale, xp.minimum(scale, state.scale * number(0.5)))
        scale = xp.maximum(scale, number(self.min_scale))
        scale = xp.minimum(scale, number(self.max_scale))
        after = LogMaxState(scale, mean, slow_mean, variance, weight, slow_weight)
        takes = always & stats.loss_finite & shows & xp.where(finite, always & stats.fits, always)
        return where_all(takes, after, state, xp)
