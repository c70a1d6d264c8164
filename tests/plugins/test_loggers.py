"""Loggers get the numbers of every step and all findings, by calls that their libraries document.

TensorBoard's real writer is used where it is installed. The others are stand-ins whose methods have
the documented signatures, so that a call which the library would refuse fails here too.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradscale import SettingError
from gradscale.plugins import loggers
from gradscale.torch import GradScaler, MixedPrecision

NAN = math.nan


class Writer:
    """`torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        assert walltime is not None
        self.scalars.append((tag, scalar_value, global_step or 0))

    def add_text(
        self,
        tag: str,
        text_string: str,
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        self.texts.append((tag, text_string, global_step or 0))


class WandbRun:
    """What `wandb.init()` returns."""

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.rows: list[dict[str, Any]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        assert step is None  # it would have to grow with the caller's own
        assert commit is not None
        self.rows.append(data)


class Mlflow:
    """The module `mlflow`."""

    def __init__(self) -> None:
        self.metrics: list[tuple[dict[str, float], int | None]] = []
        self.files: dict[str, str] = {}

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
    ) -> None:
        assert synchronous is False
        self.metrics.append((metrics, step))

    def log_text(self, text: str, artifact_file: str, run_id: str | None = None) -> None:
        self.files[artifact_file] = text


def train(scaler: Any, grads: tuple[float, ...] = (1.0, math.inf, NAN, 1.0)) -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.0)
    for grad in grads:
        scaler.backward(w.sum() * (NAN if math.isnan(grad) else 1.0))
        if math.isinf(grad):
            w.grad.fill_(grad)  # type: ignore[union-attr]
        scaler.apply(optimizer)
    scaler.flush()


FIRST = {"scale": 2.0**16, "applied": 1.0, "skips": 0.0, "loss": 1.0, "grad_norm": 1.0}
HEADROOM = math.log2(65504 / 65536)


def check_first(values: dict[str, float]) -> None:
    assert values == {**FIRST, "headroom": pytest.approx(HEADROOM)}


def test_tensorboard_gets_scalars_and_text() -> None:
    scaler, writer = GradScaler("cpu"), Writer()
    loggers.tensorboard(scaler, writer)
    train(scaler)
    check_first({tag.removeprefix("gradscale/"): v for tag, v, step in writer.scalars if step == 1})
    skips = [value for tag, value, _ in writer.scalars if tag == "gradscale/skips"]
    assert skips == [0.0, 1.0, 2.0, 2.0]
    assert not any(math.isnan(value) for _, value, _ in writer.scalars)
    ((tag, text, step),) = writer.texts
    assert (tag, step) == ("gradscale/findings", 3)
    assert text.startswith("loss-not-finite (first at step 3): ")


def test_wandb_gets_rows_over_an_axis_of_its_own() -> None:
    scaler, run = GradScaler("cpu"), WandbRun()
    loggers.wandb(scaler, run)
    train(scaler)
    assert run.axes == {"gradscale/step": None, "gradscale/*": "gradscale/step"}
    assert [row["gradscale/step"] for row in run.rows] == [1, 2, 3, 3, 4]
    first = {name.removeprefix("gradscale/"): value for name, value in run.rows[0].items()}
    del first["step"]
    check_first(first)
    assert "gradscale/findings" in run.rows[3]
    assert "gradscale/loss" not in run.rows[2]


def test_mlflow_gets_metrics_and_a_file() -> None:
    scaler, client = GradScaler("cpu"), Mlflow()
    loggers.mlflow(scaler, client, prefix="amp")
    train(scaler)
    assert [step for _, step in client.metrics] == [1, 2, 3, 4]
    check_first({name.removeprefix("amp/"): v for name, v in client.metrics[0][0].items()})
    assert client.files["amp/findings.txt"].startswith("loss-not-finite")


def test_python_logging_warns_of_findings(caplog: pytest.LogCaptureFixture) -> None:
    scaler = GradScaler("cpu")
    loggers.python_logging(scaler)
    with caplog.at_level(logging.DEBUG, "gradscale"):
        train(scaler)
    levels = [(one.levelno, one.getMessage().split(",")[0]) for one in caplog.records]
    assert levels[:3] == [
        (logging.DEBUG, "step 1: scale 65536"),
        (logging.INFO, "step 2: scale 32768"),
        (logging.INFO, "step 3: scale 32768"),
    ]
    assert levels[3][0] == logging.WARNING
    assert len(levels) == 5


def test_every_leaves_out_applied_steps_alone() -> None:
    scaler, client = GradScaler("cpu"), Mlflow()
    loggers.mlflow(scaler, client, every=3)
    train(scaler, (1.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert [step for _, step in client.metrics] == [2, 3, 6]
    for value in (0, True, 1.5):
        with pytest.raises(SettingError, match="every must be a whole number >= 1, got"):
            loggers.mlflow(scaler, client, every=value)  # type: ignore[arg-type]


def test_optimizers_that_step_apart_have_numbers() -> None:
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.0) for param in params]
    scaler, client = GradScaler("cpu"), Mlflow()
    loggers.mlflow(scaler, client)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    for optimizer in optimizers:
        scaler.clip_grad_norm_(optimizer, 2.0)
        scaler.step(optimizer)
    scaler.update()
    assert {"gradscale/grad_norm_0", "gradscale/grad_norm_1"} <= set(client.metrics[0][0])


def test_logger_that_raises_is_dropped_with_a_warning() -> None:
    scaler = GradScaler("cpu")
    good = Mlflow()
    loggers.tensorboard(scaler, object())
    loggers.mlflow(scaler, good)
    with pytest.warns(UserWarning, match="A logger raised AttributeError.*add_scalar") as caught:
        train(scaler)
    assert len(caught) == 1
    assert len(good.metrics) == 4


def test_mixed_precision_can_be_logged() -> None:
    model, client = torch.nn.Linear(1, 1), Mlflow()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp16-master")
    loggers.mlflow(mp, client)
    with mp.autocast():
        loss = model(torch.ones(1, 1)).float().sum()
    mp.backward(loss)
    mp.step()
    mp.flush()
    assert len(client.metrics) == 1


def test_tensorboards_own_writer_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    scaler = GradScaler("cpu")
    with SummaryWriter(str(tmp_path)) as writer:
        loggers.tensorboard(scaler, writer)
        train(scaler)
    found = EventAccumulator(str(tmp_path)).Reload()
    scales = [(event.step, event.value) for event in found.Scalars("gradscale/scale")]
    assert scales == [(1, 65536.0), (2, 32768.0), (3, 32768.0), (4, 32768.0)]
    assert found.Tags()["tensors"] == ["gradscale/findings/text_summary"]
