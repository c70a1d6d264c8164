from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from gradscale import SettingError, Static, StuckError
from gradscale.torch import Event, GradScaler
from one_weight import OURS, Run, root

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("skip", "grow", "backoff", "floor", "recover", "stuck")


def listen(scaler: GradScaler) -> list[Event]:
    """Every event from now on."""
    events: list[Event] = []
    for name in NAMES:
        scaler.on(name, events.append)
    return events


def bad(
    scaler: GradScaler, w: torch.Tensor, optimizer: torch.optim.Optimizer, value: float
) -> None:
    scaler.backward(w.sum())
    w.grad.fill_(value)
    scaler.apply(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_events_come_in_order_with_step_scale_and_outcome(device: str, fused: bool) -> None:
    scaler = GradScaler(
        device, init_scale=8.0, min_scale=2.0, growth_interval=2, stuck_after=3, on_stuck="ignore"
    )
    events = listen(scaler)
    w = torch.ones(1, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, fused=fused)
    for value in (math.inf, math.nan, math.inf, math.inf, 1.0, 1.0, 1.0):
        bad(scaler, w, optimizer, value)
    scaler.flush()
    told = [(event.step, event.name, event.scale) for event in events]
    assert told == [
        (1, "skip", 4.0),
        (1, "backoff", 4.0),
        (2, "skip", 2.0),
        (2, "backoff", 2.0),
        (2, "floor", 2.0),
        (3, "skip", 2.0),
        (3, "stuck", 2.0),
        (4, "skip", 2.0),
        (5, "recover", 2.0),
        (6, "grow", 4.0),
    ]
    assert [(step, scale, name) for step, name, scale in told] == scaler.history
    skips = [event.outcome for event in events if event.name == "skip"]
    assert [int(outcome.skipped_in_a_row) for outcome in skips] == [1, 2, 3, 4]
    assert [float(outcome.scale) for outcome in skips] == [8.0, 4.0, 2.0, 2.0]
    assert float(events[-1].outcome.scale) == 2.0


def test_events_of_torchs_loop_are_the_same() -> None:
    run = Run(OURS, weight=0.0, init_scale=2.0, min_scale=1.0, growth_interval=1)
    events = listen(run.scaler)
    run.train(1.0, loss=root)
    torch.nn.init.ones_(run.model.weight)
    run.train(1.0)
    assert [event.name for event in events] == ["skip", "backoff", "floor", "recover", "grow"]


def test_each_optimizer_is_stuck_for_itself() -> None:
    scaler = GradScaler("cpu", policy=Static(init_scale=1.0), stuck_after=3, on_stuck="ignore")
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.0) for w in params]
    events = listen(scaler)
    for _ in range(4):
        scaler.backward(params[0].sum() + params[1].sum())
        params[0].grad.fill_(math.nan)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert [event.name for event in events] == ["skip", "skip", "skip", "stuck", "skip"]


def stuck(loss: Any, **settings: Any) -> Run:
    run = Run(OURS, weight=0.0, **settings)
    run.scaler.name(run.model)
    run.train(*[1.0] * 22, loss=loss)
    return run


def nowhere(outputs: torch.Tensor) -> torch.Tensor:
    """At 0 a finite loss whose gradient is NaN: the root's infinite slope times 0."""
    return (outputs.sqrt() * 0.0).sum()


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        (lambda y: y.sum() * math.nan, {}, "the loss is not finite, and no scale"),
        (root, {"min_scale": 2.0**16}, "even at min_scale"),
        (nowhere, {"stuck_after": 20}, "a lower scale does not prevent that"),
        (root, {}, "still falling"),
    ],
)
def test_a_stuck_run_is_diagnosed_in_words(loss: Any, settings: Any, words: str) -> None:
    given = {"stuck_after": 3, **settings}
    with pytest.raises(StuckError, match="weight") as caught:
        stuck(loss, on_stuck="raise", **given)
    assert words in str(caught.value)
    with pytest.warns(UserWarning, match=f"{given['stuck_after']} steps in a row") as warned:
        stuck(loss, on_stuck="warn", **given)
    assert warned[0].filename.endswith("one_weight.py")  # where update() was called
    assert stuck(loss, on_stuck="ignore", **given).scaler.history


def test_the_warning_comes_once_for_each_time_it_is_stuck() -> None:
    run = Run(OURS, weight=0.0, on_stuck="warn", stuck_after=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(*[1.0] * 9, loss=root)
        torch.nn.init.ones_(run.model.weight)
        run.train(1.0)
        torch.nn.init.zeros_(run.model.weight)
        run.train(*[1.0] * 2, loss=root)
    assert len(caught) == 2
    assert "stuck" in [name for _, _, name in run.scaler.history]


def test_a_stuck_error_leaves_a_scaler_that_works() -> None:
    run = Run(OURS, weight=0.0, on_stuck="raise", stuck_after=2, init_scale=4.0)
    with pytest.raises(StuckError):
        run.train(*[1.0] * 9, loss=root)
    assert run.scaler.get_scale() == 1.0
    torch.nn.init.ones_(run.model.weight)
    run.train(1.0)
    assert run.weight == 0.0


def test_a_callback_that_raises_loses_no_event() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)

    def fail(event: Event) -> None:
        raise KeyError(event.name)

    scaler.on("skip", fail)
    events: list[Event] = []
    scaler.on("backoff", events.append)
    with pytest.raises(KeyError):
        bad(scaler, w, optimizer, math.inf)
    assert events == []
    scaler.flush()
    assert [event.name for event in events] == ["backoff"]


