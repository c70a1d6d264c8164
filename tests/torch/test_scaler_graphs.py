"""Whole training steps inside CUDA graphs: what they tell is what eager ones tell.

On the CPU a graph is a list of operations that are run again; see tests/support/cpu_graph.py.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from cpu_graph import CpuGraph, keep_in_tensors
from gradscale import CallOrderError, StuckError
from gradscale.torch import Event, GradScaler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("skip", "grow", "backoff", "floor", "recover", "stuck")
HUGE = 2.0**127
"""Finite itself, but not times 2."""


class World:
    """A weight, its gradient that can be set from outside, and a scaler; in graphs or not."""

    def __init__(self, device: str, way: str = "apply", **settings: Any) -> None:
        given = {"init_scale": 8.0, "growth_interval": 3, "on_stuck": "ignore", **settings}
        self.scaler, self.way = GradScaler(device, **given), way
        self.events: list[Event] = []
        for name in NAMES:
            self.scaler.on(name, self.events.append)
        self.params = [torch.ones(1, device=device, requires_grad=True) for _ in range(2)]
        self.factors = torch.ones(2, device=device)
        capturable = {"capturable": True} if device == "cuda" else {}
        self.optimizers = [AdamW([w], fused=True, **capturable) for w in self.params]
        self.device = device
        if device == "cpu":
            keep_in_tensors(self.scaler)
            self.iterate()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.iterate()
        torch.cuda.current_stream().wait_stream(side)

    def iterate(self) -> None:
        """One iteration."""
        losses = [(w * factor).sum() for w, factor in zip(self.params, self.factors, strict=True)]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.way == "apply":
            self.scaler.backward(sum(losses))
            self.scaler.apply(self.optimizers, clip_norm=1.0)
        elif self.way == "own losses":
            self.scaler.backward(losses[0])
            self.scaler.backward(losses[1], loss_id="other")
            self.scaler.apply(self.optimizers)
        else:
            self.scaler.scale(sum(losses)).backward()
            for optimizer in self.optimizers if self.way == "drop-in" else self.optimizers[:1]:
                self.scaler.step(optimizer)
            self.scaler.update()

    def set(self, *factors: float) -> None:
        self.factors.copy_(torch.tensor(factors))

    def capture(self, iterate: Callable[[], None] | None = None) -> Any:
        """A graph of one iteration; on the CPU, one that has been replayed once."""
        if self.device == "cpu":
            graph: Any = CpuGraph()
            with graph:
                (iterate or self.iterate)()
            return graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (iterate or self.iterate)()
        graph.replay()
        return graph


def assert_same(graphed: World, eager: World) -> None:
    """All that must not depend on graphs: events, parameters, the scale and its counters."""
    for world in (graphed, eager):
        world.scaler.flush()
        told = [(event.step, event.scale, event.name) for event in world.events]
        assert told == world.scaler.history
    ours, theirs = ([e._replace(outcome=None) for e in w.events] for w in (graphed, eager))
    assert ours == theirs
    assert graphed.scaler.state_dict() == eager.scaler.state_dict()
    # Eager steps may take other kernels, whose sums are rounded in another order.
    # A gradient near the end of float32 has a square beyond it, and the weight is NaN for both.
    torch.testing.assert_close(graphed.params, eager.params, equal_nan=True)


def plan(length: int) -> list[tuple[float, float]]:
    """What both gradients are: mostly 1, sometimes what overflows, once what no scale cures."""
    steps = [(1.0, 1.0)] * length
    for place in (4, 5, 6, 7, 15, 30):
        steps[place] = (HUGE, 1.0)
    for place in (11, 12, 15, 16, 17, 18):
        steps[place] = (1.0, HUGE)
    for place in (24, 25, 26, 27):
        steps[place] = (math.nan, 1.0)
    return steps


def planned(world: World, run: Callable[[], None], steps: list[tuple[float, float]]) -> None:
    for factors in steps:
        world.set(*factors)
        run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["apply", "drop-in", "drop-in, one optimizer", "own losses"])
def test_replays_tell_what_eager_steps_tell(device: str, way: str) -> None:
    eager, graphed = (World(device, way, stuck_after=3, min_scale=2.0) for _ in range(2))
    steps = plan(50)
    planned(eager, eager.iterate, steps)
    graphed.set(*steps[0])
    graph = graphed.capture()
    planned(graphed, graph.replay, steps[1:])
    assert graphed.events == []  # nobody has looked yet
    assert_same(graphed, eager)
    names = {event.name for event in graphed.events}
    assert names == set(NAMES)
    assert all(event.outcome is None for event in graphed.events)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["apply", "drop-in"])
def test_two_graphs_and_eager_steps_in_turn_are_told_in_order(device: str, way: str) -> None:
    eager, mixed = World(device, way), World(device, way)
    graphs = [mixed.capture(), mixed.capture()]
    planned(eager, eager.iterate, [(1.0, 1.0)] * 2)
    steps = plan(50)
    planned(eager, eager.iterate, steps)
    for i, factors in enumerate(steps):
        mixed.set(*factors)
        (mixed.iterate, graphs[0].replay, graphs[1].replay, graphs[0].replay)[i % 4]()
        if i % 23 == 0:
            mixed.scaler.flush()
    assert_same(mixed, eager)


@pytest.mark.parametrize("device", DEVICES)
def test_two_iterations_in_one_graph_are_two(device: str) -> None:
    eager, graphed = World(device), World(device)

    def twice() -> None:
        graphed.iterate()
        graphed.iterate()

    steps = plan(50)
    graphed.set(*steps[0])
    graph = graphed.capture(twice)
    planned(graphed, graph.replay, steps[1:])
    planned(eager, eager.iterate, [each for each in steps for _ in range(2)])
    assert_same(graphed, eager)


def test_an_eager_step_brings_the_events_of_the_replays_before_it() -> None:
    world = World("cpu")
    graph = world.capture()
    planned(world, graph.replay, [(1.0, HUGE)] * 3)
    assert world.events == []
    world.set(1.0, 1.0)
    world.iterate()
    assert [(event.step, event.name) for event in world.events] == [
        (3, "skip"),
        (3, "backoff"),
        (4, "skip"),
        (4, "backoff"),
        (5, "skip"),
        (5, "backoff"),
        (6, "recover"),
    ]
    assert [event.outcome is None for event in world.events] == [True] * 6 + [False]


@pytest.mark.gpu
def test_nothing_waits_when_replays_and_eager_steps_take_turns(no_sync: Any) -> None:
    world = World("cuda")
    graph = world.capture()
    with no_sync():
        for _ in range(20):
            graph.replay()
            world.iterate()
    world.scaler.flush()
    assert [event.step for event in world.events] == list(range(3, 43, 3))
    assert {event.name for event in world.events} == {"grow"}


def test_being_stuck_in_replays_is_a_warning_an_error_or_nothing() -> None:
    for on_stuck in ("warn", "raise", "ignore"):
        world = World("cpu", on_stuck=on_stuck, stuck_after=4, min_scale=2.0)
        graph = world.capture()
        planned(world, graph.replay, [(1.0, HUGE)] * 9)
        if on_stuck == "warn":
            with pytest.warns(UserWarning, match="4 steps in a row.* CUDA graph") as warned:
                world.scaler.flush()
            assert len(warned) == 1
            assert warned[0].filename == __file__
        if on_stuck == "raise":
            with pytest.raises(StuckError, match="4 steps in a row"):
                world.scaler.flush()
            assert [event.step for event in world.events if event.name == "skip"] == [3, 4, 5, 6]
        world.scaler.flush()
        assert [event.step for event in world.events if event.name == "stuck"] == [6]
        assert [event.step for event in world.events if event.name == "skip"][-1] == 11


def test_a_loss_that_is_not_finite_is_diagnosed_in_replays_too() -> None:
    world = World("cpu", on_stuck="raise", stuck_after=2)
    graph = world.capture()
    planned(world, graph.replay, [(1.0, math.nan)] * 2)
    with pytest.raises(StuckError, match="the loss is not finite, and no scale"):
        world.scaler.flush()


def test_what_is_lost_is_counted_and_the_rest_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 100
    for module in ("graph_log", "monitor"):
        monkeypatch.setattr(f"gradscale.torch.telemetry.{module}.ROWS", rows)
    world = World("cpu", stuck_after=50, min_scale=1.0)
    graph = world.capture()
    world.set(1.0, math.nan)
    for _ in range(rows + 60):
        graph.replay()
    with pytest.warns(UserWarning, match=r"of 61 steps.* every 100 replays") as warned:
        world.scaler.flush()
    assert warned[0].filename == __file__
    # The fiftieth skip in a row is among the lost ones, and yet the user hears of it.
    assert [event[:3] for event in world.events if event.name == "stuck"] == [("stuck", 63, 1.0)]
    assert world.scaler.history[-1] == (rows + 62, 1.0, "skip")
    world.set(1.0, 1.0)
    graph.replay()
    world.scaler.flush()
    assert world.scaler.history[-1] == (rows + 63, 1.0, "recover")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wait", [False, True])
def test_a_follower_is_called_for_every_applied_replay(device: str, wait: bool) -> None:
    world = World(device, "drop-in")
    scheduler = StepLR(world.optimizers[1], 1)
    calls: list[int] = []
    world.scaler.follow(scheduler, lambda: calls.append(1), wait=wait)
    world.iterate()
    graph = world.capture()  # would wait for the step before, if the scheduler followed it now
    planned(world, graph.replay, [(1.0, HUGE), (1.0, 1.0), (HUGE, 1.0), (HUGE, HUGE)])
    assert scheduler.last_epoch == wait
    world.scaler.flush()
    assert (scheduler.last_epoch, len(calls)) == (4, 5)
    world.set(1.0, 1.0)
    graph.replay()
    world.iterate()
    world.scaler.flush()
    assert (scheduler.last_epoch, len(calls)) == (6, 7)


def test_a_follower_that_raises_at_a_replay_holds_up_nothing_else() -> None:
    world = World("cpu", on_stuck="warn", stuck_after=2)
    calls: list[int] = []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError

    graph = world.capture()
    world.scaler.flush()
    world.scaler.follow(fail_once)
    planned(world, graph.replay, [(1.0, 1.0), (HUGE, 1.0), (1.0, 1.0), (1.0, 1.0)])
    with pytest.raises(KeyError):
        world.scaler.flush()
    world.scaler.flush()
    assert len(calls) == 3
    assert [event.name for event in world.events] == ["grow", "skip", "backoff", "recover"]


def test_a_disabled_scaler_tells_nothing_of_replays() -> None:
    scaler, w = GradScaler("cpu", enabled=False), torch.zeros(1, requires_grad=True)
    optimizer, calls = SGD([w], lr=1.0), []
    scaler.follow(lambda: calls.append(1))
    with CpuGraph():
        scaler.backward(w.sum())
        scaler.apply(optimizer)
    scaler.flush()
    assert calls == []
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    scaler.flush()
    assert calls == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_drops_what_was_replayed_and_graphs_go_on(device: str) -> None:
    world = World(device, stuck_after=3)
    saved = world.scaler.state_dict()
    graph = world.capture()
    planned(world, graph.replay, [(HUGE, 1.0)] * 2)
    world.scaler.load_state_dict(saved)
    world.scaler.flush()
    assert world.events == []
    planned(world, graph.replay, [(math.nan, 1.0)] * 3 + [(1.0, 1.0)])
    world.scaler.flush()
    told = [(event.step, event.name) for event in world.events]
    assert told == [(2, "skip"), (3, "skip"), (4, "skip"), (4, "stuck"), (5, "recover")]


def pickled(scaler: GradScaler) -> GradScaler:
    return pickle.loads(pickle.dumps(scaler))


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickled])
def test_copies_have_a_log_of_their_own(twin: Callable[[GradScaler], GradScaler]) -> None:
    world = World("cpu")
    graph = world.capture()
    other = twin(world.scaler)
    planned(world, graph.replay, [(HUGE, 1.0)])
    other.flush()
    assert other.history == []
    world.scaler, mine = other, world.scaler
    keep_in_tensors(other)
    world.set(1.0, 1.0)
    world.iterate()
    world.capture().replay()
    other.flush()
    assert other.history == [(3, 16.0, "grow")]
    mine.flush()
    assert mine.history == [(3, 4.0, "skip"), (3, 4.0, "backoff")]


def test_what_every_replay_would_make_anew_must_be_there_before_a_capture() -> None:
    world = World("cpu")
    new: Any = torch.ones(1, requires_grad=True)
    optimizer = SGD([new], lr=1.0, fused=True)

    def first_loss() -> None:
        GradScaler("cpu").scale(new.sum())

    def first_step() -> None:
        world.scaler.backward(new.sum())
        world.scaler.apply(optimizer)

    def first_of_its_name() -> None:
        world.scaler.backward(new.sum(), loss_id="new")

    for call in (first_loss, first_step, first_of_its_name):
        with pytest.raises(CallOrderError, match=r"first.*before the capture"), CpuGraph():
            call()


def test_outside_of_graphs_the_log_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("cpu")

    def touched(*_: object) -> None:
        pytest.fail("The log was touched.")

    log: Tensor = world.scaler._pipeline.monitor.log._log  # type: ignore[assignment]
    before = log._version
    monkeypatch.setattr("gradscale.torch.telemetry.graph_log.append", touched)
    monkeypatch.setattr("gradscale.torch.telemetry.graph_log.GraphLog._read", touched)
    planned(world, world.iterate, plan(50))
    world.scaler.flush()
    assert log._version == before
