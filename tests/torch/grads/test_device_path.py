"""A device takes kernels only if one compiles, runs and is right there: faults are planted.

On the CPU the kernel runs in Triton's interpreter, and CUDA devices are stubs; what is marked `gpu`
has a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler, optim
from gradscale.torch.grads import device_path, dispatch
from gradscale.torch.grads.device_path import DevicePath

FLOAT32 = (torch.float32,)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RESULTS = {"summary": 11, "counts": 9}
"""Which tensor of a launch has them: see the arguments of the kernel."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Puts a function of the real kernel, the number of the launch and its tensors in its place."""
    pytest.importorskip("triton")
    measure = dispatch.module("measure")
    real = measure._measure

    def plant(fault: Callable[..., None]) -> None:
        launches: list[int] = []

        def launch(programs: int, tensors: Any, *rest: Any, **options: Any) -> None:
            launches.append(programs)
            fault(lambda: real(programs, tensors, *rest, **options), len(launches), tensors)

        monkeypatch.setattr(measure, "_measure", launch)

    return plant


def test_a_kernel_that_is_right_in_every_format_is_used() -> None:
    pytest.importorskip("triton")
    assert dispatch.module("probe").VERSION
    found = device_path.run_kernel(CPU, "the interpreter", dispatch.DTYPES)
    assert found.kernels, found.why
    assert found.name == "triton"
    assert "the interpreter, Triton" in found.why


