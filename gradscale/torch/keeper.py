"""The part of the scaler that holds a policy and its state: getters, setters, checkpoints.

Settings live in the frozen policy and numbers in its state, both in one place; torch's names for
them (`_growth_factor`, `_scale`, `_init_growth_tracker` ...) are views, because other people's code
reads them.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale import states
from gradscale.errors import CallOrderError, SettingError, StateError, caller_level
from gradscale.policy import (
    MAX_SCALE,
    MIN_SCALE,
    POLICIES,
    DefaultBound,
    Dynamic,
    DynamicState,
    Off,
    Policy,
    State,
    Static,
)
from gradscale.torch import compiled
from gradscale.torch.unscale import move
from gradscale.torch.window import Window

LOSSES, STEPS = "bad_losses", "steps"
_COUNTERS = (LOSSES, STEPS)
"""What is counted besides the policy's state: windows in a row with a bad loss; `update()`s."""


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
    _seen: dict[int, weakref.ref[Optimizer]]

    def _keep(self, policy: Policy) -> None:
        """Takes `policy` in its first state, on no device yet."""
        self._policy = policy
        self._initial: State = policy.init()
        self._state: State | None = None
        self._init_counters = dict.fromkeys(_COUNTERS, 0)
        self._counters: dict[str, Tensor] = {}
        self._initial_losses: dict[int | str, State] = {}
        self._losses: dict[int | str, State] = {}
        """The states of losses with a scale of their own."""

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
        self._state = _on_device(self._initial, dev)
        counts = self._init_counters
        self._counters = dict(zip(counts, _on_device(counts.values(), dev), strict=True))
        self._losses = {key: _on_device(state, dev) for key, state in self._initial_losses.items()}

    def _loss_state(self, loss_id: int | str) -> State:
        """The state of the loss called `loss_id`, on its device."""
        if loss_id not in self._losses:
            device = self._live("backward()").scale.device
            self._losses[loss_id] = _on_device(self._policy.init(), device)
        return self._losses[loss_id]

    def _live(self, call: str) -> State:
        """The state on its device; a CallOrderError if no tensor has told the device yet."""
        if self._state is None:
            raise CallOrderError(
                f"{call} was called before scale(): no loss has been scaled yet. "
                "Call scaler.backward(loss) or scaler.scale(loss).backward() first in every "
                "iteration."
            )
        return self._state

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        state = self._live(f"{funcname}()")
        return state.scale, getattr(
            state, "good_steps", torch.zeros_like(state.scale, dtype=torch.int32)
        )

    # Getters and setters.

    def get_scale(self, loss_id: int | str = 0) -> float:
        """The current scale, 1.0 if disabled. This **waits for the device**.

        Args:
            loss_id: Of which loss, where some have a scale of their own.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "get_scale", loss_id)
        if not self._enabled:
            return 1.0
        state: State | None = self._initial if self._state is None else self._state
        if loss_id != 0:
            losses = self._initial_losses if self._state is None else self._losses
            state = losses.get(loss_id)
        if state is None:
            known = ", ".join(map(repr, [0, *losses]))
            raise SettingError(
                f"loss_id must be one that backward() had ({known}), got {loss_id!r}."
            )
        return float(state.scale)

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
        if torch.compiler.is_compiling():
            return compiled.outside(self, "_set", name, value)
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
        policy = self._policy
        low, high = self._bounds()
        try:
            if isinstance(policy, Dynamic):
                checked = dataclasses.replace(policy, init_scale=new_scale, exact=False)
            else:
                checked = Dynamic(init_scale=new_scale, min_scale=low, max_scale=high, exact=False)
        except SettingError as error:
            raise SettingError(f"update({new_scale!r}): {error}") from None
        if isinstance(policy, Dynamic):
            self._policy = dataclasses.replace(checked, init_scale=policy.init_scale)
        scale.fill_(checked.init_scale)

    def _bounds(self) -> tuple[float, float]:
        low = getattr(self._policy, "min_scale", MIN_SCALE)
        return low, getattr(self._policy, "max_scale", MAX_SCALE)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint: torch's five keys and a block "gradscale", in plain numbers.

        Empty if the scaler is disabled. Call it after `update()`. **Waits for the device.**
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "state_dict")
        if not self._enabled:
            return {}
        state, counters, losses = self._numbers()
        settings = dataclasses.asdict(self._policy)
        for bound in ("min_scale", "max_scale"):
            if isinstance(settings.get(bound), DefaultBound):
                settings[f"default_{bound}"] = True
        name = type(self._policy).__name__
        named = [(key, one._asdict()) for key, one in losses.items()]
        return states.write(states.Saved(name, settings, state._asdict(), counters, named))

    def _numbers(self) -> tuple[State, dict[str, int], dict[int | str, State]]:
        """The state, the counters and the states of other losses as plain numbers."""
        if self._state is None:
            return self._initial, self._init_counters, self._initial_losses
        counters = {name: int(count) for name, count in self._counters.items()}
        losses = {key: plain(state) for key, state in self._losses.items()}
        return plain(self._state), counters, losses

    def load_state_dict(self, state_dict: Mapping[str, Any], *, settings: bool = True) -> None:
        """Takes over a checkpoint; a StateError if it cannot be read."""
        if not self._enabled:
            return
        saved = states.read(state_dict)
        policy = self._policy_of(saved) if settings else self._policy
        strict = settings and saved.policy is not None
        state = _taken(saved.state, policy, strict)
        if saved.patience is not None and isinstance(state, DynamicState):
            patience = getattr(policy, "hysteresis", 1)
            state = state._replace(bad_steps=max(patience - saved.patience, 0))
        losses = {key: _taken(fields, policy, strict) for key, fields in saved.losses}
        self._policy = policy
        if self._window is not None:
            # The next loss takes the loaded scale, unless gradients of the old one are waiting.
            self._window.close([ref() for ref in self._seen.values()])
        self._initial = state
        self._initial_losses = losses
        self._init_counters = {name: saved.counters.get(name, 0) for name in _COUNTERS}
        if self._state is None:
            return
        if type(self._state) is not type(self._initial):
            self._lazy_init_scale_growth_tracker(self._state.scale.device)
            return
        # In place: a CUDA graph may have captured these very tensors.
        for live, value in zip(self._state, self._initial, strict=True):
            live.fill_(value)
        for name, count in self._counters.items():
            count.fill_(self._init_counters[name])
        device, old = self._state.scale.device, self._losses
        self._losses = {key: _on_device(one, device) for key, one in losses.items()}
        for key in old.keys() & losses.keys():
            self._losses[key] = old[key]
            for live, value in zip(old[key], losses[key], strict=True):
                live.fill_(value)

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
            names = ("_initial", "_init_counters", "_initial_losses")
            pickled.update(zip(names, self._numbers(), strict=True))
            pickled.update(_state=None, _counters={}, _losses={})
        return pickled


def check_loss_id(loss_id: Any) -> None:
    """Raises SettingError if `loss_id` cannot be one."""
    if isinstance(loss_id, bool) or not isinstance(loss_id, int | str):
        raise SettingError(f"loss_id must be a whole number or a name, got {loss_id!r}.")


def _on_device(values: Iterable[float | int], device: torch.device) -> Any:
    """Plain numbers as 0-dim tensors on `device`, in the same kind of tuple."""
    with torch.inference_mode(False):  # the first loss may be that of an evaluation
        tensors = [
            torch.full(
                (), v, dtype=torch.float32 if isinstance(v, float) else torch.int32, device=device
            )
            for v in values
        ]
    return getattr(values, "_make", tuple)(tensors)


def plain(state: State) -> State:
    """`state` in plain numbers. Waits for the device."""
    return type(state)(*(value.item() for value in state))


def _taken(fields: Mapping[str, Any], policy: Policy, strict: bool) -> State:
    """The state of `policy` that a checkpoint's `fields` say, its scale within the bounds."""
    first = policy.init()
    if isinstance(policy, Off):
        return first
    if strict and set(first._fields) != set(fields):
        odd = ", ".join(sorted(set(first._fields) ^ set(fields)))
        raise StateError(f"The state of {type(policy).__name__} lacks or does not know: {odd}.")
    known = {name: value for name, value in fields.items() if name in first._fields}
    for name, value in known.items():
        if isinstance(getattr(first, name), int) and not isinstance(value, int):
            raise StateError(f"The state's {name} must be a whole number, got {value!r}.")
        known[name] = type(getattr(first, name))(value)
    state = first._replace(**known)
    scale = float(state.scale)
    if not isinstance(policy, Static):
        scale = min(max(scale, policy.min_scale), policy.max_scale)
    if scale != state.scale:
        warnings.warn(
            f"The loaded scale {state.scale} is outside min_scale and max_scale: now {scale}.",
            stacklevel=caller_level(),
        )
    return state._replace(scale=scale)
