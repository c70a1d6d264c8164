"""`log_to()`: a line for every step, in order, with what is known of it, and nothing waits."""

from __future__ import annotations

import atexit
import copy
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_has
from cpu_graph import CpuGraph, keep_in_tensors
from gradscale import SettingError, Static, StuckError
from gradscale.policy import GradStats
from gradscale.runlog import RunLog, read
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.grads.reference import Measurement
from gradscale.torch.telemetry import run_log, transport
from gradscale.torch.telemetry.blame import BlameLater
from gradscale.torch.telemetry.names import Names
from gradscale.torch.telemetry.weights import bad_weights
from one_weight import HUGE, OURS, Run

Lines = list[dict[str, Any]]


def listen(scaler: Any) -> Lines:
    """Every line from now on."""
    lines: Lines = []
    scaler.log_to(lines.append)
    return lines


def steps_of(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] == "step"]


def named(lines: Lines, kind: str, key: str) -> list[Any]:
    return [line[key] for line in lines if line["kind"] == kind]


class Net:
    """y = w x with an outcome for every step, to compare the lines with."""

    def __init__(self, device: str = "cpu", in_tensors: bool = False, **settings: Any) -> None:
        self.model = nn.Linear(2, 1, bias=False, device=device)
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, fused=True)
        self.scaler = GradScaler(device, on_stuck="ignore", **settings)
        self.scaler.name(self.model)
        if in_tensors:
            keep_in_tensors(self.scaler)
        self.device = device
        self.outcomes: list[Any] = []

    def step(self, x: float) -> None:
        loss = self.model(torch.tensor([[x, 0.0]], device=self.device)).sum()
        self.scaler.backward(loss)
        self.outcomes.append(self.scaler.apply(self.optimizer, clip_norm=1.0))


def check_lines(lines: Lines, net: Net, losses: list[float]) -> None:
    """Compares the lines of steps with the outcomes of these steps."""
    assert [line["step"] for line in lines] == list(range(1, len(net.outcomes) + 1))
    assert [line["loss"] for line in lines] == pytest.approx(losses, nan_ok=True, rel=1e-6)
    for line, outcome in zip(lines, net.outcomes, strict=True):
        (one,) = line["steps"]
        assert one["optimizer"] == 0
        assert one["applied"] is bool(outcome.applied)
        assert one["loss_finite"] is bool(outcome.loss_finite)
        assert one["skipped_in_a_row"] == int(outcome.skipped_in_a_row)
        for name in ("scale", "grad_norm", "amax", "headroom", "underflow"):
            value = getattr(outcome, name)
            found = one.get(name)
            assert (found is None) == (value is None)
            if value is not None:
                expected = float(value)
                assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
        if not outcome.applied:
            assert one["verdict"] == outcome.verdict()
            assert one["culprits"] == [list(culprit) for culprit in outcome.culprits()]
        else:
            assert "verdict" not in one
            assert "culprits" not in one


INPUTS = (1.0, HUGE, 2.0, math.nan, 3.0, 4.0)


def train(net: Net) -> list[float]:
    """Steps with an overflow and a loss that is not finite; the losses."""
    losses = []
    for x in INPUTS:
        losses.append((net.model.weight[0, 0] * x).item())
        net.step(x)
    return losses


@pytest.mark.parametrize("in_tensors", [False, True])
def test_lines_have_what_outcomes_have(in_tensors: bool) -> None:
    net = Net(in_tensors=in_tensors, growth_interval=2, underflow_every=2)
    lines = listen(net.scaler)
    losses = train(net)
    net.scaler.flush()
    steps = steps_of(lines)
    check_lines(steps, net, losses)
    assert "underflow" in steps[0]["steps"][0]
    verdicts = [line["steps"][0].get("verdict") for line in steps]
    assert verdicts == [None, "scale too high", None, "loss not finite", None, None]
    assert [line["scale"] for line in steps] == [2.0**16, *[2.0**15] * 3, *[2.0**16] * 2]
    assert [line["moves"] for line in steps if line["moves"]] == [
        [[0, 2.0**16, 2.0**15, 2.0**-14]],
        [[0, 2.0**15, 2.0**16, 2.0**-14]],
    ]
    events = [line["name"] for line in lines if line["kind"] == "event"]
    assert events == [name for _, _, name in net.scaler.history]
    assert events == ["skip", "backoff", "recover", "skip", "recover", "grow"]
    assert [finding["kind"] for finding in named(lines, "finding", "finding")] == [
        "loss-not-finite"
    ]
    if not in_tensors:  # without kernels, tensors are not looked at one by one
        assert steps[1]["steps"][0]["culprits"][0][0] == "weight"


