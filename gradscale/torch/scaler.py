"""GradScaler: torch's calls in torch's order without torch's defects, or two calls a step.

The facade, without arithmetic: the stages of a step are in step/, the scale in state.py, outcomes
and events in telemetry/.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.monitor import Event
from gradscale.policy import MAX_SCALE, MIN_SCALE, Dynamic, Policy
from gradscale.torch import construction, torch_names, torch_scaler
from gradscale.torch.compile import ops
from gradscale.torch.compile.graph_breaks import outside
from gradscale.torch.compile.handles import ScalerHandle
from gradscale.torch.distributed.consensus import Consensus
from gradscale.torch.distributed.groups import AUTO
from gradscale.torch.saved_state import format_of
from gradscale.torch.state import ScaleState
from gradscale.torch.step import apply, disabled, loop
from gradscale.torch.step.backward import backward, penalty_grad, scale_all
from gradscale.torch.step.calibrate import calibrate
from gradscale.torch.step.contract import as_optimizers
from gradscale.torch.step.pipeline import Pipeline
from gradscale.torch.telemetry.monitor import Monitor
from gradscale.torch.telemetry.names import bare
from gradscale.torch.telemetry.outcome import StepOutcome
from gradscale.torch.telemetry.run_log import log_to

F = TypeVar("F", bound=Callable[..., Any])


def _eager(method: F, lock: bool = True) -> F:
    """`method` as a graph break in compiled functions, and run by one thread at a time.

    Two threads that step one scaler at the same time would mix up their gradients. Without the
    `lock`, hooks of a backward pass may call the scaler from other threads.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return outside(self, method.__name__, *args, **kwargs)
        if not lock:
            return method(self, *args, **kwargs)
        with self._handle.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


_graph_break = functools.partial(_eager, lock=False)


