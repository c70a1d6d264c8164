"""Mistakes that other systems made in synchronisation and performance, 19 to 22.

A part of test_mistakes.py, which explains the form and lists all tests by number.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from cpu_graph import keep_in_tensors
from gradscale.torch import GradScaler
from one_weight import HUGE, OURS, TORCH, Kind, Run, step_by_closure


class Recorder(TorchDispatchMode):
    """Notes every operation; a number that is read from a device without data is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((op, args))
        read = op is torch.ops.aten._local_scalar_dense.default
        return 0 if read and args[0].is_meta else op(*args, **(kwargs or {}))

    def reads(self) -> int:
        """How often the host would have waited for the device "meta"."""
        read = torch.ops.aten._local_scalar_dense.default
        return sum(op is read and args[0].is_meta for op, args in self.calls)


class DeviceSGD(SGD):
    """Skips on the device, by torch's contract."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            unscaled = param.grad if self.grad_scale is None else param.grad / self.grad_scale
            param.sub_(torch.where(self.found_inf > 0, torch.zeros_like(unscaled), unscaled))


def reads_of_a_step(kind: Kind, optimizer_class: type[Optimizer], clip: bool) -> list[int]:
    """In each of three steps of 50 parameters on a device where reading is the only way to wait."""
    model = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(25)))
    scaler: Any = kind("meta", growth_interval=1)
    optimizer = optimizer_class(model.parameters(), lr=1.0)
    reads = []
    for _ in range(3):
        with Recorder() as recorder:
            scaler.scale(model(torch.ones(2, 2, device="meta")).sum()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reads.append(recorder.reads())
    return reads


@pytest.mark.parametrize("clip", [False, True])
def test_device_is_read_at_most_once_a_step(clip: bool) -> None:
    # apex, DeepSpeed, ColossalAI and fairscale wait once per parameter.
    assert reads_of_a_step(OURS, SGD, clip) == [1, 1, 1]
    assert reads_of_a_step(OURS, AdamW, clip) == [1, 1, 1]
    assert reads_of_a_step(OURS, DeviceSGD, clip) == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
def test_fused_step_never_waits_for_the_gpu(clip: bool) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8, device="cuda") for _ in range(25))
    optimizer = AdamW(layers.parameters(), fused=True)
    scaler = GradScaler(growth_factor=4.0, growth_interval=3)
    inputs = torch.tensor([1.0, HUGE, 1.0, 1.0, 1.0, math.nan], device="cuda").expand(8, 6).T
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            inputs.sum().item()
        for x in inputs:
            scaler.scale(sum(layer(x).mean() for layer in layers)).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**17  # halved once, grown once, and the NaN did not count
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}


@pytest.mark.usefixtures("one_rank")
def test_no_collective_is_called_for_plain_tensors() -> None:
    # Composer gathers pickled objects in every closure.
    def collectives(recorder: Recorder) -> int:
        return sum(op.namespace == "c10d" for op, _ in recorder.calls)

    with Recorder() as recorder:
        dist.all_gather_object([None], "found")
    assert collectives(recorder) > 0
    run = Run(OURS)
    with Recorder() as recorder:
        run.train(1.0, HUGE)
        run.optimizer.zero_grad()
        step_by_closure(run, 1.0)
    assert len(recorder.calls) > 0
    assert collectives(recorder) == 0


def test_scale_tensor_is_updated_in_place() -> None:
    # Megatron and ColossalAI rebind it, so that a captured CUDA graph goes on with the old one.
    run = Run(OURS, growth_interval=1)
    keep_in_tensors(run.scaler)  # on the CPU they would be numbers, which no graph captures
    run.train(1.0)
    tensors = [run.scaler._scale, run.scaler._growth_tracker]
    addresses = [tensor.data_ptr() for tensor in tensors]
    state = run.scaler.state_dict()
    assert run.train(1.0, HUGE) == [2.0**18, 2.0**17]
    run.scaler.update(4.0)
    assert tensors[0].item() == 4.0
    run.scaler.load_state_dict(state)
    assert tensors[0].item() == 2.0**17
    assert run.scaler._scale is tensors[0]
    assert run.scaler._growth_tracker is tensors[1]
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def gradient_writes_before_a_fused_step(kind: Kind, tensors: bool = False) -> list[str]:
    """The operations that wrote to the gradient before the optimizer's kernel did."""
    run = Run(kind, fused=True)
    if tensors:
        keep_in_tensors(run.scaler)
    run.scaler.scale(run.loss(1.0)).backward()
    grad = run.model.weight.grad
    writes = []
    with Recorder() as recorder:
        run.scaler.step(run.optimizer)
    for op, args in recorder.calls:
        for argument, value in zip(op._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = value if isinstance(value, list) else [value]
            if written and any(
                isinstance(t, Tensor) and t.data_ptr() == grad.data_ptr() for t in tensors
            ):
                writes.append(op.name())
    return writes


def test_fused_step_checks_gradients_without_writing_them() -> None:
    kernel = "aten::_fused_sgd_"
    check = "aten::_amp_foreach_non_finite_check_and_unscale_"
    assert gradient_writes_before_a_fused_step(TORCH) == [check, kernel]
    assert gradient_writes_before_a_fused_step(OURS, tensors=True) == [kernel]
    # On the CPU torch's kernel unscales while it checks, and the optimizer's need not.
    assert gradient_writes_before_a_fused_step(OURS) == [check, kernel]
