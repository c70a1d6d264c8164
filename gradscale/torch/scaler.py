"""The GradScaler: torch's calls in torch's order without torch's defects, or two calls a step.

Here are its constructor, `step()`, `apply()`, `update()` and what they tell; the policy's state is
in keeper.py, scaling in scaling.py, unscaling and clipping in checking.py. Decisions stay on the
device; the one place that must wait for it is the step of an optimizer that cannot skip by itself,
exactly as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.formats import Format, format_named
from gradscale.policy import MAX_SCALE, MIN_SCALE, Dynamic, Policy
from gradscale.torch import compiled
from gradscale.torch.agree import AUTO, Agreement, Group
from gradscale.torch.calibrating import Calibrating
from gradscale.torch.drift import Drift
from gradscale.torch.events import Event, Events, Move, Record
from gradscale.torch.follow import Followers
from gradscale.torch.keeper import STEPS
from gradscale.torch.kernels import capturing
from gradscale.torch.master.casting import bare
from gradscale.torch.outcome import Names
from gradscale.torch.scaling import NOT_SAVED, refuse_capture


class GradScaler(Calibrating):
    """Scales losses, unscales gradients, steps or skips: `torch.amp.GradScaler`, mended.

        scaler = GradScaler("cuda")
        for inputs, targets in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)      # skipped if a gradient is not finite
            scaler.update()
            optimizer.zero_grad()

    or, with two calls that cannot come in the wrong order:

            scaler.backward(loss)
            outcome = scaler.apply(optimizer, clip_norm=1.0)

    What differs from torch is listed in docs/differences.md.

    Args:
        device: Where it will be used. The state really goes to the device of the first loss.
        enabled: False makes every method hand through what it gets.
        policy: The rule that moves the scale, instead of torch's four settings.
        min_scale: The floor of the scale.
        max_scale: The ceiling of the scale.
        hysteresis: On which consecutive overflow the scale falls.
        format: The narrowest format of the backward pass, which headroom and underflow are about.
        groups: Which ranks decide together: "auto" finds out from DTensors and from modules that
            were given to `name()`; else a process group, a DeviceMesh, `Shards` of one, several of
            these, or None.
        on_drift: What to do if the scales of ranks that should agree differ: "raise" a StateError,
            or "repair": take that of the first.
        on_stuck: What to do after `stuck_after` skipped steps in a row: "warn", "raise" a
            `StuckError`, or "ignore".
        stuck_after: How many skipped steps in a row are too many.
        underflow_every: Measure `outcome.underflow` in every so many iterations, which takes
            another look at all gradients; 0 never does.
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
        policy: Policy | None = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
        format: str = "float16",
        groups: Any = AUTO,
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
        if policy is not None and rule != Dynamic(exact=False):
            raise SettingError(f"Give either policy or torch's settings, got {policy} and {rule}.")
        if isinstance(underflow_every, bool) or not isinstance(underflow_every, int):
            raise SettingError(f"underflow_every must be a whole number, got {underflow_every!r}.")
        if underflow_every < 0:
            raise SettingError(f"underflow_every must be >= 0, got {underflow_every}.")
        self._device = device
        self._enabled = enabled
        self._keep(rule if policy is None else policy)
        self._warned_half = False
        self._format = _format_of(policy, format)
        self._underflow_every = underflow_every
        self._stuck = (on_stuck, stuck_after)
        self._agreement = Agreement(groups)
        self._drift = Drift(on_drift)
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._followers = Followers()
        self._events = Events(*self._stuck, self._followers.replay)
        self._names = Names()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        refuse_capture("The first loss is scaled")
        super()._lazy_init_scale_growth_tracker(dev)
        self._events.replays.prepare(self._live("scale()").scale.device)

    # Moving the scale.

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by the policy, or to `new_scale`, and ends the iteration.

        Gradients of the open window keep the scale they were made with. Bad gradients of skipped
        steps are cleared.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "update", new_scale)
        if not self._enabled:
            done, self._iteration = self._iteration, []
            if done and not capturing():  # it has no state, so no log either
                none = torch.zeros((), dtype=torch.int32)
                self._announce(Record.of(none, torch.ones(()), [], done))
            return
        self._live("update()")
        moves: list[Move] = []
        if new_scale is not None:
            self._set_scale(new_scale)
            moves = list(self._move_losses(self._pending()))
        else:
            for optimizer in self._unsettled():
                self._settle([optimizer], self._use(optimizer, "update", tuple(OptState)))
            found = self._all_found()
            record = self._advance_fast(found)
            if record is not None:
                self._end_iteration(record)
                return
            if found:
                finite = ~torch.stack([self._found(flags) for flags in found]).any()
                fits = torch.stack([torch.ones_like(finite), *self._fits.values()]).all()
                window = self._pending()
                sizes = self._sizes(window)
                apart = self._groups_apart()
                if apart:
                    finite, fits, sizes = self._settle_update(apart, finite, fits, sizes)
                moves = list(self._move(finite, fits, window, sizes))
        steps, last = self._counters[STEPS], self._pending()
        blank = None if last is None else last.blank
        steps += 1 if blank is None else ~blank
        scale = self._live("update()").scale.clone()
        self._end_iteration(Record.of(steps, scale, moves, self._iteration))

    def load_state_dict(self, state_dict: Mapping[str, Any], *, settings: bool = True) -> None:
        """Takes over a checkpoint: ours, torch's, or that of a peer (see gradscale/foreign.py).

        Args:
            state_dict: What `state_dict()` gave, here, in torch, Apex, DeepSpeed, Megatron, Flax,
                Keras or jmp.
            settings: Whether to take the settings as well, as torch does. False keeps the settings
                of this scaler and takes the scale and the counters alone.

        Raises:
            StateError: It cannot be read; nothing was loaded.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "load_state_dict", state_dict, settings=settings)
        super().load_state_dict(state_dict, settings=settings)
        if self._enabled:
            # What is still on its way, and counted, is of the run that this one leaves.
            self._events.forget()
            self._followers.forget()
            for row in self._rows.values():
                row.zero_()  # in place: a CUDA graph may have captured it

    # Telling.

    def on(self, event: str, callback: Callable[[Event], object]) -> None:
        """Calls `callback(event)` for every `event`: a name, a step, a scale and an outcome.

        "skip": a step was not applied; "recover": the first that is applied again; "stuck": too
        many skips in a row; "grow", "backoff": the scale moved; "floor": it reached its floor.
        Events come in order and without waiting for the device, so late by as much as it is behind;
        call `flush()` at the end of a run. Copies and checkpoints of the scaler have no callbacks.
        Events of steps inside a CUDA graph come with `flush()` or the next step outside of it, and
        have no outcome.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "on", event, callback)
        self._events.on(event, callback)

    def follow(self, *things: Any, optimizer: Optimizer | None = None, wait: bool = False) -> None:
        """Steps schedulers, averages, counters or calls any function after applied steps alone.

        Nothing waits for the device: they are called just before the next step moves the
        parameters, which is in time for the next learning rate and for an average. Call `flush()`
        before you look at them, at the end of a run or for a checkpoint.

        Steps inside a CUDA graph are followed in `flush()`: as often as they were applied, but
        after all of them. That is right for a scheduler whose learning rate is a tensor if you call
        `flush()` after every replay; an average belongs into the graph.

        Args:
            things: Functions without arguments, and objects with a `step()`.
            optimizer: Whose steps to follow; without it that of a scheduler, and else any.
            wait: Call them in `update()` instead, which then **waits for the device**.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "follow", *things, optimizer=optimizer, wait=wait)
        for thing in things:
            self._followers.add(thing, optimizer, wait)

    def flush(self) -> None:
        """Tells and calls everything that is still due; **waits for the device**.

        That includes what happened in replays of CUDA graphs. What became of the last 4,096 steps
        there is known; call it often enough, or a warning says how many were lost.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "flush")
        self._followers.catch_up()
        self._events.deliver(wait=True)

    @property
    def history(self) -> list[tuple[int, float, str]]:
        """The last thousand events as (step, scale, event), oldest first."""
        if torch.compiler.is_compiling():
            return compiled.outside(self, "__getattribute__", "history")
        return list(self._events.history)

    def name(self, model: torch.nn.Module) -> None:
        """Takes over the names of the parameters of `model`, for `culprits()`.

        And the process groups of DDP and FSDP in it, whose ranks then decide together.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "name", model)
        self._names.take(bare(model))
        self._agreement.name(model)

    def _unsettled(self) -> list[Optimizer]:
        """The optimizers whose gradients were looked at, and which other ranks do not know of."""
        states = self._per_optimizer_states
        looked = [key for key in states if states[key]["stage"] is not OptState.READY]
        found = [key for key in looked if self._groups.get(key) and key not in self._settled]
        return [self._held[key] for key in found]

    def _groups_apart(self) -> list[Group]:
        """The groups of all optimizers of this iteration, if they have different ones."""
        several = [self._held[key] for key in self._groups if key in self._held]
        kinds = {frozenset(id(g.process) for g in self._groups[id(one)]) for one in several}
        return self._who(several) if len(kinds) > 1 else []

    def _settle_update(
        self, groups: list[Group], finite: Tensor, fits: Tensor, sizes: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the one scale of optimizers is moved by, about which different ranks have agreed."""
        told = self._settle_all([~finite, ~fits, *sizes.values()], groups)
        known = {
            name: value.to(sizes[name].dtype) for name, value in zip(sizes, told[2:], strict=True)
        }
        return told[0] == 0, told[1] == 0, known

    def _all_found(self) -> list[dict[torch.device, Tensor]]:
        """What was found for every optimizer that was checked and had gradients."""
        states = self._per_optimizer_states.values()
        found = [state["found_inf_per_device"] for state in states]
        if not any(found) and not any(state["stage"] is OptState.STEPPED for state in states):
            raise CallOrderError(
                "update() was called, but no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) first."
            )
        return [flags for flags in found if flags]

    def __getstate__(self) -> dict[str, Any]:
        pickled = super().__getstate__()
        for name in (*NOT_SAVED, "_events", "_followers", "_names"):
            pickled.pop(name)
        return pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _format_of(policy: Policy | None, format: str) -> Format:
    """The format of the backward pass, which a policy may know as well."""
    known = getattr(policy, "format", format)
    if format not in (known, "float16"):
        raise SettingError(f"format is {known!r} in the policy, got {format!r}. Give it once.")
    return format_named(known)
