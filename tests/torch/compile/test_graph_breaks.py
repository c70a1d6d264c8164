"""What no graph can hold works without `fullgraph=True`, and with it is an error that says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_has
from gradscale.torch import GradScaler
from gradscale.torch.optim import AdamW

# What Dynamo says of its graph breaks is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.5),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: AdamW(params, lr=0.1),
}
Step = Callable[[GradScaler, Optimizer, nn.Module, Tensor], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forgets what other tests have compiled, which counts towards a limit."""
    torch.compiler.reset()
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    torch.compiler.reset()


def drop_in(scaler: GradScaler, optimizer: Optimizer, net: nn.Module, loss: Tensor) -> float:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def torchs_clipping(
    scaler: GradScaler, optimizer: Optimizer, net: nn.Module, loss: Tensor
) -> float:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def our_clipping(scaler: GradScaler, optimizer: Optimizer, net: nn.Module, loss: Tensor) -> Any:
    scaler.backward(loss)
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm.item()


def two_calls(scaler: GradScaler, optimizer: Optimizer, net: nn.Module, loss: Tensor) -> Any:
    scaler.backward(loss)
    scaler.apply(optimizer, clip_norm=0.5)
    return scaler.outcome().verdict()


def kept_gradients(scaler: GradScaler, optimizer: Optimizer, net: nn.Module, loss: Tensor) -> Any:
    scaler.backward(loss)
    scaler.apply(optimizer, zero_grad=False)
    optimizer.zero_grad()
    return scaler.state_dict()["scale"]


def run(step: Step, make: Callable[[Any], Optimizer], compile: bool) -> Any:
    """What became of eight iterations, one of which overflows and one has no finite loss."""
    torch.manual_seed(0)
    net, scaler = nn.Linear(3, 2), GradScaler("cpu", growth_interval=2)
    optimizer = make(net.parameters())

    def body(x: Tensor) -> Any:
        return step(scaler, optimizer, net, net(x).square().mean())

    function = torch.compile(body, backend="eager") if compile else body
    told = []
    for number in range(8):
        factor = {3: 1e18, 5: math.nan}.get(number, (number + 1) / 7)
        result = function(torch.full((4, 3), factor))
        told.append((result, scaler.get_scale(), bool(scaler.outcome().applied)))
    return told, [p.tolist() for p in net.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "step", [drop_in, torchs_clipping, our_clipping, two_calls, kept_gradients]
)
def test_a_compiled_body_is_the_ordinary_body(step: Step, make: Callable[[Any], Optimizer]) -> None:
    told = run(step, make, compile=False)
    assert [applied for _, _, applied in told[0]].count(False) == 2
    assert repr(run(step, make, compile=True)) == repr(told)


def test_a_body_that_is_compiled_again_and_again_stays_right() -> None:
    """Past its limit the compiler gives up; then nothing of ours may be compiled half."""

    def told(compile: bool) -> list[Any]:
        body = torch.compile(two_calls, backend="eager", dynamic=False) if compile else two_calls
        losses = []
        for number in range(12):
            torch.manual_seed(number)
            net, scaler = nn.Linear(3, number + 1), GradScaler("cpu")
            optimizer = SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                body(scaler, optimizer, net, net(torch.ones(2, 3)).square().mean())
            losses.append([p.tolist() for p in net.parameters()])
        return losses

    assert told(True) == told(False)


NET = nn.Linear(1, 1)
TORCHS = SGD([torch.ones(3, requires_grad=True)], lr=0.1)
CALLS: dict[str, Callable[[GradScaler, Optimizer, Tensor], Any]] = {
    "a closure": lambda s, o, loss: s.apply(o, closure=lambda: loss),
    "kept gradients": lambda s, o, loss: s.apply(o, zero_grad=False),
    "a limit that is no number": lambda s, o, loss: s.apply(o, clip_norm=torch.ones(())),
    "torch's optimizer": lambda s, o, loss: s.apply([o, TORCHS]),
    "backward": lambda s, o, loss: s.backward(loss),
    "grad": lambda s, o, loss: s.grad(loss, [loss]),
    "step": lambda s, o, loss: s.step(o),
    "update": lambda s, o, loss: s.update(),
    "unscale_": lambda s, o, loss: s.unscale_(o),
    "clip_grad_norm_": lambda s, o, loss: s.clip_grad_norm_(o, 1.0),
    "outcome": lambda s, o, loss: s.outcome(),
    "get_scale": lambda s, o, loss: s.get_scale(),
    "state_dict": lambda s, o, loss: s.state_dict(),
    "load_state_dict": lambda s, o, loss: s.load_state_dict({}),
    "set_growth_interval": lambda s, o, loss: s.set_growth_interval(3),
    "flush": lambda s, o, loss: s.flush(),
    "history": lambda s, o, loss: s.history,
    "on": lambda s, o, loss: s.on("skip", print),
    "follow": lambda s, o, loss: s.follow(print),
    "name": lambda s, o, loss: s.name(NET),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_full_graph_without_it_is_refused_with_the_reason(
    call: Callable[[GradScaler, Optimizer, Tensor], Any],
) -> None:
    torch_has.reasons_of_graph_breaks()
    w, scaler = torch.ones(3, requires_grad=True), GradScaler("cpu")
    optimizer = AdamW([w], lr=0.1)
    compiled = torch.compile(lambda x: call(scaler, optimizer, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="Of the methods of GradScaler, only scale"):
        compiled(torch.ones((), requires_grad=True))
