"""Inspector: samples of what is inside a model, far apart, and what they show to be wrong."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.errors import SettingError
from gradscale.monitor.findings import Finding
from gradscale.monitor.sample_findings import from_samples
from gradscale.monitor.sample_table import table
from gradscale.monitor.samples import WEIGHT_GRAD, Sample
from gradscale.runlog.lines import finding_line, sample_line
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.inspect.compiled import Eager
from gradscale.torch.inspect.counts import Counts
from gradscale.torch.inspect.link import ScalerLink
from gradscale.torch.inspect.pending import Pending
from gradscale.torch.inspect.probe import Probe, Subject
from gradscale.torch.inspect.replay import replay
from gradscale.torch.inspect.weights import Idle, Numbers, Weights
from gradscale.torch.tenants import Tenancy, has_tenant

KEPT = 1000
"""Samples that are kept."""
_RECENT = 16
"""Samples from which findings are made for the log of the run."""
_PATIENCE = 8
"""Iterations that a sample waits for a backward pass: in a GAN, another model may have its turn."""
_SOONER = 10
"""A skipped step is looked into at once, but not oftener than ten times as often as asked for."""


class Inspector:
    """Samples a model at intervals: where numbers overflow, underflow or are lost.

        inspector = Inspector(model, scaler, every=100)
        for batch in data:
            ...  # with a scaler, the inspector follows its update() or apply()
        print(inspector.report())
        for finding in inspector.findings():
            print(finding)

    Modules have hooks in sampled iterations only; all others cost nothing. The first iteration is
    sampled, and one after a skipped step. Without a scaler, call `inspector.step()` after every
    step of the optimizer. As a context manager it closes itself.

    Args:
        model: The model; it may be compiled, wrapped in DDP, or sharded by FSDP2.
        scaler: The `GradScaler` or `MixedPrecision` that trains it.
        every: Number of iterations between two samples.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, every: int = 100) -> None:
        self._subject = Subject(model)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"every must be a whole number >= 1, got {every!r}.")
        if has_tenant(model, "BlockScales"):
            raise SettingError(
                "Inspector cannot be combined with BlockScales: gradients between blocks have the "
                "scales of blocks, and the hooks of Inspector would take these scales out. "
                "print(blocks.report()) shows the gradients of every block. To use Inspector, "
                "call blocks.remove() first."
            )
        self._tenancy = Tenancy(model, "Inspector")
        weakref.finalize(self, self._tenancy.end)
        self._eager = Eager(model)
        self.every = every
        self._link = None
        if scaler is not None:
            self._link = ScalerLink(scaler, self._end_iteration, self._subject.params)
        self._tables: dict[torch.device, Counts] = {}
        self._idle = Idle()
        self._window: _Window | None = None
        self._pending: deque[Pending] = deque()
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._written: set[tuple[str, str]] = set()
        self._iteration = 0
        self._since = 0
        self._closed = False
        self._finalizer: Any = None
        self._open(None)

    # Iterations.

    def step(self) -> None:
        """Ends an iteration; call it after the step if there is no scaler."""
        if self._link is not None:
            raise SettingError(
                "step() is only for an inspector without a scaler, and this one is advanced by "
                "the update() of its scaler. Remove the call."
            )
        self._end_iteration()

    def _end_iteration(self) -> None:
        """Ends the sample of this iteration, if there is one, and begins the next if it is due."""
        if self._closed or capturing():
            return
        self._iteration += 1
        self._since += 1
        link, window = self._link, self._window
        skipped = link is not None and link.skipped_lately()
        due = self._since >= self.every or (skipped and self._since * _SOONER >= self.every)
        if window is not None or due:  # else nothing more: most iterations end here
            stepped = None if link is None else link.stepped()
            if window is not None:
                window.iterations += 1
                if window.probe.passes or window.iterations >= _PATIENCE:
                    self._window = None
                    self._pending.append(window.end(self._iteration, link, stepped))
            if due and self._window is None:
                self._open(stepped)
        if self._pending:
            self._collect(wait=False)

    def _open(self, stepped: list[Tensor] | None) -> None:
        """Begins a sample."""
        self._since = 0
        # Gradients can be there before the first iteration for any reason.
        looks_back = self._iteration > 0 and (self._link is None or stepped is not None)
        self._window = _Window(
            self._subject, self._tables, self._eager, self._link, stepped, looks_back, self._idle
        )
        if self._finalizer is not None:
            self._finalizer.detach()  # it would keep the window of before
        self._finalizer = weakref.finalize(self, self._window.close)

    def close(self) -> None:
        """Removes all hooks, stops following the scaler, and writes pending samples to its log.

        Samples can still be read. **Waits for the device.**
        """
        self._stop()
        self._collect(wait=True)

    def _stop(self) -> None:
        """Removes every hook, and stops following the scaler."""
        self._closed = True
        self._tenancy.end()
        window, self._window = self._window, None
        if window is not None:
            window.close()
        if self._link is not None:
            self._link.detach()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:  # the device may be what has failed
            self._stop()

    def replay(self, closure: Callable[[], Tensor]) -> Sample:
        """Returns a sample that distinguishes zeros caused by underflow from exact zeros.

            inspector.replay(lambda: loss_fn(model(batch), target))

        `closure` computes the loss, without autocast and without a backward pass. It is run twice,
        with its backward pass: in the format of the run at the current scale, and in float32.
        Gradients, buffers and random state are restored. **Waits for the device.**
        """
        window, self._window = self._window, None
        if window is not None:  # the passes of the replay are not those of the run
            window.close()
        scale = 1.0 if self._link is None else float(self._link.scaler.get_scale())
        samples = self.samples
        seen = samples[-1].format if samples else "float32"
        format = seen if seen != "float32" or self._link is None else self._link.format()
        try:
            sample = replay(self._subject, closure, format, scale, self._iteration, self._eager)
        finally:
            if window is not None:
                self._open(None)
        self._take(sample)
        return sample

    # Results.

    @property
    def samples(self) -> list[Sample]:
        """The last 1,000 samples, oldest first; **waits for the device**."""
        self._collect(wait=True)
        return list(self._samples)

    def findings(self) -> list[Finding]:
        """Returns what the samples show to be wrong, empty if nothing; **waits for the device**."""
        return from_samples(self.samples)

    def report(self) -> str:
        """Returns a table of the last samples by module, and findings; **waits for the device**."""
        samples = self.samples
        return "\n\n".join([table(samples), *map(str, from_samples(samples))])

    def _collect(self, wait: bool) -> None:
        """Reads the samples that have arrived, or all, and writes them to the log of the run."""
        while self._pending and (wait or self._pending[0].arrived()):
            sample = self._pending.popleft().read()
            for tensor in sample.of(WEIGHT_GRAD):
                if tensor.zeros == tensor.numel:
                    param = self._subject.params[tensor.name]
                    self._idle.keep(tensor.name, param, decays=True)
            self._take(sample)

    def _take(self, sample: Sample) -> None:
        """Keeps a sample, and writes it and what it shows to the log of the run."""
        self._samples.append(sample)
        if self._link is None or not self._link.keeps_log():
            return
        self._link.write(sample_line(sample))
        # Few, because this is in the training loop.
        for finding in from_samples(list(self._samples)[-_RECENT:]):
            if (finding.kind, finding.where) not in self._written:
                self._written.add((finding.kind, finding.where))
                self._link.write(finding_line(finding))