def test_comparison_of_lines_notices_a_fault() -> None:
    net = Net()
    lines = listen(net.scaler)
    losses = train(net)
    good = steps_of(lines)
    check_lines(good, net, losses)
    for number, name, value in ((0, "amax", 2.0), (1, "verdict", "applied"), (2, "scale", 1.0)):
        bad = copy.deepcopy(good)
        bad[number]["steps"][0][name] = value
        with pytest.raises(AssertionError):
            check_lines(bad, net, losses)


class LateDevice:
    """The CPU as a device whose values arrive on the host when `arrives` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrives = False
        self.early: list[Tensor] = []
        read = transport.Sent.read

        def read_late(sent: transport.Sent) -> Tensor:
            if not self.arrives:
                self.early.append(sent._value)
            return read(sent)

        monkeypatch.setattr(transport.Sent, "arrived", lambda _: self.arrives)
        monkeypatch.setattr(transport.Sent, "read", read_late)
        monkeypatch.setattr(run_log, "readable", lambda _: False)


def test_lines_wait_for_their_values_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(in_tensors=True, growth_interval=2)
    device = LateDevice(monkeypatch)
    lines = listen(net.scaler)
    losses = train(net)
    assert steps_of(lines) == []
    assert device.early == []  # nothing was read that had not arrived
    device.arrives = True
    losses.append((net.model.weight[0, 0] * 1.0).item())
    net.step(1.0)
    check_lines(steps_of(lines), net, losses)
    assert device.early == []


def test_record_that_comes_before_its_values_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, there = Net(in_tensors=True), [False]
    monkeypatch.setattr(run_log.Extra, "arrived", lambda _: there[0])
    lines = listen(net.scaler)
    net.step(1.0)
    net.step(HUGE)
    assert [line["kind"] for line in lines] == ["run"]
    assert net.scaler.history[0][2] == "skip"  # others do not wait
    there[0] = True
    net.step(1.0)
    assert [line["step"] for line in steps_of(lines)] == [1, 2, 3]


def test_blame_is_the_same_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    params = [torch.ones(1, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    place = torch.device("cpu"), torch.float32
    counted = {place: torch.tensor([[0, 0], [2, 1], [0, 0]])}
    peaks = {place: torch.tensor([1.0, 2.0, math.inf])}
    for found in (
        Measurement(GradStats(finite=False), counts=counted, finite_amax=torch.tensor(3.0)),
        Measurement(GradStats(finite=False), counts=counted, finite_amax=lambda: torch.tensor(4.0)),
        Measurement(GradStats(finite=False), peaks=peaks),
        Measurement(GradStats(finite=False)),
    ):
        blame = BlameLater(Names(), [optimizer], params, [found])
        device.arrives = True
        expected = blame()
        device.arrives = False
        assert not blame.arrived()
        blame.send()
        assert not blame.arrived() or found == Measurement(GradStats(finite=False))
        device.arrives = True
        assert blame.arrived()
        assert blame() == expected
        assert len(expected.culprits) == (found.counts is not None or found.peaks is not None)


class Reads(TorchDispatchMode):
    """Counts how often the host would have waited for the device "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.count += 1
            return 0
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("log", [False, True])
def test_log_reads_nothing_from_the_device(log: bool) -> None:
    model = nn.Linear(2, 2, device="meta")
    scaler = GradScaler("meta", growth_interval=1)
    if log:
        scaler.log_to(lambda line: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        with Reads() as reads:
            scaler.scale(model(torch.ones(2, 2, device="meta")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert reads.count == 1  # SGD cannot skip by itself


def test_files_have_the_lines_and_a_continued_run_appends(tmp_path: Path) -> None:
    net = Net(growth_interval=2)
    lines = listen(net.scaler)
    net.scaler.log_to(tmp_path, settings={"batch": 8})
    train(net)
    net.scaler.flush()
    run = read(tmp_path)
    assert repr([{**line, "rank": 0} for line in steps_of(lines)]) == repr(run.steps)
    (header,) = run.headers
    assert header["engine"] == f"torch {torch.__version__}"
    assert header["world_size"] == 1
    assert run.settings["policy"] == repr(net.scaler.policy)
    assert (run.settings["format"], run.settings["batch"]) == ("float16", 8)
    state = net.scaler.state_dict()
    net.scaler.log_to(None)
    net.step(1.0)
    assert len(read(tmp_path).steps) == len(INPUTS)
    second = Net(growth_interval=2)
    second.scaler.load_state_dict(state)
    second.scaler.log_to(tmp_path)
    second.step(1.0)
    second.scaler.flush()
    run = read(tmp_path)
    assert [line["step"] for line in run.steps] == list(range(1, len(INPUTS) + 2))
    assert len(run.headers) == 2


def test_two_scalers_cannot_share_a_file_and_copies_have_no_log(tmp_path: Path) -> None:
    net = Net()
    net.scaler.log_to(tmp_path)
    for made in (copy.deepcopy(net.scaler), pickle.loads(pickle.dumps(net.scaler))):
        assert made._pipeline.monitor.stream is None
    with pytest.raises(SettingError, match="one writer"):
        made.log_to(tmp_path)
    assert made._pipeline.monitor.stream is None
    net.step(1.0)
    net.scaler.flush()
    assert len(read(tmp_path).steps) == 1
    with pytest.raises(SettingError, match="path must be a folder or a function, got int"):
        net.scaler.log_to(3)


def test_scaler_without_a_log_calls_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError(args)

    for name in ("send", "take", "settle"):
        monkeypatch.setattr(run_log.Stream, name, fail)
    monkeypatch.setattr(run_log.Extra, "__init__", fail)
    net = Net()
    train(net)
    net.scaler.flush()
    with pytest.raises(AssertionError):
        train_with_log(net)


def train_with_log(net: Net) -> None:
    net.scaler.log_to(lambda line: None)
    net.step(1.0)


# Every way of stepping.


def two_losses(scaler: Any, model: nn.Module, optimizer: Any) -> None:
    scaler.backward(model(torch.ones(1, 2)).sum() * 3)
    scaler.backward(model(torch.ones(1, 2)).sum(), loss_id="other")
    scaler.apply(optimizer)


def torchs_loop(scaler: Any, model: nn.Module, optimizer: Any) -> None:
    scaler.scale(model(torch.ones(1, 2)).sum() * 3).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def own_loss_alone(scaler: Any, model: nn.Module, optimizer: Any) -> None:
    scaler.backward(model(torch.ones(1, 2)).sum() * 3, loss_id="only")
    scaler.apply(optimizer)


def by_closure(scaler: Any, model: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() * 3
        scaler.backward(loss)
        return loss

    scaler.apply(optimizer, closure=closure)


@pytest.mark.parametrize("step", [two_losses, torchs_loop, own_loss_alone, by_closure])
@pytest.mark.parametrize("in_tensors", [False, True])
def test_loss_and_steps_are_logged_however_they_are_made(
    step: Callable[..., None], in_tensors: bool
) -> None:
    net = Net(in_tensors=in_tensors, growth_interval=1)
    net.optimizer = torch.optim.SGD(net.model.parameters(), lr=0.0)
    lines = listen(net.scaler)
    for _ in range(2):
        step(net.scaler, net.model, net.optimizer)
    net.scaler.flush()
    found = steps_of(lines)
    assert [line["loss"] for line in found] == [6.0, 6.0]
    assert [line["steps"][0]["applied"] for line in found] == [True, True]
    moved = {move[0] for line in found for move in line["moves"]}
    assert (
        moved
        == {
            two_losses: {0, "other"},
            torchs_loop: {0},
            own_loss_alone: {"only"},
            by_closure: {0},
        }[step]
    )


def test_several_optimizers_have_numbers() -> None:
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.0) for param in params]
    scaler = GradScaler("cpu")
    lines = listen(scaler)
    for _ in range(2):
        scaler.scale(params[0].sum() + params[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    scaler.backward(params[0].sum() + params[1].sum())
    scaler.apply(optimizers)
    numbers = [[one["optimizer"] for one in line["steps"]] for line in steps_of(lines)]
    assert numbers == [[0, 1], [0, 1], [2]]


@pytest.mark.parametrize("mode", ["fp16-master", "fp16-pure", "fp32"])
def test_mixed_precision_logs_its_mode(mode: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), mode)
    mp.log_to(tmp_path, settings={"seed": 3})
    for _ in range(3):
        with mp.autocast():
            loss = model(torch.ones(1, 2)).float().sum()
        mp.backward(loss)
        mp.step()
    mp.flush()
    run = read(tmp_path)
    assert (run.settings["mode"], run.settings["seed"]) == (mode, 3)
    assert [line["step"] for line in run.steps] == [1, 2, 3]
    assert all("loss" in line for line in run.steps)


def test_disabled_scaler_counts_its_own_steps(tmp_path: Path) -> None:
    for _ in range(2):
        w = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        scaler = GradScaler("cpu", enabled=False)
        scaler.log_to(tmp_path)
        for _ in range(2):
            scaler.scale(w.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        scaler.log_to(None)
    run = read(tmp_path)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert run.settings["enabled"] is False
    assert all(line["steps"][0]["applied"] for line in run.steps)


def test_replays_of_a_graph_are_logged() -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.0, fused=True)
    scaler = GradScaler("cpu", growth_interval=1, on_stuck="ignore")
    keep_in_tensors(scaler)
    lines = listen(scaler)
    factor = torch.ones(1)

    def step() -> None:
        scaler.scale((w * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    step()
    with CpuGraph() as graph:
        step()
    factor.fill_(HUGE)
    graph.replay()
    scaler.flush()
    found = steps_of(lines)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [line["steps"][0]["applied"] for line in found] == [True, True, False]
    assert [line["steps"][0]["scale"] for line in found] == [2.0**16, 2.0**17, 2.0**18]
    assert "loss" in found[0]
    assert "loss" not in found[1]


def test_names_from_anywhere_are_logged(tmp_path: Path) -> None:
    torch_has.named_parameters()
    name = 'a\n"\u2028\U0001f600{'
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([(name, w)], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.log_to(tmp_path)
    scaler.backward(w.sum())
    w.grad.fill_(math.inf)
    scaler.apply(optimizer)
    scaler.flush()
    (line,) = read(tmp_path).steps
    assert line["steps"][0]["culprits"] == [[name, 0, 1, 0]]


def test_culprits_are_eight_at_most() -> None:
    params = [torch.ones(1, requires_grad=True) for _ in range(20)]
    scaler = GradScaler("cpu")
    lines = listen(scaler)
    scaler.backward(sum(param.sum() for param in params))
    for param in params:
        param.grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.apply(torch.optim.SGD(params, lr=0.1))
    assert len(steps_of(lines)[0]["steps"][0]["culprits"]) == 8


# Weights that are not finite.


def square(y: Tensor) -> Tensor:
    return y.square().sum()


@pytest.mark.parametrize("in_tensors", [False, True])
def test_stuck_run_names_weights_that_are_not_finite(in_tensors: bool) -> None:
    run = Run(OURS, stuck_after=3, on_stuck="raise", policy=Static(init_scale=1.0))
    if in_tensors:
        keep_in_tensors(run.scaler)
    run.scaler.name(nn.ModuleDict({"Head": run.model}))
    lines = listen(run.scaler)
    with torch.no_grad():
        run.model.weight.fill_(math.nan)
    run.train(1.0, 1.0, loss=square)
    said = "weights are not finite: Head.weight.*'fp16-master'"
    with pytest.raises(StuckError, match=said):
        run.train(1.0, loss=square)
    found = {one["kind"]: one for one in named(lines, "finding", "finding")}
    assert set(found) == {"loss-not-finite", "stuck", "weights-not-finite"}
    assert found["weights-not-finite"]["where"] == "Head.weight"
    assert found["weights-not-finite"]["evidence"] == "Weights are not finite: Head.weight."


def test_weights_of_8_bits_are_left_out() -> None:
    weights = [nn.Parameter(torch.tensor([math.nan])), nn.Parameter(torch.zeros(2))]
    frozen = torch.zeros(2, dtype=torch.float8_e4m3fn)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(frozen, requires_grad=False)]})
    assert len(bad_weights(Names(), [optimizer])) == 1


def test_function_that_raises_costs_the_file_no_line(tmp_path: Path) -> None:
    def fail(line: dict[str, Any]) -> None:
        if line["kind"] != "run":
            raise ValueError(line["kind"])

    run = Run(OURS)
    run.scaler.log_to(fail)
    run.scaler.log_to(tmp_path)
    for x in (1.0, math.inf, 1.0):
        run.scaler.scale(run.model(torch.tensor([x])).sum()).backward()
        run.scaler.step(run.optimizer)
        with pytest.raises(ValueError, match="step"):
            run.scaler.update()
        run.optimizer.zero_grad()
    run.scaler.log_to(None)
    lines = read(tmp_path)
    assert [line["steps"][0]["applied"] for line in lines.steps] == [True, False, True]
    assert [event["name"] for event in lines.events] == ["skip", "recover"]


def test_stuck_run_with_good_weights_has_the_old_message() -> None:
    run = Run(OURS, stuck_after=2, on_stuck="raise", policy=Static(init_scale=1.0))
    run.train(math.nan)
    with pytest.raises(StuckError, match="check the forward pass") as caught:
        run.train(math.nan)
    assert "weights are not finite" not in str(caught.value)


def test_weights_are_not_looked_at_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscale.torch.telemetry import monitor

    looked: list[Any] = []
    monkeypatch.setattr(monitor, "bad_weights", lambda *args: looked.append(args) or [])
    run = Run(OURS, stuck_after=2, on_stuck="ignore")
    run.train(math.nan, math.nan)
    assert looked == []
    listen(run.scaler)
    run.train(1.0, math.nan, math.nan, math.nan)
    assert len(looked) == 1


# Ends and ranks.


def test_end_of_the_process_writes_what_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    called: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *args: called.append(args))
    net = Net(in_tensors=True)
    device = LateDevice(monkeypatch)
    net.scaler.log_to(tmp_path)
    net.scaler.on("skip", pytest.fail)  # nobody else is called any more
    train(net)
    ((function, *args),) = called
    function(*args)
    assert device.early == []
    device.arrives = True
    function(*args)
    net.scaler._pipeline.monitor.stream.close()
    run = read(tmp_path)
    assert run.ranks == [3]
    assert run.headers[0]["world_size"] == 4
    check_lines(run.steps, net, [line["loss"] for line in run.steps])
    del net
    function(*args)  # of a scaler that is gone


def test_loading_a_checkpoint_costs_the_log_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(in_tensors=True)
    saved = net.scaler.state_dict()
    net.scaler.log_to(tmp_path)
    net.scaler.on("skip", pytest.fail)  # an event of the run that is left
    device = LateDevice(monkeypatch)
    train(net)
    assert net.scaler._pipeline.monitor._records
    net.scaler.load_state_dict(saved)
    device.arrives = True
    net.scaler.flush()
    run = read(tmp_path)
    check_lines(run.steps, net, [line["loss"] for line in run.steps])


def test_rank_must_be_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SettingError, match=r"RANK and WORLD_SIZE must be whole numbers"):
        GradScaler("cpu").log_to(tmp_path)


def test_full_disk_never_stops_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.scaler.log_to(tmp_path)
    net.step(1.0)
    net.scaler.flush()

    def fail(self: Any, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradscale.runlog.writer._Writer._append", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            net.step(1.0)
            net.scaler.flush()
    assert ["No space left" in str(one.message) for one in caught] == [True]
    assert len(net.outcomes) == 6


def test_scaler_that_is_gone_lets_go_of_its_file(tmp_path: Path) -> None:
    net = Net()
    net.scaler.log_to(tmp_path)
    net.step(1.0)
    del net
    RunLog(tmp_path).close()
    assert len(read(tmp_path).steps) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("apply", [False, True])
def test_log_never_waits_for_the_gpu(apply: bool, tmp_path: Path) -> None:
    from gradscale.torch.optim import AdamW

    layers = nn.ModuleList(nn.Linear(8, 8, device="cuda") for _ in range(25))
    made = AdamW if apply else torch.optim.AdamW
    optimizer = made(layers.parameters(), **({} if apply else {"fused": True}))
    scaler = GradScaler(growth_factor=4.0, growth_interval=3, underflow_every=1)
    scaler.name(layers)
    inputs = torch.tensor([1.0, HUGE, 1.0, 1.0, 1.0, math.nan, 1.0], device="cuda")
    # The first step makes the state of the optimizer, for which torch copies from the host.
    scaler.backward(sum(layer(inputs[:1].expand(8)).mean() for layer in layers))
    scaler.apply(optimizer)
    scaler.flush()  # else the line of this step may be in the log too
    scaler.log_to(tmp_path)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        for x in inputs.expand(8, 7).T:
            scaler.scale(sum(layer(x).mean() for layer in layers)).backward()
            if apply:
                scaler.apply(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scaler.flush()
    run = read(tmp_path)
    assert [line["step"] for line in run.steps] == list(range(2, 9))
    found = [line["steps"][0].get("verdict") for line in run.steps]
    assert found == [None, "scale too high", None, None, None, "loss not finite", None]
    assert [math.isfinite(line["loss"]) for line in run.steps] == [True] * 5 + [False, True]
    assert run.steps[1]["steps"][0]["culprits"][0][0] == "0.weight"
    assert all("amax" in line["steps"][0] for line in run.steps) or not apply
