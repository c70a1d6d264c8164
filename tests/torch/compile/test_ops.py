"""A compiled run is the ordinary run: every promise here compares the two."""

from __future__ import annotations

import copy
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import torch_has
from gradscale import CallOrderError, SettingError
from gradscale.torch import GradScaler
from gradscale.torch.optim import Adam, AdamW

torch_has.operators_in_graphs()
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
NoSync = Callable[[], AbstractContextManager[None]]

# What Dynamo and Inductor say of themselves while they compile is not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# All that Dynamo traces, and what AOTAutograd makes of it. Inductor takes ten times as long.
BACKENDS = ["aot_eager"]
INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forgets what other tests have compiled, which counts towards a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def compiling(backend: str) -> Wrap:
    return lambda function: torch.compile(function, fullgraph=True, backend=backend)


def agree(scenario: Callable[[Wrap], Any], backend: str) -> Any:
    """What `scenario` tells, ordinary and compiled alike; `repr` because NaN is not NaN."""
    told = scenario(plain)
    assert repr(scenario(compiling(backend))) == repr(told)
    return told


def values(params: Any) -> list[Any]:
    return [p.tolist() for p in params]


def linear(inputs: int = 3, outputs: int = 2, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def batch(step: int) -> Tensor:
    return torch.full((4, 3), (step + 1) / 7)


def read(outcome: Any) -> list[Any]:
    outcome.ready()  # of the work that is queued by now; reading the flags waits for that
    read = (outcome.applied, outcome.finite, outcome.fits, outcome.loss_finite)
    flags = [*map(bool, read), outcome.ready()]
    floats = (outcome.scale, outcome.grad_norm, outcome.amax, outcome.headroom)
    known = [None if value is None else float(value) for value in floats]
    words = [outcome.verdict(), outcome.culprits(), repr(outcome), int(outcome.skipped_in_a_row)]
    return [*flags, *known, *words]


def train(
    wrap: Wrap,
    device: str = "cpu",
    steps: int = 30,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Two groups, a schedule, two micro-batches, clipping, and steps that must be skipped.

    From step 4 on it happens inside `watch()`.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    slow = {"params": net[2].parameters(), "lr": 0.03}
    optimizer = AdamW([{"params": net[0].parameters()}, slow], lr=0.1)
    schedule = CosineAnnealingLR(optimizer, steps)
    scaler = GradScaler(device, init_scale=2.0**100, growth_interval=3)
    scale = wrap(lambda loss: scaler.scale(loss))
    step = wrap(lambda: scaler.apply(optimizer, clip_norm=1.0))
    data = torch.randn(steps, 2, 16, 4).to(device)
    data[7] *= 2.0**60
    spoil = torch.ones(steps, device=device)
    spoil[9:11] = math.nan
    outcomes, weights = [], []

    def iterate(number: int) -> None:
        for inputs in data[number]:
            loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean() * spoil[number]
            scale(loss).backward()
        if number == 13:
            net[0].weight.grad[0, 0].fill_(math.inf)  # an assignment would wait for the GPU
        outcomes.append(step())
        schedule.step()
        weights.append([p.detach().clone() for p in net.parameters()])
        assert all(p.grad is None for p in net.parameters())

    for number in range(4):
        iterate(number)
    with watch():
        for number in range(4, steps):
            iterate(number)
    told = [read(outcome) for outcome in outcomes]
    state = optimizer.state_dict()["state"].values()
    rest = [[value.tolist() for value in one.values()] for one in state]
    return told, [values(each) for each in weights], rest, scaler.state_dict(), scaler.history


def never_anew() -> AbstractContextManager[Any]:
    """Compiling anew is an error."""
    return torch.compiler.set_stance("fail_on_recompile")


@pytest.mark.parametrize("backend", ["eager", *BACKENDS, INDUCTOR])
def test_a_compiled_run_is_the_ordinary_run_bit_for_bit(backend: str) -> None:
    told = train(plain)
    assert repr(train(compiling(backend), watch=never_anew)) == repr(told)
    skipped = [number for number, row in enumerate(told[0]) if not row[0]]
    assert skipped == [7, 9, 10, 13]
    assert {name for _, _, name in told[-1]} == {"skip", "recover", "grow", "backoff"}


@pytest.mark.gpu
def test_a_compiled_run_never_waits_for_the_gpu(no_sync: NoSync) -> None:
    def watch() -> AbstractContextManager[Any]:
        torch.compiler.set_stance("fail_on_recompile")
        return no_sync()

    told = train(plain, "cuda", watch=no_sync)
    try:
        assert repr(train(compiling("inductor"), "cuda", watch=watch)) == repr(told)
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_and_its_loss_can_be_one_graph(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu", growth_interval=2)
        optimizer = Adam(net.parameters(), lr=0.1)
        forward = wrap(lambda x: scaler.scale([net(x).mean(), net(x).square()]))
        for step in range(5):
            losses = forward(batch(step))
            torch.autograd.backward(losses, [torch.ones(()), torch.ones(4, 2)])
            wrap(lambda: scaler.apply(optimizer))()
        return values(net.parameters()), scaler.get_scale()

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_and_the_next_loss_can_be_one_graph(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu", growth_interval=1)
        optimizer = AdamW(net.parameters(), lr=0.1)
        scaler.scale(net(batch(0)).square().mean()).backward()

        def both(x: Tensor) -> tuple[Any, Tensor]:
            outcome = scaler.apply(optimizer)
            return outcome, scaler.scale(net(x).square().mean())

        both, told = wrap(both), []
        for step in range(5):
            outcome, loss = both(batch(step))
            loss.backward()
            told.append([*read(outcome), loss.item(), *values(net.parameters())])
        return told, [p.grad.tolist() for p in net.parameters()]

    told, _ = agree(scenario, backend)
    assert [row[5] for row in told] == [2.0**power for power in range(16, 21)]


@pytest.mark.parametrize("backend", [*BACKENDS, INDUCTOR])
def test_what_the_same_graph_edits_before_and_after_a_step_is_not_lost(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu")
        optimizer = AdamW(net.parameters(), lr=0.1)

        def body() -> Any:
            with torch.no_grad():
                net.weight.mul_(0.5)
                net.weight.grad.mul_(0.25)
            before = net.weight.detach().clone()
            outcome = scaler.apply(optimizer)
            after = net.weight.detach().clone()
            with torch.no_grad():
                net.weight.clamp_(-0.2, 0.2)
            return outcome, before, after, torch.where(outcome.applied, net.bias.detach(), 0)

        body, told = wrap(body), []
        for step in range(5):
            scaler.scale(net(batch(step)).square().mean()).backward()
            if step == 3:
                net.bias.grad[0] = math.nan
            grad = net.weight.grad
            outcome, *rest = body()
            told.append([*read(outcome), *values([*rest, grad, net.weight])])
        return told

    told = agree(scenario, backend)
    assert [row[0] for row in told] == [True, True, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizers_that_share_a_parameter_step_together(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu")
        both: list[Optimizer] = [AdamW(net.parameters(), lr=0.1), Adam([net.bias], lr=0.2)]
        apply = wrap(lambda: scaler.apply(both, clip_norm=0.1, clip_value=0.5))
        told = []
        for step in range(4):
            scaler.scale(net(batch(step)).square().mean()).backward()
            told.append(read(apply()))
        return told, values(net.parameters())

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unscaled_gradients_that_the_graph_edits_are_read_again(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler, more = linear(), GradScaler("cpu"), torch.zeros(())
        optimizer = AdamW(net.parameters(), lr=0.1)

        def body() -> Any:
            net.bias.grad.add_(more)
            return scaler.apply(optimizer)

        body, told = wrap(body), []
        for step in range(4):
            scaler.scale(net(batch(step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            more.fill_(math.nan if step == 2 else 0.0)
            told.append(read(body()))
        return told, values(net.parameters())

    told, _ = agree(scenario, backend)
    assert [row[0] for row in told] == [True, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_left_over_from_another_scale_keep_theirs(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        first, second = linear(), linear(2, 1, seed=1)
        scaler = GradScaler("cpu", growth_interval=1)
        one, two = (AdamW(net.parameters(), lr=0.1) for net in (first, second))
        apply_one, apply_two = wrap(lambda: scaler.apply(one)), wrap(lambda: scaler.apply(two))
        told = []
        for step in range(3):
            scaler.scale(second(first(batch(step))).square().mean()).backward()
            told.append(read(apply_one()))  # passes the gradients of `second` by
            scaler.scale(first(batch(step)).square().mean()).backward()
            told.append(read(apply_one()))
            try:
                told.append(read(apply_two()))
            except CallOrderError as error:
                told.append([str(error)])
                two.zero_grad()
        return told, values([*first.parameters(), *second.parameters()])

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float16_loss_has_its_limit(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear().half(), GradScaler("cpu")
        scale = wrap(lambda loss: scaler.scale(loss))
        with pytest.warns(UserWarning, match="loss is float16"):
            scaled = scale(net(batch(0).half()).square().mean())
        scaled.backward()
        return scaled.item(), scaled.dtype, [p.grad.tolist() for p in net.parameters()]

    assert agree(scenario, backend)[1] is torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_disabled_scaler_compiles_too(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu", enabled=False)
        optimizer = AdamW(net.parameters(), lr=0.1)
        forward = wrap(lambda x: scaler.scale(net(x).square().mean()))
        apply = wrap(lambda: scaler.apply(optimizer, clip_norm=0.1))
        told = []
        for step in range(3):
            forward(batch(step)).backward()
            told.append(read(apply()))
        return told, values(net.parameters())

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_in_inference_mode_does_no_harm(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net = linear()
        with torch.inference_mode():
            scaler = GradScaler("cpu")
            wrap(lambda x: scaler.scale(net(x).mean()))(batch(0))
        optimizer = AdamW(net.parameters(), lr=0.1)
        scaler.scale(net(batch(1)).square().mean()).backward()
        return read(wrap(lambda: scaler.apply(optimizer))()), values(net.parameters())

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_underflow_is_nan_in_steps_that_do_not_measure_it(backend: str) -> None:
    net, scaler = linear(), GradScaler("cpu", underflow_every=2)
    optimizer = AdamW(net.parameters(), lr=0.1)
    apply = compiling(backend)(lambda: scaler.apply(optimizer))
    measured = []
    for step in range(4):
        scaler.scale((net(batch(step)) * 1e-10).mean()).backward()
        measured.append(float(apply().underflow))
    assert [math.isnan(share) for share in measured] == [False, True, False, True]
    assert measured[0] == measured[2] == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_gradients_does_nothing_and_says_so(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, other, scaler = linear(), linear(), GradScaler("cpu")
        optimizer = AdamW(net.parameters(), lr=0.1)
        scaler.scale(other(batch(0)).sum()).backward()
        with pytest.warns(UserWarning, match="The step did nothing: 0 of the 2 parameters"):
            outcome = wrap(lambda: scaler.apply(optimizer))()
        return read(outcome), values(net.parameters())

    assert agree(scenario, backend)[0][-4] == "no gradients"


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_follows_may_want_autograd(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu")
        optimizer = AdamW(net.parameters(), lr=0.1)
        w, told = torch.ones(2, requires_grad=True), []

        def follow() -> None:
            told.append(torch.autograd.grad((w * 3).sum(), w)[0].tolist())

        scaler.follow(follow)
        apply = wrap(lambda: scaler.apply(optimizer))
        for step in range(3):
            scaler.scale(net(batch(step)).square().mean()).backward()
            apply()
        scaler.flush()
        return told

    assert agree(scenario, backend) == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_parameters_and_loaded_states_are_seen(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, more, scaler = linear(), linear(seed=1), GradScaler("cpu")
        optimizer = AdamW(net.parameters(), lr=0.1)
        apply, told = wrap(lambda: scaler.apply(optimizer)), []
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [more.weight]})
            if step == 3:
                optimizer.param_groups[1]["params"] = list(more.parameters())
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                scaler.load_state_dict(scaler.state_dict())
            more.zero_grad()
            scaler.scale((net(batch(step)) + more(batch(step))).square().mean()).backward()
            told.append(read(apply()))
        return told, values([*net.parameters(), *more.parameters()])

    agree(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compiled_function_serves_many_scalers(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        scale = wrap(lambda scaler, loss: scaler.scale(loss))
        apply = wrap(lambda scaler, optimizer: scaler.apply(optimizer))
        told = []
        for number in range(4):
            net, scaler = linear(seed=number), GradScaler("cpu", init_scale=2.0**number)
            optimizer = AdamW(net.parameters(), lr=0.1)
            for step in range(2):
                scale(scaler, net(batch(step)).square().mean()).backward()
                told.append([*read(apply(scaler, optimizer)), values(net.parameters())])
        return told

    told = agree(scenario, backend)
    assert [row[5] for row in told[::2]] == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_come_out_of_the_graph_and_leave_autograd_on(backend: str) -> None:
    net, scaler = linear(), GradScaler("cpu")
    optimizer = AdamW(net.parameters(), lr=0.1)
    apply = compiling(backend)(lambda **limits: scaler.apply(optimizer, **limits))
    net.weight.grad = torch.ones(2, 3)
    with pytest.raises(CallOrderError, match="no loss has been scaled yet"):
        apply()
    scaler.scale(net(batch(0)).sum()).backward()
    with pytest.raises(SettingError, match="clip_norm must be a number > 0, got -1"):
        apply(clip_norm=-1.0)
    assert torch.is_grad_enabled()
    assert apply(clip_norm=2)


@pytest.mark.filterwarnings("ignore:The step did nothing")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_loss_and_a_step_may_be_in_one_graph(backend: str) -> None:
    def scenario(wrap: Wrap) -> Any:
        net, scaler = linear(), GradScaler("cpu", growth_interval=1)
        optimizer = AdamW(net.parameters(), lr=0.1)

        def body(x: Tensor) -> Any:
            loss = scaler.scale(net(x).square().mean())
            return loss, scaler.apply(optimizer)  # of the pass of the last call

        body, told = wrap(body), []
        for step in range(4):
            loss, outcome = body(batch(step))
            loss.backward()
            told.append((loss.item(), bool(outcome.applied), scaler.get_scale()))
        return told, values(net.parameters())

    told, _ = agree(scenario, backend)
    assert [applied for _, applied, _ in told] == [False, True, True, True]
    assert [scale for *_, scale in told] == [2.0**16, 2.0**17, 2.0**18, 2.0**19]


def test_gradients_of_no_pass_are_refused_in_the_graph_of_the_first_loss() -> None:
    net, scaler = linear(), GradScaler("cpu")
    optimizer = AdamW(net.parameters(), lr=0.1)
    net.weight.grad = torch.ones(2, 3)

    @torch.compile(fullgraph=True, backend="eager")
    def body(x: Tensor) -> Any:
        loss = scaler.scale(net(x).sum())
        return loss, scaler.apply(optimizer)

    with pytest.raises(CallOrderError, match="no loss was scaled for them"):
        body(batch(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_outcomes_can_be_pickled_and_copied(backend: str) -> None:
    net, scaler = linear(), GradScaler("cpu")
    optimizer = AdamW(net.parameters(), lr=0.1)
    scaler.scale(net(batch(0)).sum() * 2.0**120).backward()
    outcome = compiling(backend)(lambda: scaler.apply(optimizer))()
    for again in (pickle.loads(pickle.dumps(outcome)), copy.deepcopy(outcome)):
        assert repr(read(again)) == repr(read(outcome)) == repr(read(scaler.outcome()))
    assert outcome.culprits()[0].name.startswith("group 0, parameter 0")


def test_scaling_inside_a_transform_of_a_compiled_function_is_an_error() -> None:
    scaler = GradScaler("cpu")
    grad = torch.func.grad(lambda w, x: scaler.scale((w * x).sum()))
    compiled = torch.compile(lambda w, x: grad(w, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="functorch"):
        compiled(torch.ones(3), torch.ones(3))
