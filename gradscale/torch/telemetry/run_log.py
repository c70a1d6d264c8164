"""The lines of a run log, from the records that every step sends to the host.

What a record lacks (norm, amax, loss) travels beside it, in one copy that nothing waits for; what a
skipped step needs besides, the counts of its gradients, follows when the record shows the skip. A
line is made when everything of it has arrived, so lines come late, in order, and never hold up a
step. Without a listener nothing of this runs.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale import __version__
from gradscale.errors import SettingError
from gradscale.monitor import Event, Step, StepRecord
from gradscale.monitor.diagnosis import weights_evidence
from gradscale.monitor.findings import Finding, RecordRules
from gradscale.runlog import VERSION, RunLog, finding_line
from gradscale.runlog.writer import MAX_STEPS
from gradscale.torch.grads.fields import value_at
from gradscale.torch.grads.scale import readable
from gradscale.torch.telemetry.outcome import StepOutcome
from gradscale.torch.telemetry.transport import Record, Sent

Listener = Callable[[dict[str, Any]], object]

_VALUES = ("finite", "fits", "loss_finite", "grad_norm", "amax", "underflow", "skipped_in_a_row")
"""What the outcome of a step has, besides the scale."""
_CULPRITS = 8
"""Parameters that the line of a skipped step names."""


def log_to(
    scaler: Any,
    path: str | os.PathLike[str] | Listener | None,
    *,
    max_steps: int = MAX_STEPS,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes what every step does to files in the folder `path`, or calls `path` with each line.

        scaler.log_to("runs/first")

    A thread writes the lines when their numbers have arrived on the host, so no step waits. Call
    `flush()` at the end. Each rank writes its own file; an existing file is continued.
    docs/reference/logs.md describes the lines, and `gradscale.runlog.read(path)` reads them.

    Args:
        path: A folder, a function that takes a line, or None, which ends all logs.
        max_steps: Number of applied steps to keep, evenly thinned; all skipped steps are kept.
        settings: Additional settings for the first line: numbers, strings, lists.

    Raises:
        SettingError: A setting is wrong, or another log writes to the same file.
    """
    monitor = scaler._pipeline.monitor
    if path is None:
        scaler.flush()
        if monitor.stream is not None:
            monitor.stream.close()
        monitor.stream = None
        return
    rank, world = _place()
    header = {
        "kind": "run",
        "version": VERSION,
        "gradscale": __version__,
        "engine": f"torch {torch.__version__}",
        "rank": rank,
        "world_size": world,
        "time": time.time(),
        "settings": {**_settings(scaler), **(settings or {})},
    }
    log = None
    if callable(path):
        write: Listener = path
    elif isinstance(path, str | os.PathLike):
        log = RunLog(path, rank, max_steps=max_steps)
        write = log.write
    else:
        raise SettingError(f"path must be a folder or a function, got {type(path).__name__}.")
    if monitor.stream is None:
        monitor.stream = Stream(
            scaler._pipeline.passes, monitor.tracker.stuck_after, rank if world > 1 else None
        )
        # After that of the log, so before it: what is called last at exit was registered first.
        atexit.register(_look_once_more, weakref.ref(monitor))
    monitor.stream.add(write, log)
    monitor.busy = True
    write(header)


def _settings(scaler: Any) -> dict[str, Any]:
    """The settings of a scaler, as they are written."""
    pipeline = scaler._pipeline
    return {
        "policy": repr(scaler.policy),
        "format": pipeline.state.format.name,
        "device": str(scaler._device),
        "enabled": scaler.is_enabled(),
        "stuck_after": pipeline.monitor.tracker.stuck_after,
        "underflow_every": pipeline.underflow_every,
    }


