"""The stages of a step: collect, measure, agree, decide, step, record.

`unscale_`, `clip_grad_norm_`, `step`, `apply` and a closure's evaluations are choices of these
stages. Values are plain numbers where the state is on the CPU, and 0-dim tensors elsewhere; nothing
waits for the device but the step of an optimizer that cannot skip by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import GradStats
from gradscale.torch.distributed.consensus import Consensus
from gradscale.torch.grads import backend, reference
from gradscale.torch.grads.collect import Gradients, with_grad, with_grad_of
from gradscale.torch.grads.dtensor import PLAIN
from gradscale.torch.grads.fields import DECISION, offset, value_at
from gradscale.torch.grads.reference import Measurement, clip_factor
from gradscale.torch.grads.scale import constant
from gradscale.torch.state import ScaleState
from gradscale.torch.step import checks, fused
from gradscale.torch.step.agreement import agree
from gradscale.torch.step.contract import is_capable, refuse_small_eps, step_on_device, writes_back
from gradscale.torch.step.entries import (
    READY,
    STEPPED,
    UNSCALED,
    Entries,
    OptimizerEntry,
    refuse_stage,
)
from gradscale.torch.step.masters import clip_masters, judge_fit
from gradscale.torch.step.passes import Passes
from gradscale.torch.step.result import Step, blame_before_clipping, blame_of
from gradscale.torch.step.sharing import unscaled_among
from gradscale.torch.telemetry.monitor import Monitor

_SKIP = offset(DECISION, "skip")


class Pipeline:
    """The stages, and what they work on."""

    def __init__(
        self,
        state: ScaleState,
        consensus: Consensus,
        monitor: Monitor,
        *,
        recheck: bool,
        underflow_every: int,
        rows: Sequence[int] = (),
    ) -> None:
        if isinstance(underflow_every, bool) or not isinstance(underflow_every, int):
            raise SettingError(f"underflow_every must be a whole number, got {underflow_every!r}.")
        if underflow_every < 0:
            raise SettingError(f"underflow_every must be >= 0, got {underflow_every}.")
        self.state = state
        self.consensus = consensus
        self.monitor = monitor
        self.entries = Entries(consensus, monitor.tracker)
        self.entries.rows = list(rows)
        if any(rows):
            monitor.restore(rows)
        self.passes = Passes(state, self.entries)
        self.recheck = recheck
        self.underflow_every = underflow_every
        self.always_amax = False
        """Whether amax is measured even where nothing goes by it."""
        self.unfinished: Step | None = None
        """A step of several optimizers of which one has raised."""

    def settings(self, enabled: bool) -> dict[str, Any]:
        """What a copy of the scaler needs besides the state; process groups stay here."""
        if enabled and self.entries.in_use():
            raise CallOrderError(
                "A GradScaler can be pickled only between iterations: call update() first."
            )
        return {
            "consensus": self.consensus,
            "monitor": self.monitor,
            "recheck": self.recheck,
            "underflow_every": self.underflow_every,
            "rows": self.entries.skipped_rows(),
        }

    def place(self, device: torch.device) -> None:
        """Puts the state of the scale on `device`, that of the first loss."""
        self.passes.refuse_capture("The first loss is scaled")
        self.state.place(device)
        if not self.state.on_host:
            self.monitor.log.prepare(device)

    # Collect.

    def use(self, optimizer: Any, call: str, unscaled: bool = True) -> OptimizerEntry:
        """The entry of `optimizer`; a CallOrderError if `call` cannot come now."""
        entry = self.entries.of(optimizer, call)
        if dist.is_available() and dist.is_initialized():
            params = [p for group in optimizer.param_groups for p in group["params"]]
            same = entry.groups_version == self.consensus.groups.version
            if not same or not entry.groups or not set(map(type, params)) <= PLAIN:
                checks.find_groups(self, entry, params)
        if self.state.live is None:
            self.state.placed(f"{call}()")
        now = self.passes.iteration
        if now is not None and now.thread not in (None, get_ident()):
            self.passes.claim()
        if self.passes.watched:
            self.passes.compare()  # of a pass that raised
        if entry.stage is UNSCALED and entry.held is None and not with_grad(optimizer.param_groups):
            entry.make_ready()  # what an earlier iteration has unscaled is gone
        if entry.lacking is not None and not with_grad(optimizer.param_groups):
            entry.lacking = None  # what it lacks a part of is gone
        if entry.mixed or not (entry.stage is READY or (unscaled and entry.stage is UNSCALED)):
            refuse_stage(entry, call, unscaled)
        entry.held = optimizer
        return entry

    def collect(self, entries: list[OptimizerEntry], call: str) -> Step:
        """The step of `entries`, with their gradients and the scale of these."""
        passes = self.passes
        step = self.step_of(entries)
        if (self.entries.gone or len(self.entries.all) > 1) and passes.count:
            for entry in entries:
                if entry.stepped_at < 0 and entry.stage is READY:
                    self.entries.inherit(entry, step.grads.params, passes.count)
        params = step.grads.params
        formats = (len(params), params[0].dtype, params[-1].dtype) if params else None
        for entry in entries:
            if entry.formats != formats and params:
                if entry.masters is None:
                    refuse_small_eps(entry.held, params)
                entry.formats = formats
            if entry.stage is READY and max(entry.stepped_at, 0) >= passes.count:
                checks.check_new_gradients(self, entry, call)
        if len(entries) > 1:
            for entry in entries:
                left = passes.scale_of(entry)
                if entry.stage is READY and left is not step.scale:
                    entry.left = left
                    entry.rescale(step.scale)
        if passes.droppable:
            checks.weigh(self, step)
        return step

    def step_of(self, entries: list[OptimizerEntry]) -> Step:
        """A step of `entries`, with nothing checked."""
        params = with_grad_of([entry.held for entry in entries])
        step = Step(entries, Gradients(params), self.passes.scale_of(entries[0]))
        for entry in entries:
            if entry.masters is not None and entry.masters.needed(params):
                step.masters = True
        return step

    # Measure.

    def measure(
        self,
        step: Step,
        *,
        unscale: bool = False,
        amax: bool = False,
        max_norm: float | None = None,
    ) -> None:
        """Reads the gradients once, and unscales them on the way if they are to be.

        Gradients that several optimizers share are unscaled once.
        """
        sharing: Any = len(self.entries.all) > 1 and self.entries.sharing(step.entries[0])
        unscaled: Sequence[Tensor] = ()
        if sharing:
            step.shared = True
            unscaled = unscaled_among(self.passes, step.grads.params, sharing)
            # In place, because not every optimizer leaves them unscaled; torch's fused ones do, if
            # the step takes place, which must be a number on the host then.
            known = step.scale.number is not None
            unscale = unscale or not (known and all(writes_back(e.held) for e in step.entries))
        unscale = unscale and not step.in_place
        by_kernel = step.scale.number is None and not unscaled
        by_kernel = by_kernel and fused.measure_fused(self, step, unscale, max_norm)
        if self.underflow_every and not by_kernel and not step.in_place and step.grads.params:
            self._measure_underflow(step)
        if unscaled and not step.in_place:
            checks.measure_shared(self, step, list(unscaled), max_norm)
            unscale = True
        elif by_kernel:
            pass
        elif step.grads.params:
            scale = step.scale.unit() if step.in_place else step.scale
            # Unscaled gradients may be too large for half weights, and not for their masters.
            low = scale.number is None or scale.number < 1.0
            wide = step.masters and not step.in_place and low
            measure = backend.measure if scale.number is None else reference.measure
            found = measure(
                step.grads,
                scale,
                unscale=unscale,
                amax=amax or wide or self.always_amax or bool(self.state.policy.goes_by),
                max_norm=max_norm,
            )
            step.measured = found
            self.take(step, found)
            if wide:
                judge_fit(step)
        else:
            step.measured = Measurement(self.nothing_found())  # other ranks may have a norm
            self.take(step, step.measured)
        if unscale:
            self.note_unscaled(step)
            if sharing:
                self.passes.note_unscaled(step.grads.params)
        if unscale or max_norm is not None:
            stats = step.entries[0].stats
            if stats is not None and (stats.finite is False or stats.fits is False):
                blame_before_clipping(step, self.passes, self.monitor.names)

    def note_unscaled(self, step: Step) -> None:
        """Remembers that the gradients are unscaled, so that the step can be asked for again."""
        step.in_place = True
        for entry in step.entries:
            entry.stage = UNSCALED
            entry.unscaled_in = self.passes.ended

    def nothing_found(self) -> GradStats:
        """What there is to say of no gradients."""
        if self.state.on_host:
            return GradStats(finite=True, amax=0.0, norm=0.0)
        zero = torch.zeros_like(self.state.live.scale)
        return GradStats(finite=zero == 0, fits=zero == 0, amax=zero, norm=zero)

    def take(self, step: Step, found: Measurement) -> None:
        """Adds a measurement to what is known of the gradients of a step."""
        stats = found.stats
        for entry in step.entries:
            known = entry.stats if entry.decision is None else entry.found()
            if known is None:
                entry.stats = stats
            else:
                entry.stats = stats._replace(
                    finite=known.finite & stats.finite,
                    fits=known.fits & stats.fits,
                    # The first read is of the gradients as they came.
                    amax=stats.amax if known.amax is None else known.amax,
                    norm=stats.norm if known.norm is None else known.norm,
                )
            entry.measured.append(found)
        step.clip = found.clip

    def _measure_underflow(self, step: Step) -> None:
        """Measures the share of gradients that underflow, in every so many steps."""
        if self.is_underflow_due(step):
            smallest = self.state.format.smallest_normal
            share = reference.underflow(step.grads.values, smallest, step.scale.tensor)
            for entry in step.entries:
                entry.underflow = share

    def is_underflow_due(self, step: Step) -> bool:
        """Whether this step is one of those that measure underflow; counts it."""
        if not self.underflow_every:
            return False
        checks = step.entries[0].checks
        for entry in step.entries:
            entry.checks = checks + 1
        return checks % self.underflow_every == 0

    def read_again(self, step: Step, max_norm: float | None = None) -> None:
        """Reads unscaled gradients once more: what is not finite only now does not fit."""
        found = Measurement(self.nothing_found())
        if step.grads.params:
            found = backend.measure(step.grads, step.scale.unit(), amax=True, max_norm=max_norm)
        step.measured, step.clip = found, found.clip
        for entry in step.entries:
            before = entry.found() or self.nothing_found()
            spoilt = before.finite & (found.stats.finite ^ True)
            amax = before.amax
            if amax is None and found.stats.amax is not None:
                amax = found.stats.amax * step.scale.value
            entry.stats = before._replace(
                fits=before.fits & found.stats.fits & (spoilt ^ True),
                amax=amax,
                norm=found.stats.norm,
            )
            entry.measured.append(found)

    # Agree and decide.

    def agree(self, step: Step, max_norm: float | None = None) -> None:
        """Combines what was found with the other ranks that must decide alike."""
        if any(entry.groups for entry in step.entries):
            norm = agree(self, step)
            if max_norm is not None:
                step.clip = clip_factor(norm, max_norm)

    def decide(self, step: Step) -> None:
        """Decides whether the step is skipped."""
        iteration = self.passes.last or self.passes.current()
        entry = step.entries[0]
        odd = iteration.losses or entry.held_back is not None or entry.lacking is not None
        if len(step.entries) == 1 and not odd:
            if entry.decision is not None and step.skip is False:
                step.decision, step.skip = entry.decision, entry.decision[_SKIP]
                return
            stats: Any = entry.found() if entry.stats is None else entry.stats
            step.stats = stats
            step.skip = step.skip | ((stats.finite & stats.fits) ^ True)
            return
        finites, fits = [], []
        for entry in step.entries:
            stats = entry.found()
            finite = stats.finite
            for own in iteration.losses.values():
                if own.reaches(entry):
                    finite = finite & own.finite
            if entry.held_back is not None:  # by another rank, which such a loss reached
                finite = finite & (entry.held_back ^ True)
            if entry.lacking is not None:
                finite = finite & (entry.lacking ^ True)
            finites.append(finite)
            fits.append(stats.fits)
            step.skip = step.skip | ((finite & stats.fits) ^ True)
        step.stats = stats._replace(finite=reduce(and_, finites), fits=reduce(and_, fits))

    # Step.

    def run(self, step: Step, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Steps the optimizers, or not; what the step of the last one returned."""
        if step.skip is True:
            return None
        if step.skip is not False:
            capable = all(is_capable(entry.held) for entry in step.entries)
            if not capable and bool(step.skip):
                return None
        result = None
        for entry in step.entries:
            if entry.stage is STEPPED:  # in a call that another optimizer ended with an error
                continue
            result = self._run_one(entry, step, args, kwargs or {})
            entry.stage = STEPPED
        return result

    def _run_one(
        self, entry: OptimizerEntry, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Steps one optimizer with what is still in its gradients divided out."""
        optimizer = entry.held
        supports = getattr(optimizer, "_step_supports_amp_scaling", False) and not entry.older
        if step.masters and entry.masters is not None:
            with entry.masters.stepped(step.factor()):
                if step.limit is not None:
                    clip_masters(optimizer, step.limit, step.clip)
                if not supports:
                    return optimizer.step(*args, **kwargs)
                found_inf = constant(0.0) if step.skip is False else step.skip
                return step_on_device(optimizer, None, found_inf, args, kwargs)
        if not supports:
            return optimizer.step(*args, **kwargs)
        scale = None if step.in_place else step.divisor()
        if step.masters:  # another optimizer of the step has them
            scale = step.factor().reciprocal() if step.in_place else scale
            scale = None if step.limit is not None else scale
        elif step.in_place and step.measured is not None and not writes_back(optimizer):
            scale = step.scale.unit().tensor  # as torch, unless the user called unscale_()
        if step.skip is not False or "grad_scale" in vars(optimizer):
            found_inf = constant(0.0) if step.skip is False else step.skip
            return step_on_device(optimizer, scale, found_inf, args, kwargs)
        # The same for a step that is known to take place.
        optimizer.grad_scale, optimizer.found_inf = scale, constant(0.0)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    # Record.

    def record(self, step: Step) -> None:
        """Ends the step: counts it, and keeps what became of it."""
        passes = self.passes
        iteration = passes.last or passes.current()
        if step.decision is not None:
            step.losses_finite = None  # it is in the decision
        elif iteration.loss is None and iteration.uses_losses:
            step.losses_finite = iteration.loss_finite
        else:
            step.losses_finite = iteration.losses_finite()
        for loss in iteration.losses.values():
            mine = loss.loss_finite
            step.losses_finite = mine if step.losses_finite is None else step.losses_finite & mine
            if any(loss.reaches(each) for each in step.entries):
                step.own += ((loss.finite, loss.scale.tensor),)
        step.row = self._count_row(step)
        step.bad_rank, step.underflow = step.entries[0].bad_rank, step.entries[0].underflow
        step.state = self.state
        if step.skip is not False:
            step.blame = blame_of(step, passes, self.monitor.names)
        if step.shared and not step.in_place and step.skip is False:
            passes.note_unscaled(step.grads.params)  # by the optimizer, in place
        for entry in step.entries:
            entry.note_stepped(step, passes.count)
        step.drop_gradients()
        self.monitor.steps.append(step)

    def _count_row(self, step: Step) -> Any:
        """How many steps in a row are skipped by now; the count of the first entry is used."""
        entries, skip = step.entries, step.skip
        if self.state.on_host:
            row = entries[0].row + 1 if skip else 0
            for entry in entries:
                entry.row = row
            return row
        if step.decision is not None:
            return None  # it is in the decision, and `update()` counts
        if not isinstance(skip, Tensor):
            skip = torch.full_like(self.state.live.scale, skip, dtype=torch.bool)
        rows = [self.row_of(entry) for entry in entries]
        count = torch.where(skip != 0, rows[0] + 1, 0)
        for each in rows:
            each.copy_(count)  # in place, so that a CUDA graph counts on
        return count

    def count_late(self, step: Step) -> None:
        """Counts a step that a kernel has decided about, where `update()` takes the long way."""
        if step.decision is not None:
            step.row = value_at(step.decision, "skipped_in_a_row")
            step.losses_finite = value_at(step.decision, "loss_finite")
            for optimizer in step.optimizers():
                entry = self.entries.find(optimizer)
                if entry is not None:
                    self.row_of(entry).copy_(step.row)

    def row_of(self, entry: OptimizerEntry) -> Tensor:
        """int32, on the device of the scale: steps of an entry in a row that were skipped."""
        if not isinstance(entry.row, Tensor):
            self.passes.refuse_capture("An optimizer is stepped for the first time")
            like = self.state.live.scale
            entry.row = torch.full_like(like, entry.row, dtype=torch.int32)
        return entry.row