class _Window:
    """An iteration that is being sampled, or several, until one has a backward pass."""

    def __init__(
        self,
        subject: Subject,
        tables: dict[torch.device, Counts],
        eager: Eager,
        link: ScalerLink | None,
        stepped: list[Tensor] | None,
        looks_back: bool,
        idle: Idle,
    ) -> None:
        self.iterations = 0
        self._subject, self._tables, self._eager = subject, tables, eager
        self._stepped, self._looks_back = stepped, looks_back
        for each in tables.values():
            each.clear()
        self.weights = Weights(subject.params, idle)
        self.probe = Probe(subject, tables, self._at_pass, self.weights.after_pass)
        if link is not None:
            self.probe.aside = link.aside
        self._handles: list[RemovableHandle] = []
        eager.enter()
        self.probe.open()
        self.weights.begin()
        if link is not None:
            self._handles = link.hook_steps(self.weights.at_step)

    def _at_pass(self) -> None:
        """Looks at gradients when a pass begins."""
        if self._looks_back:
            self._looks_back = False
            self.weights.at_first_pass(self._stepped)
        else:
            self.weights.at_later_pass()

    def close(self) -> None:
        """Removes every hook."""
        self.probe.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._eager.leave()

    def end(self, number: int, link: ScalerLink | None, stepped: list[Tensor] | None) -> Pending:
        """What was counted, on its way to the host."""
        self.close()
        trained = None if link is None else link.trained()
        with torch.no_grad():
            if self.probe.passes:
                exact = () if link is None else link.exact()
                self.weights.end(stepped, exact, self.probe.with_grad)
            counts = [(table.send(), list(table.numels)) for table in self._tables.values()]
            self.probe.trail.send()
            facts = [self.weights.send()]
            if link is not None:
                facts.append(Numbers(link.numbers()))
        return Pending(self._subject, self.probe, counts, facts, number, trained)
