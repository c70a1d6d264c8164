"""The part of the scaler that holds a policy and its state: getters, setters, checkpoints.

Settings live in the frozen policy and numbers in its state, both in one place; torch's names for
them (`_growth_factor`, `_scale`, `_init_growth_tracker` ...) are views, because other people's code
reads them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradscale import states
from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.policy import POLICIES, DefaultBound, Dynamic, GradStats, Policy, State
from gradscale.torch.unscale import move
from gradscale.torch.window import Window

_LOSSES = "bad_losses"
# A non-finite loss says nothing about the scale, unless it is non-finite *because of* the scale (a
# penalty computed from scaled gradients by hand). So after many in a row, one in a few counts as an
# overflow after all.
_PATIENT_LOSSES, _LOSS_PERIOD = 32, 8


def _setting(name: str, still: float) -> Any:
    """A view of a setting of the policy; `still` where the policy has no such thing."""

    def get(self: ScaleKeeper) -> Any:
        return getattr(self._policy, name, still)

    def set_(self: ScaleKeeper, value: Any) -> None:
        self._set(name, value)

    return property(get, set_)


def _field(holder: str, name: str, missing: Any) -> Any:
    """A view of a field of a state; `missing` where there is none (yet)."""

    def get(self: ScaleKeeper) -> Any:
        return getattr(getattr(self, holder), name, missing)

    def set_(self: ScaleKeeper, value: Any) -> None:
        if getattr(self, holder) is None:
            self._lazy_init_scale_growth_tracker(value.device)
        setattr(self, holder, getattr(self, holder)._replace(**{name: value}))

    return property(get, set_)


class ScaleKeeper(torch.amp.GradScaler):
    """A policy, its state on a device, and everything that reads or sets them."""

    _policy: Policy
    _enabled: bool
    _device: str
    _window: Window | None

    def _keep(self, policy: Policy) -> None:
        """Takes `policy` in its first state, on no device yet."""
        self._policy = policy
        self._initial: State = policy.init()
        self._state: State | None = None
        self._init_bad_losses = 0
        self._bad_losses: Tensor | None = None

    # torch's private names, which Lightning, accelerate, FSDP and torch's tests read.

    _growth_factor = _setting("growth_factor", 1.0)
    _backoff_factor = _setting("backoff_factor", 1.0)
    _growth_interval = _setting("growth_interval", 2000)
    _init_scale = _field("_initial", "scale", 1.0)
    _init_growth_tracker = _field("_initial", "good_steps", 0)
    _scale = _field("_state", "scale", None)
    _growth_tracker = _field("_state", "good_steps", None)

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Puts the state on `dev`."""

        def on_device(value: float | int) -> Tensor:
            dtype = torch.float32 if isinstance(value, float) else torch.int32
            return torch.full((), value, dtype=dtype, device=dev)

        with torch.inference_mode(False):  # the first loss may be that of an evaluation
            self._state = type(self._initial)(*(on_device(value) for value in self._initial))
            self._bad_losses = on_device(self._init_bad_losses)

    def _live(self, call: str) -> State:
        """The state on its device; a CallOrderError if no tensor has told the device yet."""
        if self._state is None:
            raise CallOrderError(
                f"{call} was called before scale(): no loss has been scaled yet. "
                "Call scaler.scale(loss).backward() first in every iteration."
            )
        return self._state

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        state = self._live(f"{funcname}()")
        return state.scale, getattr(
            state, "good_steps", torch.zeros_like(state.scale, dtype=torch.int32)
        )

    # Getters and setters.

    def get_scale(self) -> float:
        """The current scale, 1.0 if disabled. This **waits for the device**."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._state is None else float(self._state.scale)

    def _get_growth_tracker(self) -> int:
        if not self._enabled or self._growth_tracker is None:
            return self._init_growth_tracker if self._enabled else 0
        return int(self._growth_tracker)

    @property
    def policy(self) -> Policy:
        """The rule that moves the scale, with its settings."""
        return self._policy

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows."""
        self._set("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale falls."""
        self._set("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets how many consecutive finite steps make the scale grow."""
        self._set("growth_interval", new_interval)

    def _set(self, name: str, value: Any) -> None:
        if not isinstance(self._policy, Dynamic):
            raise SettingError(
                f"{name} is a setting of Dynamic, and this scaler's policy is {self._policy}."
            )
        # As torch's setters do, this takes any number: also one that is no power of two.
        self._policy = dataclasses.replace(self._policy, exact=False, **{name: value})

    def _set_scale(self, new_scale: float | Tensor) -> None:
        """Sets the scale in place, by the rules of `init_scale`; default bounds give way to it."""
        scale = self._live("update()").scale
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise SettingError(
                    "new_scale must be a number or a tensor of one element that needs no gradient, "
                    f"got shape {tuple(new_scale.shape)}, requires_grad={new_scale.requires_grad}."
                )
            if new_scale.device.type != "cpu":
                # Reading it would wait for the device, so a bad one leaves the scale as it is
                # instead of raising.
                wanted = move(new_scale.detach().reshape(()), scale.device).to(torch.float32)
                low, high = self._bounds()
                usable = torch.isfinite(wanted) & (wanted > 0)
                scale.copy_(torch.where(usable, wanted.clamp(low, high), scale))
                return
            new_scale = new_scale.item()
        # The constructor knows the rules: a default bound gives way here as it does there.
        policy = self._policy if isinstance(self._policy, Dynamic) else Dynamic()
        try:
            checked = dataclasses.replace(policy, init_scale=new_scale, exact=False)
        except SettingError as error:
            raise SettingError(f"update({new_scale!r}): {error}") from None
        if policy is self._policy:
            self._policy = dataclasses.replace(checked, init_scale=policy.init_scale)
        scale.fill_(checked.init_scale)

    def _bounds(self) -> tuple[float, float]:
        policy = self._policy if isinstance(self._policy, Dynamic) else Dynamic()
        return policy.min_scale, policy.max_scale

    # Moving.

    def _move(self, finite: Tensor, fits: Tensor, window: Window | None) -> None:
        """Tells the policy what the gradients of `window` were like, and takes its answer."""
        live = self._live("update()")
        loss_finite: Tensor | bool = True
        news = None
        if window is not None:
            if window.penalty_finite is not None:
                finite = finite & window.penalty_finite
            if window.finite is None or window.captured:
                loss_finite = self._loss_finite(window)
            else:
                # A further update() for the same backward passes: only an overflow that is news
                # counts.
                news = window.finite & ~finite
                if window.loss_finite is not None:
                    news = news & window.loss_finite
                finite = finite & window.finite
            window.finite = finite
        stats = GradStats(finite=finite, loss_finite=loss_finite, fits=fits)
        moved = self._policy.update(live, stats, torch)  # type: ignore[arg-type]
        for value, new in zip(live, moved, strict=True):
            value.copy_(new if news is None else torch.where(news, new, value))

    def _loss_finite(self, window: Window) -> Tensor | bool:
        """bool: whether the losses of `window` were finite, as the policy is told."""
        if window.loss_finite is None or self._bad_losses is None:
            return True
        finite, count = window.loss_finite, self._bad_losses
        if window.penalty_finite is not None:
            finite = finite | ~window.penalty_finite  # non-finite through the scale: it is to blame
        count.copy_(torch.where(finite, torch.zeros_like(count), count + 1))
        over = count - _PATIENT_LOSSES
        return finite | ((over > 0) & (over % _LOSS_PERIOD == 0))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint: torch's five keys and a block "gradscale", in plain numbers.

        Empty if the scaler is disabled. Call it after `update()`. **Waits for the device.**
        """
        if not self._enabled:
            return {}
        state, bad_losses = self._numbers()
        settings = dataclasses.asdict(self._policy)
        for bound in ("min_scale", "max_scale"):
            if isinstance(settings.get(bound), DefaultBound):
                settings[f"default_{bound}"] = True
        name = type(self._policy).__name__
        return states.write(states.Saved(name, settings, state._asdict(), {_LOSSES: bad_losses}))

    def _numbers(self) -> tuple[State, int]:
        """The state and the counter of bad losses as plain numbers."""
        if self._state is None or self._bad_losses is None:
            return self._initial, self._init_bad_losses
        return type(self._state)(*(value.item() for value in self._state)), int(self._bad_losses)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, settings: bool = True) -> None:
        """Takes over a checkpoint, ours or torch's.

        Args:
            state_dict: What `state_dict()` gave, here or in torch.
            settings: Whether to take the settings as well, as torch does. False keeps the settings
                of this scaler and takes the scale and the counters alone.

        Raises:
            StateError: It cannot be read; nothing was loaded.
        """
        if not self._enabled:
            return
        saved = states.read(state_dict)
        policy = self._policy_of(saved) if settings else self._policy
        fields = type(policy.init())._fields
        if settings and saved.policy is not None and set(fields) != set(saved.state):
            odd = ", ".join(sorted(set(fields) ^ set(saved.state)))
            raise StateError(f"The state of {saved.policy} lacks or does not know: {odd}.")
        state = policy.init()._replace(**{k: v for k, v in saved.state.items() if k in fields})
        scale = float(state.scale)
        if isinstance(policy, Dynamic):
            scale = min(max(scale, policy.min_scale), policy.max_scale)
        if scale != state.scale:
            warnings.warn(
                f"The loaded scale {state.scale} is outside min_scale and max_scale: now {scale}.",
                stacklevel=2,
            )
        self._policy = policy
        if self._window is not None:
            self._window.closed = True  # the next loss takes the loaded scale
        self._initial = state._replace(scale=scale)
        self._init_bad_losses = saved.counters.get(_LOSSES, 0)
        if self._state is not None and self._bad_losses is not None:
            if type(self._state) is type(self._initial):
                for live, value in zip(self._state, self._initial, strict=True):
                    live.fill_(value)
                self._bad_losses.fill_(self._init_bad_losses)
            else:
                self._lazy_init_scale_growth_tracker(self._state.scale.device)

    def _policy_of(self, saved: states.Saved) -> Policy:
        """The policy that a checkpoint asks for."""
        try:
            if saved.policy is not None:
                given = dict(saved.settings)
                for bound in ("min_scale", "max_scale"):
                    if given.pop(f"default_{bound}", False):
                        given[bound] = DefaultBound(given[bound])
                return POLICIES[saved.policy](**given)
            if isinstance(self._policy, Dynamic):
                return dataclasses.replace(self._policy, exact=False, **saved.settings)
        except KeyError:
            raise StateError(
                f"The state's policy {saved.policy!r} is none of {', '.join(POLICIES)}."
            ) from None
        except (SettingError, TypeError) as error:
            raise StateError(f"The settings of the state are damaged: {error}") from None
        raise StateError(
            f"The state is of a scaler that moves, and this scaler's policy is {self._policy}. "
            "Load it with settings=False to take its scale alone."
        )

    # Pickling and copying.

    def __getstate__(self) -> dict[str, Any]:
        pickled = self.__dict__.copy()
        if self._enabled:
            if self._per_optimizer_states:
                raise CallOrderError(
                    "A GradScaler can be pickled only between iterations: call update() first."
                )
            pickled["_initial"], pickled["_init_bad_losses"] = self._numbers()
            pickled["_state"] = pickled["_bad_losses"] = None
        return pickled