class GradScaler(torch.amp.GradScaler):
    """A replacement for `torch.amp.GradScaler` that also unscales, clips and steps in one call.

        scaler = GradScaler("cuda")
        for inputs, targets in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.backward(loss)
            outcome = scaler.apply(optimizer, clip_norm=1.0)

    torch's calls work too. docs/reference/differences.md lists what differs from torch.

    Args:
        device: Type of the device. The state is placed on the device of the first loss.
        enabled: If False, the scale is 1 and every step is taken.
        policy: The policy that moves the scale, or its name, in place of torch's four settings.
        min_scale: Smallest scale.
        max_scale: Largest scale.
        hysteresis: Number of consecutive overflows at which the scale is lowered.
        format: Narrowest format of the backward pass; headroom and underflow refer to it.
        groups: Ranks that decide together: "auto" (from DTensors and from modules passed to
            `name()`), a process group, a DeviceMesh, `Shards`, several of these, or None.
        recheck: Whether `step()` reads the gradients again after `unscale_()`.
        on_drift: If scales differ between ranks: "raise" a `StateError`, or "repair" them.
        on_stuck: After `stuck_after` consecutive skipped steps: "warn", "raise" a `StuckError`,
            or "ignore".
        stuck_after: Number of consecutive skipped steps after which the run is stuck.
        underflow_every: Interval, in iterations, at which underflow is measured; 0: never.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | str | None = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
        format: str = "float16",
        groups: Any = AUTO,
        recheck: bool = False,
        on_drift: str = "raise",
        on_stuck: str = "warn",
        stuck_after: int = 50,
        underflow_every: int = 0,
    ) -> None:
        rule = Dynamic(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            exact=False,
        )
        self._device, self._enabled = construction.as_device(device), enabled
        moves = construction.policy_of(policy, rule, format)
        self._state = ScaleState(moves, format_of(moves, format))
        self._pipeline = Pipeline(
            self._state,
            Consensus(groups, on_drift),
            Monitor(on_stuck, stuck_after),
            recheck=recheck,
            underflow_every=underflow_every,
        )
        self._handle = ScalerHandle(self)
        construction.announce(self)

    from_torch: Any = classmethod(torch_scaler.from_torch)
    log_to = _eager(log_to)

    # Losses.

    def scale(self, outputs: Any) -> Any:
        """Returns `outputs`, a tensor or an iterable of tensors, multiplied by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if torch.compiler.is_compiling():
                return ops.scale(self, outputs)
            if self._state.live is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return self._pipeline.passes.scaled_loss(outputs)
        return scale_all(self, outputs)

    @_graph_break
    def backward(
        self,
        loss: Any,
        *,
        loss_id: int | str = 0,
        droppable: bool = False,
        spare: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Scales `loss`, a tensor or several, and runs its backward pass; gradients accumulate.

        Args:
            loss: The tensor or tensors to differentiate.
            loss_id: A value other than 0 gives the loss a scale of its own, which only its own
                overflows lower. Its gradients are checked separately, which takes one copy of them.
            droppable: If the gradients of this pass are not finite, only this pass is left out, not
                the whole step, and the remaining passes are scaled up to replace it. All passes of
                the step must be droppable. Takes one more copy of the gradients.
            spare: Deprecated name of `droppable`.
            **kwargs: Arguments of `torch.autograd.backward`.
        """
        plain = type(loss_id) is int and loss_id == 0 and not droppable and spare is None
        if plain and isinstance(loss, Tensor) and not self._state.losses:
            torch.autograd.backward(self.scale(loss), **kwargs)
            return
        backward(self, self._pipeline, loss, loss_id, droppable, spare, kwargs)

    @_graph_break
    def grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Returns the unscaled result of `torch.autograd.grad` for scaled `outputs`.

        For gradient penalties. float16 gradients are returned in float32. Gradients that are not
        finite count as an overflow in the next `update()`.
        """
        if self._enabled:
            return penalty_grad(self, self._pipeline, outputs, inputs, kwargs)
        return torch.autograd.grad(outputs, inputs, **kwargs)

    # Steps.

    @_eager
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by their scale, in place.

        float16 gradients stay in float16, so small values can become zero.
        """
        if self._enabled:
            loop.unscale_(self._pipeline, optimizer)

    @_eager
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscales and clips gradients; returns their 2-norm before clipping, NaN if not finite."""
        apply.check_limit("max_norm", max_norm)
        if not self._enabled:
            return disabled.clip_grad_norm_(optimizer, max_norm)
        return loop.clip_grad_norm_(self._pipeline, optimizer, max_norm)

    @_eager
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps `optimizer` if all gradients are finite; returns its `step()`'s result, or None.

        A closure computes the loss, calls `scaler.backward(loss)` and returns the loss. All its
        evaluations use one scale, and the step is undone if one of them overflows. **Waits for the
        device** unless the optimizer can skip by itself (`fused=True` in torch.optim).
        """
        followers = self._pipeline.monitor.followers
        if followers.all:
            followers.catch_up()
        if self._enabled:
            return loop.step(self._pipeline, self, optimizer, args, kwargs)
        return disabled.step(self._pipeline, optimizer, args, kwargs)

    def apply(
        self,
        optimizers: Optimizer | Iterable[Optimizer],
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        closure: Callable[[], Any] | None = None,
        zero_grad: bool = True,
    ) -> StepOutcome:
        """Unscales, checks, clips, steps or skips, and updates the scale; returns the outcome.

            scaler.backward(loss)
            outcome = scaler.apply(optimizer, clip_norm=1.0)

        **Waits for the device** only if an optimizer cannot skip by itself, or with a closure.

        Args:
            optimizers: One or several. Several are one step with one norm and one decision.
            clip_norm: Largest 2-norm of all gradients together.
            clip_value: Largest magnitude of an element; applied before `clip_norm`.
            closure: As in `step()`, with one optimizer.
            zero_grad: Whether to clear the gradients, also after a skipped step. If False, torch's
                optimizers leave them unscaled and those of gradscale.torch.optim leave them scaled.
        """
        if torch.compiler.is_compiling():
            return ops.apply(self, optimizers, clip_norm, clip_value, closure, zero_grad)
        alone = isinstance(optimizers, Optimizer)
        several: Any = [optimizers] if alone else as_optimizers(optimizers, "apply()")
        if len(set(map(id, several))) < len(several):
            raise SettingError("apply() steps each optimizer once, got one of them twice.")
        apply.check_limits(clip_norm, clip_value)
        if closure is not None and len(several) > 1:
            raise SettingError(f"apply() with a closure takes one optimizer, got {len(several)}.")
        with self._handle.lock:
            followers = self._pipeline.monitor.followers
            if followers.all:
                followers.catch_up()
            way = apply if self._enabled else disabled
            return way.apply(self._pipeline, several, clip_norm, clip_value, closure, zero_grad)

    @_eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by the policy, or sets it to `new_scale`, and ends the iteration.

        Unused gradients keep their scale; non-finite gradients of skipped steps are cleared.
        """
        if self._enabled:
            loop.update(self._pipeline, new_scale)
        else:
            disabled.update(self._pipeline)

    @_eager
    def calibrate(
        self,
        closure: Callable[[], Tensor],
        optimizers: Optimizer | Iterable[Optimizer],
        model: torch.nn.Module | None = None,
    ) -> float:
        """Finds a scale for the gradients of `closure`, sets it and returns it.

            scaler.calibrate(lambda: loss_fn(model(batch), target), optimizer, model)

        Runs `closure`, which returns the loss, and a backward pass at up to eight different scales.
        No step is taken; gradients, random state and the buffers of `model` are restored. With
        several ranks, all must call it. **Waits for the device.**

        Raises:
            StuckError: No scale gave finite gradients, or the loss is not finite.
        """
        several = as_optimizers(optimizers, "calibrate()")
        return calibrate(self._pipeline, closure, several, model) if self._enabled else 1.0

    # Telemetry.

    @_eager
    def outcome(self, optimizer: Optimizer | None = None) -> StepOutcome:
        """Returns the outcome of the last step of `optimizer`, or of any optimizer."""
        outcome = self._pipeline.monitor.outcome()
        if optimizer is not None:
            entry = self._pipeline.entries.find(optimizer)
            outcome = None if entry is None or entry.step is None else entry.step.outcome()
        if outcome is None:
            raise CallOrderError(
                "outcome() was called before a step. Call scaler.apply(optimizer) or "
                "scaler.step(optimizer) first."
            )
        return outcome

    @_eager
    def on(self, event: str, callback: Callable[[Event], object]) -> None:
        """Registers `callback(event)`, called for every `event` with this name; see `Event`.

        "skip": a step was skipped; "recover": the first applied step after skipped ones; "stuck":
        too many consecutive skips; "grow", "backoff": the scale moved; "floor": it reached its
        minimum. Calls are in order and as late as the device; `flush()` makes those still pending.
        """
        self._pipeline.monitor.on(event, callback)

    @_eager
    def follow(self, *things: Any, optimizer: Optimizer | None = None, wait: bool = False) -> None:
        """Steps schedulers, averages or counters, or calls functions, after applied steps only.

        The calls are made just before the next step changes the parameters, without waiting;
        `flush()` makes those that are pending. Steps of CUDA graphs are followed in `flush()`.

        Args:
            *things: Functions without arguments, and objects with a `step()` method.
            optimizer: The optimizer to follow. Default: that of a scheduler, otherwise any.
            wait: Make the calls in `update()` instead, which then **waits for the device**.
        """
        self._pipeline.monitor.follow(things, optimizer, wait)

    @_eager
    def flush(self) -> None:
        """Delivers all events and makes all pending calls of followers; **waits for the device**.

        That includes replays of CUDA graphs, of which the last 4,096 steps are kept.
        """
        self._pipeline.monitor.followers.catch_up()
        self._pipeline.monitor.deliver(wait=True)

    @property
    @_graph_break
    def history(self) -> list[tuple[int, float, str]]:
        """The last 1,000 events as (step, scale, event name), oldest first."""
        self._pipeline.monitor.deliver()
        return list(self._pipeline.monitor.tracker.history)

    @_eager
    def name(self, model: torch.nn.Module) -> None:
        """Registers the parameter names and the DDP and FSDP process groups of `model`."""
        self._pipeline.monitor.names.take(bare(model))
        self._pipeline.consensus.name(model)

    @_eager
    def watch(self, optimizer: Optimizer) -> None:
        """Registers `optimizer` before its first step; gradients that it has keep their scale."""
        self._pipeline.entries.watch(optimizer)

    @_eager
    def abandon(self) -> None:
        """Discards scaled losses that no step will follow because their gradients are gone."""
        self._pipeline.passes.abandon()

    # Settings and checkpoints.

    @property
    def policy(self) -> Policy:
        """The policy that moves the scale, with its settings."""
        return self._state.policy

    @_eager
    def get_scale(self, loss_id: int | str = 0) -> float:
        """Returns the current scale of the loss `loss_id`; **waits for the device**."""
        return self._state.number(loss_id) if self._enabled else 1.0

    set_growth_factor = _eager(torch_names.setter("growth_factor"))
    set_backoff_factor = _eager(torch_names.setter("backoff_factor"))
    set_growth_interval = _eager(torch_names.setter("growth_interval"))

    @_eager
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain numbers, empty if disabled; **waits for the device**."""
        return self._state.save(self._pipeline.entries.skipped_rows()) if self._enabled else {}

    @_eager
    def load_state_dict(self, state_dict: Mapping[str, Any], *, settings: bool = True) -> None:
        """Loads a state of gradscale, of torch or of another system: docs/reference/checkpoints.md.

        Args:
            state_dict: The state.
            settings: Whether to load the settings too, as torch does, or only the state.

        Raises:
            StateError: The state cannot be read; nothing was loaded.
        """
        if not self._enabled:
            return
        rows = self._state.load(state_dict, settings)
        loop.end_iteration(self._pipeline)
        self._pipeline.entries.restore_rows(rows)
        # What is still on its way is of the run that this one leaves.
        self._pipeline.monitor.forget(rows)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: vars(self)[name] for name in ("_device", "_enabled", "_state")}
        return {**state, "_pipeline": self._pipeline.settings(self._enabled)}

    def __copy__(self) -> GradScaler:
        return copy.deepcopy(self)  # two scalers do not share a scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pipeline = Pipeline(self._state, **state["_pipeline"])
        self._handle = ScalerHandle(self)

    def __repr__(self) -> str:
        state = "disabled" if not self._enabled else f"policy={self.policy}"
        last = self._pipeline.monitor.outcome()
        if self._enabled and (self._state.on_host or last is None):
            state = f"scale={self._state.number():g}, {state}"
        return f"{type(self).__name__}({state}{'' if last is None else f', last={last}'})"

    # torch's private names, which Lightning, accelerate, FSDP and torch's tests read.

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._pipeline.place(torch.device(dev))

    _check_scale_growth_tracker = torch_names.check_scale_growth_tracker
    _get_scale_async = torch_names.get_scale_async
    _get_growth_tracker = torch_names.get_growth_tracker
    _unscale_grads_ = torch_names.unscale_grads_
    _check_inf_per_device = torch_names.check_inf_per_device
    _found_inf_per_device = torch_names.found_inf_per_device
    _per_optimizer_states = torch_names.states()
    _scale = torch_names.live("scale")
    _growth_tracker = torch_names.live("good_steps")
    _init_scale = torch_names.initial("scale", 1.0)
    _init_growth_tracker = torch_names.initial("good_steps", 0)
    _growth_factor = torch_names.setting("growth_factor", 1.0)
    _backoff_factor = torch_names.setting("backoff_factor", 1.0)
    _growth_interval = torch_names.setting("growth_interval", 2000)
