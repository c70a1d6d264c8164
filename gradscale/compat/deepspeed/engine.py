"""Putting our scalers into a DeepSpeed engine, and DeepSpeed's own back."""

from __future__ import annotations

from typing import Any

from gradscale.compat.deepspeed.scaler import DynamicLossScaler, LossScaler
from gradscale.compat.deepspeed.settings import dynamic_policy, refuse_unknown
from gradscale.compat.host_scale import checked
from gradscale.errors import SettingError
from gradscale.policy import Dynamic, Off, Static


def attach(
    engine: Any,
    policy: Dynamic | Static | Off | None = None,
    *,
    on_stuck: str = "warn",
    stuck_after: int = 50,
) -> LossScaler:
    """Replaces the loss scaler of a DeepSpeed engine, and returns the new one.

    Call it after `deepspeed.initialize`, or between `engine.step()` and the next backward pass, on
    every rank alike. **`engine.load_checkpoint` replaces the scaler by the one that was saved**:
    one of ours goes on as it was, and after one of DeepSpeed's call `attach` again.

    Args:
        engine: An engine with ZeRO (stage 1, 2 or 3) and float16.
        policy: The rule that moves the scale. None takes over the settings, the scale and the
            counters of the engine's present scaler.
        on_stuck: "warn", "raise" (a StuckError) or "ignore" after `stuck_after` skipped steps.

    Raises:
        SettingError: The engine has no scaler that can be replaced, or the policy needs
            measurements that ZeRO does not make, or the present settings cannot be translated.
    """
    optimizer = _optimizer(engine)
    scaler = _scaler(optimizer.loss_scaler, policy, on_stuck, stuck_after)
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = scaler, scaler.dynamic
    return scaler


def _scaler(
    present: Any, policy: Dynamic | Static | Off | None, on_stuck: str, stuck_after: int
) -> LossScaler:
    """The scaler with `policy`, or with the settings and the state of `present`."""
    how: dict[str, Any] = {"on_stuck": on_stuck, "stuck_after": stuck_after}
    if policy is not None:
        rule = checked(policy)
        if isinstance(rule, Dynamic):
            return DynamicLossScaler(policy=rule, **how)
        return LossScaler(rule.init_scale, **how)
    if not present.dynamic:
        return LossScaler(present.cur_scale, **how)
    taken = dynamic_policy(
        init_scale=present.cur_scale,
        scale_window=present.scale_window,
        min_scale=present.min_scale,
        delayed_shift=present.delayed_shift,
        consecutive_hysteresis=present.consecutive_hysteresis,
    )
    scaler = DynamicLossScaler(policy=taken, **how)
    own = isinstance(present, DynamicLossScaler)
    # Settings of theirs are in `taken`; ours may have more of them.
    scaler.load_state_dict({"loss_scaler": present}, settings=own)
    return scaler


def detach(engine: Any) -> Any:
    """Puts DeepSpeed's own class back, with our scale and counters; returns that scaler.

    Checkpoints saved from then on can be loaded where gradscale is not installed. The scale grows
    on the step on which ours would have grown.

    Raises:
        SettingError: The engine does not have a scaler of ours, or its policy has settings that
            DeepSpeed's class does not have.
    """
    try:
        from deepspeed.runtime.fp16 import loss_scaler as theirs
    except ImportError as error:
        raise ImportError(
            "detach() needs DeepSpeed: pip install deepspeed.", name="deepspeed"
        ) from error

    optimizer = _optimizer(engine)
    ours = optimizer.loss_scaler
    if not isinstance(ours, LossScaler):
        raise SettingError(
            "detach() needs an engine on which attach() was called, got one with a scaler of "
            f"{type(ours)}."
        )
    if not isinstance(ours, DynamicLossScaler):
        optimizer.loss_scaler = theirs.LossScaler(scale=ours.cur_scale)
        return optimizer.loss_scaler
    refuse_unknown("DeepSpeed", ours.policy)
    back = theirs.DynamicLossScaler(
        init_scale=ours.next_scale,
        scale_window=ours.scale_window,
        min_scale=ours.min_scale,
        delayed_shift=ours.delayed_shift,
        consecutive_hysteresis=True,
        raise_error_at_min_scale=ours.raise_error_at_min_scale,
        dtype=ours.dtype,
    )
    for name in ("cur_iter", "last_overflow_iter", "cur_hysteresis"):
        setattr(back, name, getattr(ours, name))
    optimizer.loss_scaler = back
    return back


def _optimizer(engine: Any) -> Any:
    """The ZeRO optimizer of `engine`, or a SettingError if it has no float16 loss scaler."""
    optimizer = getattr(engine, "optimizer", None)
    if not hasattr(optimizer, "loss_scaler"):
        raise SettingError(
            "The engine must have a ZeRO optimizer, whose loss_scaler can be replaced, got "
            f"{type(optimizer).__name__}. Set zero_optimization.stage to 1, 2 or 3: without ZeRO, "
            "DeepSpeed's optimizers change the scale themselves."
        )
    if not engine.fp16_enabled():
        raise SettingError(
            "The engine must train in float16, because DeepSpeed scales the loss only in float16. "
            "Set fp16.enabled to true."
        )
    return optimizer
