"""Our kernels on what ranks have of DTensors, and the reports of ranks that kernels write.

On the CPU they run in Triton's interpreter, where warnings of overflows are meant to happen.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rank_matrix
from gradscale.torch import GradScaler
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads.dtensor import lay_out, local, local_grad, locals_of
from gradscale.torch.optim import SGD, AdamW, Lion
from gradscale.torch.optim.fused import FusedStep
from ranks import everyone, on_ranks, run_check
from sharded_names import Replicate, Shard, distribute_tensor, fully_shard
from shared_models import OPTIMIZERS, batch, given, loss_of, mixed_placements

pytest.importorskip("triton", minversion="3.4")


def check_kernels() -> None:
    """Raises if kernels do not step parts, summands and copies as torch does."""
    step_by_kernels(mixed_placements)


def check_kernels_of_copies() -> None:
    """Raises if kernels do not step what every rank has as torch does."""
    step_by_kernels(given)


def step_by_kernels(setup: Any) -> None:
    """Raises if kernels, which must be those that step, do not step as torch does."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of overflows in the interpreter
    with (
        kernels.use("triton"),
        mock.patch.object(FusedStep, "_step_by_torch", _refuse),
        mock.patch.object(rank_matrix, "OPTIMIZERS", {"ours": OPTIMIZERS["ours"]}),
        _written_by_kernels() as reports,
    ):
        rank_matrix.check_cells([setup], ["inf"], ["apply"])  # one step of six
    assert len(reports) == 6


def check_mixed_paths() -> None:
    """Raises if a rank that goes the long way does not get the same as one that does not."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of overflows in the interpreter
    with kernels.use("triton"), _written_by_kernels() as reports:
        for make in (OPTIMIZERS["ours"], OPTIMIZERS["fused"]):
            setup = given()
            optimizer, scaler = make(setup.params), GradScaler("cpu", groups=setup.groups)
            for step in range(3):
                reports.clear()
                setup.backward(scaler, batch(step))
                with kernels.use("reference" if dist.get_rank() == 1 else "triton"):
                    outcome = scaler.apply(optimizer, clip_norm=0.1)
                assert everyone(len(reports)) == [1, 0]
                assert len(set(everyone(float(outcome.grad_norm)))) == 1
                weights = everyone([p.tolist() for p in setup.params])
                # One divides by a rounded divisor, the other multiplies by a rounded factor.
                for one, other in zip(*map(_flat, weights), strict=True):
                    assert math.isclose(one, other, rel_tol=2**-20, abs_tol=2**-24)


def check_optimizers() -> None:
    """Raises if one of our optimizers, in any format, does not step shards as torch's path does."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of overflows in the interpreter
    mesh = init_device_mesh("cpu", (2,))
    for make in (AdamW, SGD, Lion):
        for dtype in (torch.float32, torch.float16):
            for master in ("float32", "split") if dtype is torch.float16 else ("float32",):
                results = []
                for path in ("triton", "reference"):
                    torch.manual_seed(0)
                    model = nn.Linear(8, 8, dtype=dtype)
                    fully_shard(model, mesh=mesh)
                    optimizer: Any = make(model.parameters(), lr=0.1, master=master)
                    scaler = GradScaler("cpu", init_scale=2.0**4)
                    versions = [param._version for param in model.parameters()]
                    with kernels.use(path):
                        # Lion goes by signs, which another rounding before may turn.
                        for step in range(1 if make is Lion else 2):
                            scaler.backward(loss_of(model, batch(step).to(dtype)))
                            assert scaler.apply(optimizer).applied
                    assert (optimizer._fused._launch_plan is not None) == (path == "triton")
                    for param, before in zip(model.parameters(), versions, strict=True):
                        assert param._version > before
                    results.append([p.full_tensor().float() for p in model.parameters()])
                for one, other in zip(*results, strict=True):
                    # Steps of 0.1 at most, each rounded differently by a few units.
                    unit = torch.finfo(dtype).eps * other.abs().max().clamp(min=1)
                    assert (one - other).abs().max() <= 4 * unit, (make, dtype, master)


def check_layouts() -> None:
    """Raises if gradients that are laid out or shared out otherwise are not put right."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(4, 3)
    param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    param.grad = distribute_tensor(whole, mesh, [Replicate()])
    here = whole.chunk(2)[dist.get_rank()]
    assert torch.equal(local_grad(param), here)
    assert param.grad.placements == param.placements
    turned = here.t().contiguous().t()
    assert turned.stride() != local(param).stride()
    param.grad = type(param.grad).from_local(turned, mesh, [Shard(0)], run_check=False)
    lay_out(param)
    assert local_grad(param).stride() == local(param).stride()
    assert torch.equal(local_grad(param), here)
    assert torch.equal(param.grad.full_tensor(), whole)


def _refuse(*_: Any) -> None:
    raise AssertionError("torch took the step")


class _written_by_kernels:
    """Counts the reports that kernels have written."""

    def __enter__(self) -> list[int]:
        from gradscale.torch.grads.triton import consensus

        calls: list[int] = []
        plain = consensus.report

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return plain(*args, **kwargs)

        self._patch = mock.patch.object(consensus, "report", counted)
        self._patch.start()
        return calls

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


def _flat(values: Any) -> list[float]:
    """The numbers in nested lists."""
    if isinstance(values, list):
        return [number for value in values for number in _flat(value)]
    return [values]


def test_plain_tensors_are_all_here() -> None:
    param = nn.Parameter(torch.ones(3))
    assert local(param) is param
    assert local_grad(param) is None
    several = [param, torch.ones(2)]
    assert locals_of(several) is several
    param.grad = torch.ones(3)
    lay_out(param)
    assert local_grad(param) is param.grad


@pytest.mark.parametrize(
    ("check", "world"),
    [
        *on_ranks(2, "kernels mixed_paths optimizers layouts"),
        # The copies of `mixed_paths` are stepped by kernels too, for three steps.
        pytest.param("kernels_of_copies", 2, marks=pytest.mark.soak),
    ],
)
def test_on_two_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path, TRITON_INTERPRET="1")
