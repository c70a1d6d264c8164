"""The scale of one loss, in Apex' words and by our rules.

The numbers are plain Python: at the end of every `scale_loss` the host waits for the device once,
as Apex does, and so the host can keep them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gradscale.compat.apex import run_log
from gradscale.errors import StateError
from gradscale.formats import FLOAT32
from gradscale.policy import MIN_SCALE, Dynamic, GradStats, Static
from gradscale.policy.settings import as_count, as_scale
from gradscale.torch.grads import backend
from gradscale.torch.grads.collect import Gradients
from gradscale.torch.grads.scale import Scale, constant
from gradscale.torch.step.masters import fits_float32


def _setting(name: str, ours: str, read: Callable[[str, Any], Any], doc: str) -> Any:
    """A setting of a dynamic scale under Apex' name; a static one has none, and ignores it."""

    def get(scaler: LossScaler) -> Any:
        return getattr(scaler.policy, ours, None)

    def change(scaler: LossScaler, value: Any) -> None:
        scaler._change(ours, read(name, value))

    return property(get, change, doc=doc)


def _bound(name: str, value: Any) -> float:
    """A bound of the scale; None is gradscale's own floor."""
    return MIN_SCALE if value is None else as_scale(name, value, exact=False)


class LossScaler:
    """The scale of one loss, fixed or moving.

        scaler = LossScaler("dynamic")
        scaler.loss_scale()             # 65536.0
        scaler._loss_scale = 2.0**20    # the scale of the next backward pass

    Scripts for Apex set attributes with an underscore: those below do what they do there. Others
    are an AttributeError.

    Args:
        loss_scale: "dynamic", or the scale.
        scale_factor: By what a dynamic scale is multiplied and divided.
        scale_window: After how many finite passes in a row it grows.
        min_loss_scale: Its floor; None is gradscale's own, 2**-14.
    """

    __slots__ = ("__weakref__", "_has_overflow", "policy", "state")

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.policy: Dynamic | Static
        if loss_scale == "dynamic":
            low = MIN_SCALE if min_loss_scale is None else min_loss_scale
            self.policy = Dynamic(
                init_scale=max(min(init_scale, max_loss_scale), low),
                growth_factor=scale_factor,
                backoff_factor=1 / scale_factor,
                growth_interval=scale_window,
                min_scale=low,
                max_scale=max_loss_scale,
                exact=False,
            )
        else:
            self.policy = Static(init_scale=loss_scale, exact=False)  # type: ignore[arg-type]
        self.state: Any = self.policy.init()
        self._has_overflow = False
        """Whether the last pass overflowed; `update_scale` goes by it."""

    def log_to(self, path: Any) -> None:
        """Writes what every backward pass does to a folder: see docs/reference/logs.md."""
        run_log.log_to(self, path)

    _scale_seq_len = _setting(
        "_scale_seq_len", "growth_interval", as_count, "After how many finite passes it grows."
    )
    _min_loss_scale = _setting("_min_loss_scale", "min_scale", _bound, "The floor.")
    _max_loss_scale = _setting("_max_loss_scale", "max_scale", _bound, "The ceiling.")

    @property
    def _loss_scale(self) -> float:
        """The scale; can be set, also beyond its bounds, which hold when it moves."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        self.state = self.state._replace(scale=as_scale("_loss_scale", value, exact=False))

    @property
    def _unskipped(self) -> int:
        """How many finite passes there were in a row; can be set."""
        return getattr(self.state, "good_steps", 0)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if self.dynamic:
            self.state = self.state._replace(good_steps=operator.index(value))

    def _change(self, name: str, value: Any) -> None:
        """Goes on with another setting, and the same state; a static scale has none."""
        if isinstance(self.policy, Dynamic):
            settings = asdict(self.policy) | {name: value}
            low, high = settings["min_scale"], settings["max_scale"]
            settings["init_scale"] = max(min(settings["init_scale"], high), low)
            self.policy = Dynamic(**settings)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return isinstance(self.policy, Dynamic)

    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return float(self.state.scale)

    def multiply(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32 at least."""
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self.loss_scale()

    def update(self, finite: bool, fits: bool = True) -> None:
        """Moves the scale after a backward pass with gradients that were `finite`, or not."""
        self._has_overflow, before = not finite, self.loss_scale()
        self.state = self.policy.update(self.state, GradStats(finite=finite, fits=fits))
        run_log.note(self, before, finite, fits)

    def clear_overflow_state(self) -> None:
        """For loops that check gradients themselves: there was no overflow yet."""
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Moves a dynamic scale by `_has_overflow`, for such loops; whether to skip the step."""
        skip = bool(self._has_overflow) and self.dynamic
        self.update(finite=not self._has_overflow)
        return skip

    def saved(self) -> dict[str, float | int]:
        """The scale and the count of finite passes, under Apex' keys."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def check(self, name: str, scale: float) -> None:
        """A StateError if `scale` is none that float32 can hold."""
        if not FLOAT32.smallest_normal <= scale <= FLOAT32.max and not self.dynamic:
            raise StateError(
                f"{name}: loss_scale must be a normal float32 number, got {scale}. Nothing was "
                "loaded."
            )

    def load(self, scale: float, unskipped: int) -> None:
        """Goes on with these numbers; a dynamic scale is moved to within its bounds."""
        if isinstance(self.policy, Dynamic):
            scale = min(max(scale, self.policy.min_scale), self.policy.max_scale)
            self.state = self.state._replace(scale=scale, good_steps=unskipped, bad_steps=0)
        else:
            self.state = self.state._replace(scale=scale)


class PassResult:
    """Whether the gradients of a backward pass were finite, read from the device when asked."""

    def __init__(self, scaler: LossScaler, finite: Any = True, fits: Any = True) -> None:
        self._scaler = scaler
        self._flags = finite, fits
        self._good: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether it was read, and good."""
        return self._good is True

    def good(self) -> bool:
        """Whether the gradients may be stepped with; moves the scale, the first time.

        **Waits for the device.**
        """
        if self._good is None:
            finite, fits = self._flags
            if isinstance(finite, Tensor):
                finite, fits = torch.stack([finite, fits]).tolist()
            self._good = finite and fits
            self._scaler.update(finite=finite, fits=fits)
        return self._good


def check_and_unscale(
    weights: Iterable[Tensor], plain: Iterable[Tensor], scaler: LossScaler, scale: float
) -> tuple[PassResult, Tensor]:
    """What the gradients of a pass were like, and 1 / `scale`.

    Args:
        weights: Half weights with masters, whose gradients stay as they are.
        plain: Other parameters, whose gradients are divided by `scale` in place.
        scaler: The scaler of the loss.
        scale: The scale of the pass.
    """
    halves, others = (
        [p for p in {id(p): p for p in some}.values() if p.grad is not None]
        for some in (weights, plain)
    )
    devices = [param.device for param in (*halves, *others) if param.device.type != "cpu"]
    if devices:
        here = Scale(torch.full((), scale, dtype=torch.float32, device=devices[0]), None)
    else:
        here = Scale(constant(scale), scale, constant(1 / scale))
    finite: Any = True
    fits: Any = True
    for some, masters in ((halves, True), (others, False)):
        if some:
            wide = masters and scale < 1.0  # where masters can hold what weights cannot
            stats = backend.measure(Gradients(some), here, unscale=not masters, amax=wide).stats
            finite = finite & stats.finite
            fits = fits & (fits_float32(stats, here) if wide else stats.fits)
    return PassResult(scaler, finite, fits), here.inverse