def _place() -> tuple[int, int]:
    """The rank of this process and how many there are: by torch, by the environment, or 0 and 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]
    if not all(number.isdecimal() for number in found):
        raise SettingError(f"RANK and WORLD_SIZE must be whole numbers, got {found}.")
    return int(found[0]), int(found[1])


def _look_once_more(ref: weakref.ref[Any]) -> None:
    """Writes the lines of what has arrived by the end of the process."""
    monitor = ref()
    if monitor is not None and monitor.stream is not None:
        with contextlib.suppress(Exception):  # the device, or a listener, may be gone
            monitor.look_once_more()


class Stream:
    """Turns records into lines, for everybody who listens to one scaler."""

    def __init__(self, passes: Any, stuck_after: int, rank: int | None) -> None:
        self._rank = rank
        self._passes = weakref.ref(passes)
        self._listeners: list[tuple[Listener, RunLog | None]] = []
        self._rules = RecordRules(stuck_after=stuck_after)
        self._optimizers: dict[Hashable, int] = {}
        """The numbers of optimizers, in order of first use."""
        self._pending: deque[_Line] = deque()
        self._last = 0
        """The number of the last step of a disabled scaler, which counts none itself."""

    def add(self, write: Listener, log: RunLog | None = None) -> None:
        """Calls `write` with every line from now on."""
        # Files come first: a function that raises must not cost them lines.
        self._listeners.insert(len(self._listeners) if log is None else 0, (write, log))
        self._last = max(self._last, 0 if log is None else log.last_step)

    def send(self, record: Record) -> None:
        """Sends what a record lacks; in `update()`, and never in a capture."""
        passes = self._passes()
        iteration = None if passes is None else passes.last
        loss = None
        if iteration is not None:
            loss, iteration.first = iteration.first, None
        record.extra = Extra(record.steps(), loss)

    def take(
        self,
        record: StepRecord,
        extra: Extra | None,
        events: Sequence[Event],
        weights: Sequence[str],
    ) -> None:
        """Takes a record that has arrived; None for `extra` where a CUDA graph has made it."""
        self._pending.append(_Line(record, extra, events, weights))
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Hands on the lines that are complete; with `wait` all, and to the disk."""
        while self._pending and (wait or self._pending[0].arrived()):
            one = self._pending.popleft()
            lines = list(self._lines(one))
            for write, _ in list(self._listeners):
                for line in lines:
                    write(line)
        for _, log in self._listeners if wait else ():
            if log is not None:
                log.flush()

    def write(self, line: dict[str, Any]) -> None:
        """Hands on a line that is not of a record."""
        for write, _ in self._listeners:
            write(line)

    def close(self) -> None:
        """Closes the files."""
        for _, log in self._listeners:
            if log is not None:
                log.close()

    def _lines(self, one: _Line) -> list[dict[str, Any]]:
        """The lines of a record: the step, its events, what was found."""
        number = one.record.step
        if not number:  # of a disabled scaler
            number = self._last = self._last + 1
        step = one.step_line(number, self._number_of)
        lines = [step]
        for event in one.events:
            made = {"kind": "event", "step": number, "name": event.name, "scale": event.scale}
            lines.append({**made, "loss_id": event.loss_id})
        found = self._rules.take(step)
        if one.weights:
            text, where = weights_evidence(one.weights), one.weights[0]
            text = text[0].upper() + text[1:]
            found.append(Finding.of("weights-not-finite", text, where, step=number))
        return lines + [finding_line(finding._replace(rank=self._rank)) for finding in found]

    def _number_of(self, key: Hashable) -> int:
        """The number of an optimizer, or of several that step together."""
        return self._optimizers.setdefault(key, len(self._optimizers))


class Extra:
    """What the record of an `update()` lacks, on its way to the host.

    Args:
        steps: The steps of the record.
        loss: The first loss of the iteration: a number, a tensor with one element, or None.
    """

    __slots__ = ("_loss", "_pieces", "_sent", "_steps", "time")

    def __init__(self, steps: Sequence[Any], loss: Any) -> None:
        self.time = time.time()
        self._pieces: list[Tensor] = []
        self._loss = self._carry(loss)
        self._steps = [self._values_of(step) for step in steps]
        self._sent: dict[torch.device, Sent] = {}
        for device in {piece.device for piece in self._pieces}:
            here = [piece for piece in self._pieces if piece.device == device]
            self._sent[device] = Sent.away(torch.cat(here))

    def _values_of(self, step: Any) -> dict[str, Any]:
        """The values of a step, each as `_carry()` has it."""
        outcome = step.outcome()
        kept = {"scale": self._carry(outcome.scale)}
        values = outcome._values
        if isinstance(values, Tensor):  # a kernel has decided
            kept["decision"] = self._carry(values, whole=True)
            kept["underflow"] = None if step.underflow is None else True
        elif values is None:
            kept |= {name: self._carry(getattr(outcome, name)) for name in _VALUES}
        else:
            kept |= {name: self._carry(values[name]) for name in _VALUES}
        kept["own"] = [(self._carry(finite), self._carry(at)) for finite, at in outcome._own]
        return kept

    def _carry(self, value: Any, whole: bool = False) -> Any:
        """`value`, or what stands for it until it has arrived."""
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        if readable(value) and not whole:
            return value.item()
        self._pieces.append(value if whole else value.reshape(1).float())
        return _Piece(len(self._pieces) - 1)

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return all(sent.arrived() for sent in self._sent.values())

    def read(self) -> tuple[Any, list[dict[str, Any]]]:
        """The loss, and the values of every step; waits for what has not arrived."""
        rest = {device: sent.read() for device, sent in self._sent.items()}
        vectors = []
        for piece in self._pieces:
            vector, rest[piece.device] = rest[piece.device].tensor_split([piece.numel()])
            vectors.append(vector)
        return _resolved(self._loss, vectors), [_numbers(each, vectors) for each in self._steps]


