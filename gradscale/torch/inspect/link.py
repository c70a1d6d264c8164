"""What an inspector reads of a scaler: which parameters were stepped, at which scale, and whether.

Values stay on the device: nothing here waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradscale.errors import SettingError
from gradscale.torch.optim.master_bits import LOW_BITS, MASTER
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.entries import STEPPED, UNSCALED, OptimizerEntry


class ScalerLink:
    """A scaler, watched at the end of every iteration.

    Args:
        scaler: A `GradScaler`, or what has one as `scaler`, such as `MixedPrecision`.
        ended: Called at the end of every iteration; not kept alive.
        params: Those of the model by name, for what the scaler says of parameters without a name.
    """

    def __init__(
        self, scaler: Any, ended: Callable[[], None], params: Mapping[str, Tensor]
    ) -> None:
        inner = getattr(scaler, "scaler", scaler)
        if not isinstance(inner, GradScaler):
            raise SettingError(
                "scaler must be a gradscale.torch.GradScaler or a MixedPrecision, got "
                f"{type(scaler).__name__}. GradScaler.from_torch() converts a scaler of torch."
            )
        self.scaler = inner
        self._pipeline = inner._pipeline
        self._ended = weakref.WeakMethod(ended)
        self._skips, self._events = 0, 0
        self._newest: Any = None
        self._pipeline.monitor.names.find(params)
        self._pipeline.monitor.watchers.append(self._end)

    def detach(self) -> None:
        """Stops watching."""
        watchers = self._pipeline.monitor.watchers
        watchers[:] = [watcher for watcher in watchers if watcher != self._end]

    def _end(self) -> None:
        """Passes on the end of an iteration, unless the inspector is gone."""
        call = self._ended()
        if call is None:
            self.detach()
        else:
            call()

    def stepped(self) -> list[Tensor]:
        """The parameters that were stepped, or whose step was skipped, in this iteration."""
        entries = self._pipeline.entries.all
        return [p for entry in entries if entry.stage is STEPPED for p in entry.stepped_params]

    def trained(self) -> list[Tensor] | None:
        """The parameters of all optimizers that the scaler has seen; None if it has seen none."""
        groups = [g for entry in self._pipeline.entries.all for g in entry.param_groups()]
        return [param for group in groups for param in group["params"]] or None

    def exact(self) -> list[Tensor]:
        """The parameters whose steps lose nothing: they add up in masters, or are zero."""
        found = []
        for entry in self._pipeline.entries.all:
            state = getattr(entry.optimizer, "state", {})
            for group in entry.param_groups():
                lr = group.get("lr")  # as a tensor, it would have to be waited for
                still = isinstance(lr, int | float) and lr == 0
                for param in group["params"]:
                    kept = state.get(param, {})
                    if still or entry.masters is not None or MASTER in kept or LOW_BITS in kept:
                        found.append(param)
        return found

    def aside(self) -> bool:
        """Whether gradients are set aside for a pass whose loss has a scale of its own."""
        return self._pipeline.passes.aside

    def format(self) -> str:
        """The format that the scaler is for."""
        return self._pipeline.state.format.name

    def scale(self) -> Tensor | float:
        """The scale of the gradients of this iteration."""
        last = self._pipeline.passes.last
        return 1.0 if last is None or not self.scaler.is_enabled() else last.scale.value

    def numbers(self) -> dict[tuple[str, str], Tensor]:
        """Facts of the step of this iteration: scale, whether it was applied, its number."""
        monitor, found = self._pipeline.monitor, {}
        scale = torch.as_tensor(self.scale(), dtype=torch.float32)
        found["scale", ""] = scale
        outcome = monitor.outcome()
        if outcome is not None:
            found["applied", ""] = outcome.applied
            found["loss_finite", ""] = outcome.loss_finite
            if outcome.grad_norm is not None:
                found["grad_norm", ""] = outcome.grad_norm * scale.to(outcome.grad_norm.device)
        steps = self._pipeline.state.counters.steps
        found["step", ""] = torch.as_tensor(steps).clone()
        return found

    def skipped_lately(self) -> bool:
        """Whether a step was skipped that was not seen before, as far as is known by now."""
        history = self._pipeline.monitor.tracker.history
        if len(history) == self._events and (not history or history[-1] is self._newest):
            return False
        self._events, self._newest = len(history), history[-1] if history else None
        # A skip may be followed by other events of the same update().
        skips = [step for step, _, name in islice(reversed(history), 8) if name == "skip"]
        new = max(skips, default=0) > self._skips
        self._skips = max([self._skips, *skips])
        return new

    def hook_steps(
        self, at_step: Callable[[Tensor | float, list[Tensor]], None]
    ) -> list[RemovableHandle]:
        """Calls `at_step` before every step.

        With what gives gradients the scale of the pass, and the parameters of the optimizer.
        """

        def before(entry: OptimizerEntry, *_: Any) -> None:
            unscaled = entry.stage is UNSCALED or entry.unscaled_in is not None
            params = [param for group in entry.param_groups() for param in group["params"]]
            at_step(self.scale() if unscaled else 1.0, params)

        handles = []
        for entry in self._pipeline.entries.all:
            register = getattr(entry.optimizer, "register_step_pre_hook", None)
            if register is not None:
                handles.append(register(lambda *_, entry=entry: before(entry)))
        return handles

    def keeps_log(self) -> bool:
        """Whether the scaler keeps a log of the run."""
        return self._pipeline.monitor.stream is not None

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line to the log of the run, if the scaler keeps one."""
        stream = self._pipeline.monitor.stream
        if stream is not None:
            stream.write(line)
