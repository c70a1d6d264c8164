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
    """Scales losses, unscales gradients, steps or skips: `torch.amp.GradScaler`, mended.

        scaler = GradScaler("cuda")
        for inputs, targets in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.backward(loss)
            outcome = scaler.apply(optimizer, clip_norm=1.0)

    or torch's own calls in torch's order. What differs is listed in docs/reference/differences.md.

    Args:
        device: Where it will be used. The state really goes to the device of the first loss.
        enabled: False makes every method hand through what it gets.
        policy: The rule that moves the scale, or its name ("headroom"), not torch's four settings.
        min_scale: The floor of the scale.
        max_scale: The ceiling of the scale.
        hysteresis: On which consecutive overflow the scale falls.
        format: The narrowest format of the backward pass, which headroom and underflow are about.
        groups: Which ranks decide together: "auto" (those of DTensors, and of modules that were
            given to `name()`), a process group, a DeviceMesh, `Shards` of one, several, or None.
        recheck: Whether `step()` reads gradients again that `unscale_()` has read.
        on_drift: If scales of ranks differ that should not: "raise" a StateError, or "repair".
        on_stuck: After `stuck_after` skipped steps in a row: "warn", "raise" a `StuckError`, or
            "ignore".
        stuck_after: How many skipped steps in a row are too many.
        underflow_every: Measure `outcome.underflow` in every so many iterations; 0 never does.
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
        self._device, self._enabled = device, enabled
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
        """`outputs`, a tensor or an iterable of tensors, times the scale of this iteration."""
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
        """Scales `loss`, a tensor or several, and runs its backward pass; gradients add up.

        Args:
            loss: What to differentiate.
            loss_id: Gives the loss a scale of its own, which its own overflows lower and nobody
                else's. Its gradients are checked on their own: one more copy of them for the while.
            droppable: If the gradients of this pass are not finite, leave it out rather than the
                whole step, and have the others of the step, which must all have this, weigh as much
                as all of them. It also takes one more copy.
            spare: The old name of `droppable`.
            kwargs: For `torch.autograd.backward`.
        """
        plain = type(loss_id) is int and loss_id == 0 and not droppable and spare is None
        if plain and isinstance(loss, Tensor) and not self._state.losses:
            torch.autograd.backward(self.scale(loss), **kwargs)
            return
        backward(self, self._pipeline, loss, loss_id, droppable, spare, kwargs)

    @_graph_break
    def grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, computed with scaled `outputs` and handed back unscaled.

        For gradient penalties. float16 gradients come back in float32. Gradients that are not
        finite count as an overflow in the next `update()`.
        """
        if self._enabled:
            return penalty_grad(self, self._pipeline, outputs, inputs, kwargs)
        return torch.autograd.grad(outputs, inputs, **kwargs)

    # Steps.

    @_eager
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by their scale, in place, for clipping or reading.

        float16 gradients stay float16, so small values can vanish by that.
        """
        if self._enabled:
            loop.unscale_(self._pipeline, optimizer)

    @_eager
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """The 2-norm of the gradients, after unscaling and clipping them; NaN if one is bad."""
        apply.check_limit("max_norm", max_norm)
        if not self._enabled:
            return disabled.clip_grad_norm_(optimizer, max_norm)
        return loop.clip_grad_norm_(self._pipeline, optimizer, max_norm)

    @_eager
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps `optimizer` unless a gradient is not finite; what its `step()` returned, or None.

        A closure computes the loss, calls `scaler.backward(loss)` and returns the loss. All its
        evaluations have one scale, and the step is undone if one of them overflows. **Waits for the
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
        """What became of the step, after unscaling, clipping, stepping or skipping, and updating.

            scaler.backward(loss)
            outcome = scaler.apply(optimizer, clip_norm=1.0)

        **Waits for the device** only if an optimizer cannot skip by itself, or for a closure.

        Args:
            optimizers: One or several. Several are one step: one norm, one decision.
            clip_norm: The largest 2-norm that all gradients together may have.
            clip_value: The largest magnitude that an element may have; taken before `clip_norm`.
            closure: As in `step()`, with one optimizer.
            zero_grad: Whether to clear the gradients afterwards, applied or not. Else torch's
                optimizers leave them unscaled, those of gradscale.torch.optim as they were.
        """
        if torch.compiler.is_compiling():
            return ops.apply(self, optimizers, clip_norm, clip_value, closure, zero_grad)
        alone = isinstance(optimizers, Optimizer)
        several: Any = [optimizers] if alone else as_optimizers(optimizers, "apply()")
        if len(set(map(id, several))) < len(several):
            raise SettingError("apply() steps every optimizer once, got one of them twice.")
        apply.check_limits(clip_norm, clip_value)
        if closure is not None and len(several) > 1:
            raise SettingError(f"A closure goes with one optimizer, got {len(several)}.")
        with self._handle.lock:
            followers = self._pipeline.monitor.followers
            if followers.all:
                followers.catch_up()
            way = apply if self._enabled else disabled
            return way.apply(self._pipeline, several, clip_norm, clip_value, closure, zero_grad)

    @_eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by the policy, or to `new_scale`, and ends the iteration.

        Gradients that no step has used keep their scale; bad ones of skipped steps are cleared.
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
        """The scale that suits the gradients of `closure`, which the scaler has from here on.

            scaler.calibrate(lambda: loss_fn(model(batch), target), optimizer, model)

        Runs `closure`, which returns the loss, and a backward pass at one scale after the other, at
        most eight times. Nothing is stepped; gradients, random state and the buffers of `model` are
        put back. On several ranks all must call it. **Waits for the device.**

        Raises:
            StuckError: No scale gave finite gradients, or the loss is not finite.
        """
        several = as_optimizers(optimizers, "calibrate()")
        return calibrate(self._pipeline, closure, several, model) if self._enabled else 1.0

    # Telemetry.

    @_eager
    def outcome(self, optimizer: Optimizer | None = None) -> StepOutcome:
        """What became of the last step, of `optimizer` or of any."""
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
        """Calls `callback(event)` for every `event`: a name, a step, a scale and an outcome.

        "skip": a step was not applied; "recover": the first that is applied again; "stuck": too
        many skips in a row; "grow", "backoff": the scale moved; "floor": it reached its floor.
        They come in order, late by as much as the device is behind: call `flush()` at the end.
        """
        self._pipeline.monitor.on(event, callback)

    @_eager
    def follow(self, *things: Any, optimizer: Optimizer | None = None, wait: bool = False) -> None:
        """Steps schedulers, averages or counters, or calls functions, after applied steps alone.

        They are called just before the next step moves the parameters, without waiting: call
        `flush()` before you look at them. Steps inside a CUDA graph are followed in `flush()`.

        Args:
            things: Functions without arguments, and objects with a `step()`.
            optimizer: Whose steps to follow; without it that of a scheduler, and else any.
            wait: Call them in `update()` instead, which then **waits for the device**.
        """
        for thing in things:
            self._pipeline.monitor.follow(thing, optimizer, wait)

    @_eager
    def flush(self) -> None:
        """Delivers all events and calls everything that is still due; **waits for the device**.

        That includes replays of CUDA graphs, of which the last 4,096 steps are kept.
        """
        self._pipeline.monitor.followers.catch_up()
        self._pipeline.monitor.deliver(wait=True)

    @property
    @_graph_break
    def history(self) -> list[tuple[int, float, str]]:
        """The last thousand events as (step, scale, event), oldest first."""
        self._pipeline.monitor.deliver()
        return list(self._pipeline.monitor.tracker.history)

    @_eager
    def name(self, model: torch.nn.Module) -> None:
        """Takes over the parameters' names and the process groups of DDP and FSDP in `model`."""
        self._pipeline.monitor.names.take(bare(model))
        self._pipeline.consensus.name(model)

    @_eager
    def watch(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` known before its first step: gradients left for it keep their scale."""
        self._pipeline.entries.watch(optimizer)

    @_eager
    def abandon(self) -> None:
        """Forgets losses that were scaled and lead to no step: their gradients are gone."""
        self._pipeline.passes.abandon()

    # Settings and checkpoints.

    @property
    def policy(self) -> Policy:
        """The rule that moves the scale, with its settings."""
        return self._state.policy

    @_eager
    def get_scale(self, loss_id: int | str = 0) -> float:
        """The current scale, of a loss if some have their own; **waits for the device**."""
        return self._state.number(loss_id) if self._enabled else 1.0

    set_growth_factor = _eager(torch_names.setter("growth_factor"))
    set_backoff_factor = _eager(torch_names.setter("backoff_factor"))
    set_growth_interval = _eager(torch_names.setter("growth_interval"))

    @_eager
    def state_dict(self) -> dict[str, Any]:
        """The checkpoint in plain numbers, empty if disabled; **waits for the device**."""
        return self._state.save(self._pipeline.entries.skipped_rows()) if self._enabled else {}

    @_eager
    def load_state_dict(self, state_dict: Mapping[str, Any], *, settings: bool = True) -> None:
        """Takes over a checkpoint: ours, torch's, or that of a peer (see checkpoints/peers.py).

        Args:
            state_dict: What `state_dict()` gave, here or elsewhere.
            settings: Whether to take the settings as well, as torch does, or the state alone.

        Raises:
            StateError: It cannot be read; nothing was loaded.
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
