"""Events and the run log: told from compiled steps, only where they are asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import gradscale as gs
from gradscale.cli.commands import app
from gradscale.jax import Event, Monitor, scale_of, scaled
from gradscale.report import summarise
from gradscale.runlog import read

POLICY = gs.Dynamic(init_scale=16.0, growth_interval=2, min_scale=4.0)
PARAMS = {"w": jnp.zeros(3)}
NUMBERS = (1.0, 1.0, math.inf, math.inf, math.nan, 1.0)


def run(monitor: Monitor | None, numbers: tuple[float, ...] = NUMBERS) -> Any:
    """Steps with gradients of these numbers, in one scan; the last state."""
    optimizer = scaled(optax.sgd(0.1), POLICY, on_step=monitor)

    def step(state: Any, number: Any) -> Any:
        g = {"w": jnp.full(3, number)}
        _, state = optimizer.update(g, state, PARAMS, value=jnp.float32(0.5))
        return state, None

    train = jax.jit(lambda state, numbers: jax.lax.scan(step, state, numbers)[0])
    state = train(optimizer.init(PARAMS), jnp.asarray(numbers))
    text = train.lower(state, jnp.asarray(numbers)).as_text()
    assert ("callback" in text) is (monitor is not None)
    if monitor is not None:
        monitor.flush()
    return state


def test_events_come_in_order_and_only_when_asked_for() -> None:
    heard: list[Event] = []
    monitor = Monitor(POLICY, on_event=heard.append)
    state = run(monitor)
    assert [(event.step, event.name, event.scale) for event in heard] == [
        (2, "grow", 32.0),
        (3, "skip", 16.0), (3, "backoff", 16.0),
        (4, "skip", 8.0), (4, "backoff", 8.0),
        (5, "skip", 4.0), (5, "backoff", 4.0), (5, "floor", 4.0),
        (6, "recover", 4.0),
    ]  # fmt: skip
    assert [name for _, _, name in monitor.history] == [event.name for event in heard]
    assert float(scale_of(run(None))) == float(scale_of(state))


def test_run_log_is_read_by_the_report(tmp_path: Path) -> None:
    monitor = Monitor(POLICY, tmp_path / "run", settings={"lr": 0.1})
    run(monitor)
    monitor.close()
    found = read(tmp_path / "run")
    summary = summarise(found, "run")
    assert summary.as_dict()["name"] == "run"
    told = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"])
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert [facts[name] for name in ("steps", "skipped")] == [6, 3]
    assert facts["causes"] == {"scale too high": 3}
    again = Monitor(POLICY, tmp_path / "other")
    run(again, (1.0, 1.0))
    again.close()
    assert summarise(read(tmp_path / "other"), "run") != summary


def test_stuck_run_warns_once() -> None:
    monitor = Monitor(POLICY, stuck_after=3)
    record = _record(2)
    monitor(record)
    with pytest.warns(UserWarning, match="3 steps in a row"):
        monitor(_record(3))
    monitor(_record(4))
    Monitor(POLICY, stuck_after=3, on_stuck="ignore")(_record(3))
    with pytest.raises(gs.SettingError, match="an exception in a callback"):
        Monitor(POLICY, on_stuck="raise")


def test_step_that_every_shard_tells_of_counts_once() -> None:
    heard: list[Event] = []
    monitor = Monitor(POLICY, on_event=heard.append)
    for _ in range(4):
        monitor(_record(1))
    assert [event.name for event in heard].count("skip") == 1


def test_steps_after_a_return_to_an_earlier_state_are_recorded(tmp_path: Path) -> None:
    monitor = Monitor(POLICY, tmp_path / "run")
    optimizer = scaled(optax.sgd(0.1), POLICY, on_step=monitor)
    step, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for numbers in ((1.0, 1.0, 1.0), (math.inf, 1.0)):  # the second time from the first state
        after = state
        for number in numbers:
            _, after = step({"w": jnp.full(3, number)}, after, PARAMS)
        monitor.flush()
    monitor.close()
    applied = {step["step"]: step["steps"][0]["applied"] for step in read(tmp_path / "run").steps}
    assert (applied[1], applied[2]) == (False, True)


def _record(number: int) -> Any:
    """What is told of a skipped step, the `number`th in a row."""
    optimizer = scaled(optax.sgd(0.1), POLICY)
    state = optimizer.init(PARAMS)
    outcome = state.outcome._replace(
        applied=np.bool_(False), finite=np.bool_(False), skipped_in_a_row=np.int32(number)
    )
    from gradscale.jax.optimizer import Record

    return Record(np.int32(number), np.float32(8.0), jax.device_get(outcome))