def test_every_listener_hears_though_one_raises_and_being_stuck_is_not_lost() -> None:
    scaler = GradScaler("cpu", on_stuck="raise", stuck_after=1)
    w, heard = torch.ones(1, requires_grad=True), []

    def fail(event: Event) -> None:
        raise KeyError

    scaler.on("stuck", fail)
    scaler.on("stuck", heard.append)
    with pytest.raises(KeyError):
        bad(scaler, w, torch.optim.SGD([w], lr=1.0), math.inf)
    with pytest.raises(StuckError):
        scaler.flush()
    assert len(heard) == 1


def test_an_update_that_sets_the_scale_tells_it() -> None:
    scaler, w = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.backward(w.sum())
    w.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update(1024.0)
    assert scaler.history == [(1, 1024.0, "skip")]


def test_optimizers_recover_together_in_any_order() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    a, b = (torch.optim.SGD([w], lr=1.0) for w in params)
    for optimizers, value in (([a, b], math.inf), ([b, a], 1.0)):
        scaler.backward(params[0].sum() + params[1].sum())
        params[0].grad.fill_(value)
        scaler.apply(optimizers)
    assert [name for _, _, name in scaler.history] == ["skip", "backoff", "recover"]


def test_one_step_of_several_optimizers_is_told_once() -> None:
    scaler = GradScaler("cpu", stuck_after=2, init_scale=8.0)
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=1.0) for w in params]

    def step() -> None:
        scaler.backward(params[0].sum() + params[1].sum())
        params[1].grad.fill_(math.inf)
        scaler.apply(optimizers)

    step()
    with pytest.warns(UserWarning, match="2 steps in a row") as warned:
        step()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    names = [name for _, _, name in scaler.history]
    assert names == ["skip", "backoff", "skip", "stuck", "backoff"]


def test_a_load_drops_what_is_of_another_run() -> None:
    run = Run(OURS, weight=0.0, on_stuck="raise", stuck_after=3)
    saved = run.scaler.state_dict()
    run.train(1.0, 1.0, loss=root)
    run.scaler.load_state_dict(saved)
    run.train(1.0, 1.0, loss=root)
    assert int(run.scaler.outcome().skipped_in_a_row) == 2
    with pytest.raises(StuckError):
        run.train(1.0, loss=root)


def test_history_is_bounded() -> None:
    run = Run(OURS, growth_interval=1, init_scale=1.0, max_scale=2.0)
    run.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(600):
        run.train(2.0**127, 1.0)  # at 2 an overflow, at 1 none
    assert len(run.scaler.history) == 1000
    assert run.scaler.history[-1][0] == 1200


def test_bad_settings_are_errors() -> None:
    with pytest.raises(SettingError, match="on_stuck must be one of warn, raise, ignore"):
        GradScaler("cpu", on_stuck="panic")
    for wrong in (0, -1, 2.0, True, "50"):
        with pytest.raises(SettingError, match="stuck_after"):
            GradScaler("cpu", stuck_after=wrong)
    with pytest.raises(SettingError, match="event must be one of skip"):
        GradScaler("cpu").on("skipped", print)


def test_copies_keep_the_settings_and_not_the_listeners() -> None:
    import copy

    scaler = GradScaler("cpu", on_stuck="raise", stuck_after=1)
    scaler.on("skip", pytest.fail)
    twin = copy.deepcopy(scaler)
    w = torch.ones(1, requires_grad=True)
    with pytest.raises(StuckError):
        bad(twin, w, torch.optim.SGD([w], lr=1.0), math.inf)
    assert [name for _, _, name in twin.history] == ["skip", "stuck", "backoff"]


@pytest.mark.parametrize("copied", [False, True])
def test_counts_of_a_step_of_several_optimizers_go_to_these_alone(copied: bool) -> None:
    def parts(count: int) -> tuple[list[torch.Tensor], list[torch.optim.SGD]]:
        params = [torch.ones(1, requires_grad=True) for _ in range(count)]
        return params, [torch.optim.SGD([w], lr=1.0) for w in params]

    def step(scaler: GradScaler, size: float, params: Any, optimizers: Any) -> None:
        scaler.backward(sum(w.sum() * size for w in params))
        scaler.apply(optimizers)

    scaler, pair = GradScaler("cpu", init_scale=8.0), parts(2)
    for _ in range(2):
        step(scaler, 1e38, *pair)
    again = copy.deepcopy(scaler)
    if not copied:
        again = GradScaler("cpu")
        again.load_state_dict(scaler.state_dict())
    step(again, 1.0, *parts(2))
    assert not again._pipeline.monitor.busy
    step(again, 1.0, *parts(1))
    assert [name for _, _, name in again.history] == ["recover"]
