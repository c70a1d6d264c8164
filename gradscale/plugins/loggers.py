"""TensorBoard, Weights & Biases, MLflow and Python's logging, fed by the lines of a run log.

    loggers.tensorboard(scaler, writer)

Each takes a `GradScaler` or `MixedPrecision` and the object that it is to call, so nothing is
imported here. They are called in the thread that trains, when the numbers of a step have arrived,
and no step waits for the device. What raises in them is reported once, and training goes on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from logging import DEBUG, INFO, WARNING, Logger, getLogger
from typing import Any

from gradscale.errors import SettingError, caller_level
from gradscale.monitor.findings import Finding
from gradscale.runlog.lines import finding_of

_MEASURED = ("grad_norm", "headroom", "underflow")


def tensorboard(scaler: Any, writer: Any, *, every: int = 1, prefix: str = "gradscale") -> None:
    """Adds scalars of every step, and findings as text, to a `SummaryWriter`.

    Args:
        scaler: A `GradScaler` or `MixedPrecision`.
        writer: An object with `add_scalar()` and `add_text()`.
        every: Applied steps whose number is a multiple of it are added; all skipped steps are.
        prefix: The start of the tags.
    """

    def add(step: int, time: float, values: dict[str, float], findings: list[Finding]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{prefix}/{name}", value, global_step=step, walltime=time)
        for finding in findings:
            writer.add_text(f"{prefix}/findings", str(finding), global_step=step, walltime=time)

    _attach(scaler, add, every)


def wandb(
    scaler: Any, run: Any, *, every: int = 1, prefix: str = "gradscale", commit: bool = True
) -> None:
    """Logs every step to a run of Weights & Biases, with a step axis of its own.

    Args:
        scaler: A `GradScaler` or `MixedPrecision`.
        run: The result of `wandb.init()`.
        every: Applied steps whose number is a multiple of it are logged; all skipped steps are.
        prefix: The start of the names.
        commit: False leaves the values for your next `run.log()`. Use it if that passes `step=`,
            since W&B ignores rows for earlier steps.
    """
    run.define_metric(f"{prefix}/step")
    run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def add(step: int, _: float, values: dict[str, float], findings: list[Finding]) -> None:
        row: dict[str, Any] = {f"{prefix}/{name}": value for name, value in values.items()}
        if findings:
            row[f"{prefix}/findings"] = "\n\n".join(map(str, findings))
        run.log({f"{prefix}/step": step, **row}, commit=commit)

    _attach(scaler, add, every)


def mlflow(scaler: Any, client: Any, *, every: int = 1, prefix: str = "gradscale") -> None:
    """Logs metrics of every step to the active run of MLflow, and findings as a text file.

    Args:
        scaler: A `GradScaler` or `MixedPrecision`.
        client: The module `mlflow`, version 2.8 or later.
        every: Applied steps whose number is a multiple of it are logged; all skipped steps are.
        prefix: The start of the names of metrics, and the folder of the file.
    """
    known: list[str] = []

    def add(step: int, _: float, values: dict[str, float], findings: list[Finding]) -> None:
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        if named:
            # Not synchronous: a request to the server would hold up the step.
            client.log_metrics(named, step=step, synchronous=False)
        if findings:
            known.extend(map(str, findings))
            client.log_text("\n\n".join(known) + "\n", f"{prefix}/findings.txt")

    _attach(scaler, add, every)


def python_logging(scaler: Any, logger: Logger | None = None, *, every: int = 1) -> None:
    """Logs findings as warnings, skipped steps as information and applied steps for debugging.

    Args:
        scaler: A `GradScaler` or `MixedPrecision`.
        logger: A logger. Default: the logger "gradscale".
        every: Applied steps whose number is a multiple of it are logged; all skipped steps are.
    """
    chosen = getLogger("gradscale") if logger is None else logger

    def add(step: int, _: float, values: dict[str, float], findings: list[Finding]) -> None:
        if values:
            text = ", ".join(f"{name} {value:g}" for name, value in values.items())
            level = DEBUG if values["applied"] else INFO
            chosen.log(level, "step %d: %s", step, text)
        for finding in findings:
            chosen.log(WARNING, "%s", finding)

    _attach(scaler, add, every)


Add = Callable[[int, float, dict[str, float], list[Finding]], None]


def _attach(scaler: Any, add: Add, every: int) -> None:
    """Calls `add` with step, time, values and findings of the lines of `scaler`."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingError(f"every must be a whole number >= 1, got {every!r}.")
    scaler.log_to(_Listener(add, every))


class _Listener:
    """Takes lines, and calls a logger with what is in them."""

    def __init__(self, add: Add, every: int) -> None:
        self._add, self._every = add, every
        self._skips = 0
        self._time = 0.0
        self._broken = False

    def __call__(self, line: dict[str, Any]) -> None:
        """Hands on what `line` has for a logger."""
        if self._broken:
            return
        values: dict[str, float] = {}
        findings: list[Finding] = []
        if line["kind"] == "step":
            self._time = line["time"]
            applied = all(step["applied"] for step in line["steps"])
            self._skips += not applied
            if applied and line["step"] % self._every:
                return
            values = dict(self._values(line, applied))
        elif line["kind"] == "finding":
            findings = [finding_of(line)]
        if not values and not findings:
            return
        try:
            self._add(line.get("step", 0), self._time, values, findings)
        except Exception as error:
            self._broken = True
            warnings.warn(
                f"A logger raised {type(error).__name__}: {error}. It was removed, and training "
                "continues. Attach it again once the cause is fixed.",
                stacklevel=caller_level(),
            )

    def _values(self, line: dict[str, Any], applied: bool) -> Iterator[tuple[str, float]]:
        """Names and numbers of a step; those of several optimizers have their numbers."""
        yield "scale", line["scale"]
        yield "applied", float(applied)
        yield "skips", float(self._skips)
        if math.isfinite(line.get("loss", math.nan)):
            yield "loss", line["loss"]
        for step in line["steps"]:
            which = f"_{step['optimizer']}" if len(line["steps"]) > 1 else ""
            for name in _MEASURED:
                if math.isfinite(step.get(name, math.nan)):
                    yield name + which, step[name]