class _Piece(int):
    """The place of a value among those that are sent."""


def _resolved(value: Any, vectors: Sequence[Tensor]) -> Any:
    """`value`, or the number that it stands for."""
    return vectors[value].item() if isinstance(value, _Piece) else value


def _numbers(values: Mapping[str, Any], vectors: Sequence[Tensor]) -> dict[str, Any]:
    """The values of a step as numbers."""
    numbers = dict(values)
    if "decision" in values:
        vector = vectors[values["decision"]]
        numbers = {name: value_at(vector, name).item() for name in _VALUES}
        numbers["underflow"] = numbers["underflow"] if values["underflow"] else None
        numbers["scale"], numbers["own"] = values["scale"], values["own"]
    numbers["own"] = [tuple(_resolved(each, vectors) for each in pair) for pair in numbers["own"]]
    return {name: _resolved(value, vectors) for name, value in numbers.items()}


class _Line:
    """A record whose line is not written yet."""

    __slots__ = ("_blames", "_extra", "events", "record", "weights")

    def __init__(
        self,
        record: StepRecord,
        extra: Extra | None,
        events: Sequence[Event],
        weights: Sequence[str],
    ) -> None:
        self.record, self._extra, self.events, self.weights = record, extra, events, weights
        self._blames: list[Any] | None = None

    def arrived(self) -> bool:
        """Whether making the lines would wait for nothing."""
        if self._extra is None:
            return True
        if not self._extra.arrived():
            return False
        if self._blames is None:
            skipped = [step.outcome.outcome() for step in self.record.steps if not step.applied]
            self._blames = [one._blame for one in skipped if hasattr(one._blame, "send")]
            for blame in self._blames:
                blame.send()
        return all(blame.arrived() for blame in self._blames)

    def step_line(self, number: int, number_of: Callable[[Hashable], int]) -> dict[str, Any]:
        """The line of the step."""
        _, scale, steps, moves = self.record
        loss, values = (None, [{}] * len(steps)) if self._extra is None else self._extra.read()
        line: dict[str, Any] = {
            "kind": "step",
            "step": number,
            "time": time.time() if self._extra is None else self._extra.time,
            "scale": scale,
        }
        if loss is not None:
            line["loss"] = loss
        pairs = zip(steps, values, strict=True)
        line["steps"] = [_step(step, known, number_of(step.key)) for step, known in pairs]
        if self._extra is None and len(steps) == 1 and moves:
            line["steps"][0]["scale"] = moves[0].before  # of a CUDA graph, which logs no more
        line["moves"] = [list(move) for move in moves if move.before != move.after]
        return line


def _step(step: Step, values: Mapping[str, Any], optimizer: int) -> dict[str, Any]:
    """One step as it is written, with what is known of it."""
    line: dict[str, Any] = {
        "optimizer": optimizer,
        "applied": step.applied,
        "loss_finite": step.loss_finite,
    }
    if step.skipped_in_a_row is not None:
        line["skipped_in_a_row"] = step.skipped_in_a_row
    for name in ("scale", "grad_norm", "amax", "underflow"):
        if values.get(name) is not None:
            line[name] = values[name]
    if not values:
        return line
    outcome = step.outcome.outcome()
    if "amax" in line and outcome._format is not None:
        line["headroom"] = _headroom(outcome._format.max, line["amax"])
    if not step.applied:
        on_host = _outcome_of(outcome, values)
        line["verdict"] = on_host.verdict()
        line["culprits"] = [list(one) for one in on_host.culprits()[:_CULPRITS]]
    return line


def _headroom(most: float, amax: float) -> float:
    """Binades between `amax` and `most`."""
    if amax == 0 or not math.isfinite(amax):
        return math.inf if amax == 0 else -amax
    return math.log2(most / amax)


def _outcome_of(outcome: StepOutcome, values: Mapping[str, Any]) -> StepOutcome:
    """An outcome of a skipped step with the same values on the host, so that nothing waits."""
    flags: dict[str, Any] = {
        name: torch.tensor(bool(values[name]), device="cpu")
        for name in ("finite", "fits", "loss_finite")
    }
    return StepOutcome(
        applied=torch.tensor(False, device="cpu"),
        scale=torch.tensor(values["scale"], device="cpu"),
        skipped_in_a_row=torch.tensor(int(values["skipped_in_a_row"]), device="cpu"),
        _format=outcome._format,
        _floor=outcome._floor,
        _own=tuple(values["own"]),
        _blame=outcome._blame,
        _nothing=outcome._nothing,
        **flags,
    )
