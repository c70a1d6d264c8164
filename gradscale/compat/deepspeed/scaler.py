"""DeepSpeed's loss scalers with our rule: what a ZeRO optimizer keeps as `loss_scaler`.

ZeRO moves the scale first and divides the gradients by `cur_scale` afterwards, so in DeepSpeed the
gradients of a step on which the scale grows are divided by a scale that they were not made with.
Here a scale that has grown becomes `cur_scale` when the next loss is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gradscale.compat.deepspeed.settings import dynamic_policy, is_power_of_two
from gradscale.compat.host_scale import HostScale
from gradscale.errors import SettingError
from gradscale.policy import Dynamic, Static
from gradscale.policy.settings import as_number

_SETTINGS = ("init_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


class LossScaler:
    """A scale that never moves. Steps that are not finite are skipped, by the ZeRO optimizer.

    >>> LossScaler(128.0).loss_scale
    128.0
    """

    dynamic = False
    """Whether the scale moves."""

    def __init__(self, scale: float = 1.0, *, on_stuck: str = "warn", stuck_after: int = 50):
        number = as_number("scale", scale)
        policy = Static(number, exact=is_power_of_two(number))
        self._hold(HostScale(policy, on_stuck, stuck_after))

    def _hold(self, held: HostScale) -> None:
        self._held = held
        self._used: float | None = None
        """The scale of the last step; None if the next loss, or a new scale, came after it."""

    @property
    def policy(self) -> Dynamic | Static:
        """The rule that moves the scale, or that has it."""
        return cast(Dynamic | Static, self._held.policy)

    @property
    def cur_scale(self) -> float:
        """The scale of the gradients: of the last step until the next loss is scaled."""
        return self._held.value if self._used is None else self._used

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._held.set(value)
        self._used = None

    @property
    def loss_scale(self) -> float:
        """The same as `cur_scale`."""
        return self.cur_scale

    @property
    def next_scale(self) -> float:
        """The scale of the next loss."""
        return self._held.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the scale of this step, in float32 at least."""
        self._used = None
        # The product could overflow in a narrower type.
        wide = torch.promote_types(loss.dtype, torch.float32)
        return loss.to(wide) * self.cur_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """The gradients `grad_in` times the scale: a backward hook of a module."""
        return tuple(grad if grad is None else grad * self.cur_scale for grad in grad_in)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` is not finite. Waits for the device."""
        grads = [param.grad for param in params if param.grad is not None]
        return any(not bool(torch.isfinite(grad).all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale after a step; a StuckError or a warning after many skipped ones."""
        # The gradients of a skipped step are dropped, so nothing is divided by its scale.
        self._used = None if overflow else self.cur_scale
        self._held.update(finite=not overflow)

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint, as `gradscale.torch.GradScaler` writes and reads it."""
        return self._held.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], settings: bool = True) -> None:
        """Takes over a checkpoint of gradscale, DeepSpeed or another system that gradscale reads.

        Args:
            state: The checkpoint; of DeepSpeed the state of an optimizer, or
                `{"loss_scaler": scaler}`.
            settings: Whether its settings replace those of the policy.
        """
        self._held.load_state_dict(state, settings)
        self._used = None

    # What a checkpoint of DeepSpeed has of a scaler: our versioned format, and two settings.

    def __getstate__(self) -> dict[str, Any]:
        held = self._held
        return {
            "state": held.state_dict(),
            "on_stuck": held.on_stuck,
            "stuck_after": held.stuck_after,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        policy = Dynamic() if self.dynamic else Static(1.0)
        held = HostScale(policy, state["on_stuck"], state["stuck_after"])
        held.load_state_dict(state["state"])
        self._hold(held)


class DynamicLossScaler(LossScaler):
    """A scale that `gradscale.Dynamic` moves; give its policy, or DeepSpeed's settings by name.

        if not overflow:
            good steps += 1
            if good steps == growth_interval (DeepSpeed: scale_window):
                the scale doubles, from the next loss on
        else:
            if it is the n-th overflow in a row, n >= hysteresis (DeepSpeed: delayed_shift):
                scale = max(scale / 2, min_scale)

    >>> scaler = DynamicLossScaler(policy=Dynamic(init_scale=8.0, growth_interval=1))
    >>> scaler.update_scale(overflow=False)
    >>> scaler.cur_scale, float(scaler.scale_loss(torch.tensor(1.0))), scaler.cur_scale
    (8.0, 16.0, 16.0)

    Args:
        raise_error_at_min_scale: True is `on_stuck="raise"`. **DeepSpeed raises at the first
            overflow at the floor**, and here it takes `stuck_after` skipped steps in a row.
        dtype: The format of the gradients, which is kept and not used.
        policy: What replaces DeepSpeed's settings.
        on_stuck: "warn", "raise" (a StuckError) or "ignore" after `stuck_after` skipped steps.
    """

    dynamic = True
    """Whether the scale moves."""
    consecutive_hysteresis = True
    """Overflows that lower the scale are counted in a row."""

    def __init__(
        self,
        init_scale: float | None = None,
        scale_window: int | None = None,
        min_scale: float | None = None,
        delayed_shift: int | None = None,
        consecutive_hysteresis: bool | None = None,
        raise_error_at_min_scale: bool = False,
        dtype: torch.dtype = torch.float16,
        *,
        policy: Dynamic | None = None,
        on_stuck: str = "warn",
        stuck_after: int = 50,
    ) -> None:
        values = (init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis)
        given = dict(zip(_SETTINGS, values, strict=True))
        self.dtype = dtype
        rule = _chosen(policy, given)
        on_stuck = "raise" if raise_error_at_min_scale else on_stuck
        self._hold(HostScale(rule, on_stuck, stuck_after))

    @property
    def policy(self) -> Dynamic:
        """The rule that moves the scale."""
        return cast(Dynamic, self._held.policy)

    has_overflow_serial = LossScaler.has_overflow

    # The counters that DeepSpeed's class has: with them it grows on the step on which ours would
    # (one step later if the last step was an overflow, as DeepSpeed counts).

    @property
    def cur_iter(self) -> int:
        """Steps so far, plus 1: DeepSpeed grows one step later than `scale_window`."""
        # A checkpoint of another system may have the finite steps and not the number of all.
        return max(self._held.steps, int(self._held.state.good_steps)) + 1

    @property
    def last_overflow_iter(self) -> int:
        """The `cur_iter` from which finite steps are counted."""
        state = self._held.state
        return self.cur_iter - (1 if state.bad_steps else int(state.good_steps) + 2)

    @property
    def cur_hysteresis(self) -> int:
        """Overflows in a row after which the scale is lowered, counted from now."""
        return max(self.policy.hysteresis - int(self._held.state.bad_steps), 1)

    @property
    def scale_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self.policy.growth_factor

    @property
    def scale_window(self) -> int:
        """Consecutive finite steps on the last of which the scale grows."""
        return self.policy.growth_interval

    @property
    def min_scale(self) -> float:
        """The floor."""
        return float(self.policy.min_scale)

    @property
    def delayed_shift(self) -> int:
        """Overflows in a row on the last of which the scale is lowered."""
        return self.policy.hysteresis

    @property
    def raise_error_at_min_scale(self) -> bool:
        """Whether being stuck is an error."""
        return self._held.on_stuck == "raise"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.dtype = state["dtype"]


def _chosen(policy: Dynamic | None, settings: dict[str, Any]) -> Dynamic:
    """`policy`, or the one with DeepSpeed's `settings`; a SettingError if it is not one of both."""
    given = {name: value for name, value in settings.items() if value is not None}
    if policy is None:
        missing = [name for name in settings if name not in given]
        if missing:
            raise SettingError(
                f"DynamicLossScaler needs {', '.join(missing)}, as DeepSpeed's does, or a policy, "
                "as in DynamicLossScaler(policy=gs.Dynamic())."
            )
        return dynamic_policy(**settings)
    if given:
        raise SettingError(
            f"Pass either policy or DeepSpeed's settings, got policy={policy!r} and "
            f"{', '.join(given)}."
        )
    if not isinstance(policy, Dynamic):
        raise SettingError(
            f"policy must be a gs.Dynamic, got {policy!r}. Use LossScaler for a constant scale. "
            "Other policies need measurements that ZeRO does not make."
        )
    return policy
