"""What the scaler does to the device: no float64, no waiting, CUDA graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import Dynamic, GradStats
from gradscale.torch import GradScaler
from gradscale.torch.grads.dispatch import locate
from tensors import parameter


class Watch(TorchDispatchMode):
    """Collects the dtypes that operations make, and which ones read a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        for item in result if isinstance(result, list | tuple) else [result]:
            if isinstance(item, Tensor):
                self.dtypes.add(item.dtype)
        return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_nothing_is_computed_in_float64(fused: bool, clip: bool) -> None:
    scaler, w = GradScaler("cpu"), torch.ones(3, requires_grad=True)
    optimizer = SGD([w], lr=1.0, fused=fused)
    with Watch() as watch:
        scaler.backward(w.sum())
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.float32 in watch.dtypes
    assert torch.float64 not in watch.dtypes
    with Watch() as watch:
        torch.ones(1).double()
    assert torch.float64 in watch.dtypes


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["not", "ours", "torch's"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_with_a_fused_optimizer_nothing_waits_for_the_device(
    clip: str, kind: str, no_sync: Any
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).cuda()
    params = model.parameters()
    optimizer = AdamW(params, fused=True) if kind == "AdamW" else SGD(params, 0.1, 0.9, fused=True)
    rule = Dynamic(growth_interval=3)
    scaler = GradScaler("cuda", policy=rule)
    inputs = torch.randn(8, 16, device="cuda")
    bad = torch.full((), math.inf, device="cuda")
    state = rule.init()
    with no_sync():
        for iteration in range(20):
            scaler.scale(model(inputs).square().mean()).backward()
            overflow = iteration % 7 in (0, 3)
            if overflow:
                model[0].weight.grad[0, 0].copy_(bad)
            if clip == "ours":
                scaler.clip_grad_norm_(optimizer, 1.0)
            if clip == "torch's":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            state = rule.update(state, GradStats(finite=not overflow))
    assert scaler.get_scale() == state.scale
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.gpu
def test_a_step_that_cannot_skip_on_the_device_waits_once() -> None:
    w = parameter(device="cuda")
    scaler, optimizer = GradScaler("cuda"), SGD([w], lr=1.0, foreach=True)
    scaler.backward(w.sum())
    with Watch() as watch:
        scaler.step(optimizer)
        scaler.update()
    assert watch.reads == 1


@pytest.mark.gpu
def test_a_gradient_of_the_host_is_not_given_to_kernels() -> None:
    w, there, here = parameter(device="cuda"), parameter(device="cuda"), parameter()
    grads = [torch.ones_like(each) for each in (w, there, here)]
    assert locate([w, there], grads[:2]) is not None
    # As where an optimizer of before is gone, and its first parameter's id is used again.
    assert locate([w, here], [grads[0], grads[2]]) is None


@pytest.mark.gpu
def test_parameters_on_two_kinds_of_devices_are_stepped_together() -> None:
    w, v = parameter(device="cuda"), parameter()
    scaler, optimizer = GradScaler("cuda", init_scale=4.0), SGD([w, v], lr=1.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.backward(w.sum() + v.cuda().sum())
        if bad:
            v.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert (w.item(), v.item()) == (-1.0, -1.0)
    assert scaler.get_scale() == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_a_captured_backward_pass_replays_with_the_scale_of_the_day(
    fused: bool, clip: bool
) -> None:
    scaler, w = GradScaler("cuda", init_scale=4.0), parameter(1.0, device="cuda")
    optimizer = SGD([w], lr=1.0, fused=fused)
    factor = torch.ones((), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scaler.scale((w * factor).sum()).backward()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale((w * factor).sum()).backward()
    facts = []
    for value in (1.0, 3e38, 1.0, 3e38, 2.0):  # finite itself, but not times 4 or 2
        factor.fill_(value)
        graph.replay()
        if clip:
            scaler.clip_grad_norm_(optimizer, math.inf)
        scaler.step(optimizer)
        scaler.update()
        facts.append((w[0].item(), scaler.get_scale()))
    assert facts == [(0.0, 4.0), (0.0, 2.0), (-1.0, 2.0), (-1.0, 1.0), (-3.0, 1.0)]


@pytest.mark.gpu
def test_a_captured_step_skips_recovers_and_grows_like_an_eager_one() -> None:
    results = []
    for graphed in (False, True):
        scaler = GradScaler("cuda", init_scale=4.0, growth_interval=2)
        w = torch.ones(8, device="cuda", requires_grad=True)
        optimizer = AdamW([w], fused=True, capturable=True)
        factor = torch.ones((), device="cuda")

        def iterate(
            scaler: Any = scaler, w: Tensor = w, factor: Tensor = factor, optimizer: Any = optimizer
        ) -> None:
            scaler.scale((w * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            iterate()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                iterate()
        for value in (1.0, 1e38, 1.0, 2.0, 1.0, 1e38, 1.0):
            factor.fill_(value)
            graph.replay() if graphed else iterate()
        results.append((w.tolist(), scaler.state_dict(), optimizer.state[w]["step"].item()))
    assert results[0] == results[1]
    assert results[0][2] == 6.0