def test_a_compiler_that_warns_and_prints_has_not_failed(
    kernel: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(run: Any, number: int, tensors: Any) -> None:
        warnings.warn("a default will change", stacklevel=1)
        print("a thousand lines")
        run()

    kernel(fault)
    with pytest.warns(UserWarning, match="a default will change"):
        found = device_path.run_kernel(CPU, "here", FLOAT32)
    assert found.kernels, found.why
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("launch", [1, 2], ids=["compiling", "launching what is compiled"])
def test_a_kernel_that_raises_is_not_used(kernel: Any, launch: int) -> None:
    def fault(run: Any, number: int, tensors: Any) -> None:
        if number == launch:
            raise RuntimeError("PTXAS error:\n  Feature '.acq_rel' requires\n .target sm_70" * 20)
        run()

    kernel(fault)
    found = device_path.run_kernel(CPU, "compute capability 6.0", FLOAT32)
    assert (found.kernels, found.name) == (False, "reference")
    assert found.why.startswith("a kernel fails (compute capability 6.0, Triton ")
    assert "RuntimeError: PTXAS error: Feature '.acq_rel' requires .target sm_70" in found.why
    assert len(found.why) < 400
    assert "\n" not in found.why


def test_too_little_memory_for_the_kernel_is_the_callers_error(kernel: Any) -> None:
    def fault(run: Any, number: int, tensors: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    kernel(fault)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device_path.run_kernel(CPU, "here", FLOAT32)


def change_a_gradient(tensors: Any) -> None:
    """Changes one element of the first tensor that the table points to."""
    ctypes.c_float.from_address(int(tensors[0][0])).value += 0.25


def put(name: str, place: int, value: float) -> Callable[[Any], None]:
    """A fault that puts `value` at a `place` of a result."""

    def fault(tensors: Any) -> None:
        tensors[RESULTS[name]].view(-1)[place] = value

    return fault


WRONG = {
    "the float32 gradients": (1, change_a_gradient),
    "the counts of infinities and NaNs": (2, put("counts", 3, 0)),
    "the check for infinities and NaNs": (2, put("summary", 0, 0.0)),
    "the norm or the largest magnitude": (1, put("summary", 2, 2.5)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_kernel_with_wrong_results_is_not_used(kernel: Any, what: str) -> None:
    launch, spoil = WRONG[what]

    def fault(run: Any, number: int, tensors: Any) -> None:
        run()
        if number == launch:
            spoil(tensors)

    kernel(fault)
    found = device_path.run_kernel(CPU, "here", FLOAT32)
    assert not found.kernels
    assert found.why.startswith("a kernel gives wrong results (here, Triton ")
    assert found.why.endswith(what)


def test_a_norm_is_wrong_from_one_in_a_million_on(kernel: Any) -> None:
    def fault(run: Any, number: int, tensors: Any) -> None:
        run()
        if number == 1:
            tensors[RESULTS["summary"]][3] *= 1 + 2.0**-19

    kernel(fault)
    assert device_path.run_kernel(CPU, "here", FLOAT32).why.endswith("the largest magnitude")


def test_triton_that_cannot_be_imported_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "gradscale.torch.grads.triton.probe", raising=False)
    found = device_path.run_kernel(CPU, "compute capability 9.0", FLOAT32)
    assert not found.kernels
    assert found.why.startswith("a kernel fails (compute capability 9.0): ModuleNotFoundError: ")


# The path of a CUDA device that is a stub.


class Stub:
    """A CUDA device: how often a kernel was run on it, in which formats, and with what result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Any] = []
        self.result = DevicePath(True, "they work")
        self.capability = (9, 0)
        self.sync_mode = 2
        for name, value in {
            "_cuda_getDevice": lambda: 0,
            "_cuda_get_sync_debug_mode": lambda: self.sync_mode,
            "_cuda_set_sync_debug_mode": lambda mode: setattr(self, "sync_mode", mode),
        }.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(device_path, "run_kernel", self.run)
        monkeypatch.setattr(device_path, "known", {})
        monkeypatch.setattr(device_path, "_captured", set())

    def run(self, device: torch.device, where: str, formats: Any) -> DevicePath:
        """Takes the place of `run_kernel`."""
        assert self.sync_mode == 0  # the kernel's results are read
        self.runs.append((device, where, formats))
        return self.result


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(monkeypatch)


def test_a_kernel_is_run_once_per_device(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    assert all(dispatch.uses_triton(CUDA) for _ in range(3))
    assert dispatch.uses_triton(torch.device("cuda"))
    assert not dispatch.uses_triton(torch.device("cuda", 1))  # not the current one
    assert stub.runs == [(CUDA, "compute capability 9.0", FLOAT32)]
    assert stub.sync_mode == 2
    assert caplog.records == []


def test_a_device_without_kernels_is_one_line_of_log(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.result = DevicePath(False, "a kernel fails (here): OSError: no C compiler")
    assert not any(dispatch.uses_triton(CUDA) for _ in range(3))
    assert len(stub.runs) == 1
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradscale", logging.WARNING)
    assert record.getMessage() == (
        "cuda:0 (a GPU) uses torch operations in place of kernels: "
        "a kernel fails (here): OSError: no C compiler."
    )
    with dispatch.use("triton"):  # who asks for kernels gets them, and their errors
        assert dispatch.uses_triton(CUDA)


@pytest.mark.parametrize(
    ("capability", "formats"), [((7, 0), 3), ((7, 5), 3), ((8, 0), 1), ((10, 0), 1)]
)
def test_every_format_is_tried_where_triton_is_not_supported(
    stub: Stub, capability: tuple[int, int], formats: int
) -> None:
    stub.capability = capability
    assert device_path.path_of(CUDA).kernels
    ((_, where, tried),) = stub.runs
    assert tried == dispatch.DTYPES[:formats]
    assert where == f"compute capability {capability[0]}.{capability[1]}"


def test_rocm_and_a_machine_without_triton_take_torch_operations(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "triton", None)
        assert device_path.path_of(CUDA) == (False, "Triton is not installed")
    device_path.known.clear()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in device_path.path_of(CUDA).why
    assert not dispatch.uses_triton(CUDA)
    assert stub.runs == []
    assert len(caplog.records) == 2


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "meta"])
def test_other_devices_take_torch_operations_without_a_word(
    stub: Stub, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device(kind)
    assert not dispatch.uses_triton(device)
    assert device_path.path_of(device) == (False, "the kernels are for CUDA")
    assert (stub.runs, caplog.records) == ([], [])


def test_no_kernel_is_run_in_a_capture_and_nothing_is_kept(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(device_path, "capturing", lambda: True)
        assert not any(dispatch.uses_triton(CUDA) for _ in range(2))
    assert stub.runs == []
    (record,) = caplog.records
    assert "Run a step before the capture." in record.getMessage()
    assert dispatch.uses_triton(CUDA)
    monkeypatch.setattr(device_path, "capturing", lambda: True)
    assert dispatch.uses_triton(CUDA)
    assert len(stub.runs) == 1


def test_too_little_memory_decides_nothing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> DevicePath:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patches:
        patches.setattr(device_path, "run_kernel", run)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            dispatch.uses_triton(CUDA)
        assert (device_path.known, stub.sync_mode) == ({}, 2)
    assert dispatch.uses_triton(CUDA)


# On a real GPU.


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_path, "known", {})
    monkeypatch.setattr(device_path, "_captured", set())


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_known")
def test_this_gpu_takes_kernels_whatever_is_going_on(
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    from torch._subclasses import FakeTensorMode

    def situations() -> Iterator[Any]:
        yield no_sync()
        yield torch.inference_mode()
        yield FakeTensorMode()
        yield torch.cuda.stream(torch.cuda.Stream())

    here = torch.device("cuda", torch.cuda.current_device())
    for going_on in situations():
        device_path.known.clear()
        with going_on:
            assert dispatch.uses_triton(here), device_path.known
    # With all formats, as where Triton is not supported.
    assert device_path.run_kernel(here, "here", dispatch.DTYPES).kernels


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_known")
def test_a_capture_that_comes_first_has_torch_operations() -> None:
    torch.ones(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not dispatch.uses_triton(torch.device("cuda"))
        torch.ones(1, device="cuda")
    assert device_path.known == {}
    assert dispatch.uses_triton(torch.device("cuda"))


def trained(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """The parameters and states of a model after steps of which one is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("cuda", dtype)
    optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2)
    scaler = GradScaler("cuda", init_scale=2.0**10)
    for step in range(5):
        x = torch.ones(8, 64, device="cuda", dtype=dtype) * (torch.inf if step == 2 else 1 + step)
        loss = model(x).float().square().mean()
        if step % 2:
            scaler.backward(loss)
            scaler.apply(optimizer, clip_norm=1.0)
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return [*(p.detach() for p in model.parameters()), *states, scaler._scale]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
@pytest.mark.usefixtures("nothing_known")
def test_a_failing_compiler_leaves_the_reference_path(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("PTXAS error: Internal Triton PTX codegen error")

    with dispatch.use("reference"):
        wanted = trained(kind, dtype)
    monkeypatch.setattr(dispatch.module("launch").Kernel, "__call__", fail)
    found = trained(kind, dtype)
    assert len(found) == len(wanted) > 4
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    (record,) = [record for record in caplog.records if record.name == "gradscale"]
    assert "PTXAS error: Internal Triton PTX codegen error" in record.getMessage()
