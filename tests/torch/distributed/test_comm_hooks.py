"""Averages in float16: the arithmetic for any order of summation, and DDP on real ranks."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gradscale.errors import SettingError
from gradscale.torch import GradScaler, average_in_float16
from gradscale.torch.distributed.comm_hooks import MAX_RANKS, predivisor
from ranks import everyone, on_ranks, run_check

HALF, MAX = torch.float16, 65504.0
ULP, TINY = 2.0**-11, 2.0**-25
"""Half a unit in the last place: relative of normal float16 numbers, absolute of subnormal ones."""


# The arithmetic.


def any_values(ranks: int, dice: random.Random) -> Tensor:
    """float16 gradients of so many ranks, one in a row: any bits, and often the largest."""
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    bits = torch.randint(-(2**15), 2**15, (ranks, 256), generator=generator)
    values = bits.to(torch.int16).view(HALF)
    values = torch.where(torch.isfinite(values), values, torch.full_like(values, MAX))
    values[torch.rand(ranks, 256, generator=generator) < dice.random()] = MAX
    return values


def add_up(values: Tensor, dice: random.Random) -> Tensor:
    """The sum of the rows, in float16 and in any order."""
    rows = list(values)
    while len(rows) > 1:
        one = rows.pop(dice.randrange(len(rows)))
        place = dice.randrange(len(rows))
        rows[place] = rows[place] + one
    return rows[0]


@given(ranks=st.integers(1, 64), dice=st.randoms(use_true_random=False))
def test_no_order_of_summation_overflows(ranks: int, dice: random.Random) -> None:
    values = any_values(ranks, dice)
    divisor = predivisor(ranks)
    total = add_up(values / divisor, dice)
    assert torch.isfinite(total).all()
    mean = total.float() / (ranks / divisor)
    assert mean.abs().max() <= MAX
    exact = values.double().mean(0)
    # Each number is rounded when it is divided, and each of the ranks - 1 additions rounds a
    # partial sum of magnitudes that have grown by as many roundings; then one in float32.
    size = values.double().abs().mean(0)
    bound = (ranks - 1) * ULP * (1 + ULP) ** ranks * size + divisor * TINY * (1 + ULP) ** ranks
    assert ((mean - exact).abs() <= bound + torch.finfo(torch.float32).eps * size).all()


def worst_sums(divisor: int, ranks: int) -> Tensor:
    """The largest sums that 0, 1, ... `ranks` gradients can have in float16, in the worst order.

    Rounding is monotone, so the largest sum of k is that of the largest sums of i and of k - i.
    """
    largest = torch.zeros(ranks + 1, dtype=torch.float64)
    largest[1] = MAX / divisor
    for count in range(2, ranks + 1):
        part = torch.arange(1, count // 2 + 1)
        largest[count] = (largest[part] + largest[count - part]).max().to(HALF)
    return largest


def test_the_worst_order_of_all_ranks_fits() -> None:
    for exponent in range(MAX_RANKS.bit_length()):
        divisor = 2**exponent
        counts = torch.arange(1, divisor + 1)
        sums = worst_sums(divisor, divisor)[1:]
        before = torch.nextafter(
            (counts * 65536.0 / divisor).to(torch.float32).to(HALF), torch.zeros((), dtype=HALF)
        )
        assert (sums <= before).all()  # pred(k N), as the proof has it
        assert (sums * divisor / counts <= MAX).all()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 33, 64, 65, 1024, 1025, 2048])
def test_half_of_the_divisor_is_too_little(ranks: int) -> None:
    assert math.isfinite(worst_sums(predivisor(ranks), ranks)[-1])
    assert math.isinf(worst_sums(predivisor(ranks) // 2, ranks)[-1])


def test_the_number_of_ranks_is_no_divisor() -> None:
    thirds = torch.full((3,), MAX, dtype=HALF) / 3
    assert torch.isinf(thirds[0] + thirds[1] + thirds[2])


def test_too_many_ranks_are_refused() -> None:
    assert predivisor(MAX_RANKS) == MAX_RANKS
    for ranks in (0, MAX_RANKS + 1):
        with pytest.raises(SettingError, match=f"supports 1 to 2048 ranks, got {ranks}"):
            predivisor(ranks)
    assert math.isinf(worst_sums(8192, 8192)[-1])  # where a power of two no longer is enough


# Real ranks.


class Given(nn.Module):
    """A model whose gradient is what it is called with."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def averaged(grad: Tensor, hook: Any = average_in_float16) -> Tensor:
    """What DDP makes of `grad` with a hook."""
    model = Given(len(grad), grad.dtype)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    wrapped(grad).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def check_mean() -> None:
    """Raises if the mean is not that of float32 within the bound, in any format of gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    spread = 2.0 ** torch.linspace(-30, 16, 4096)
    wide = (2 * torch.rand(4096, generator=generator) - 1) * spread * 0.999
    divisor = predivisor(world)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        grad = wide.to(dtype)
        whole = torch.stack(everyone(grad))
        mean = averaged(grad)
        assert mean.dtype == dtype
        # As above, and every number is rounded once more, to float16; then once, to `dtype`.
        size = whole.double().abs().mean(0)
        bound = world * ULP * (1 + ULP) ** world * size + divisor * TINY * (1 + ULP) ** world
        bound = bound + torch.finfo(dtype).eps * size + torch.finfo(dtype).smallest_normal * 2**-10
        assert ((mean.double() - whole.double().mean(0)).abs() <= bound).all()
        if world == 2:  # there is one order only
            halves = (whole.double() / 2).to(HALF)
            assert torch.equal(mean, (halves[0] + halves[1]).to(dtype))


def check_edge() -> None:
    """Raises if gradients that fit overflow, or those that are not finite do not show."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    for dtype in (torch.float32, torch.float16):
        grad = torch.tensor([MAX, -MAX, math.inf if last else 1.0, math.nan if last else 1.0])
        mean = averaged(grad.to(dtype))
        # Three quarters of 65504 are 49128, which float16 has no closer than by 49120.
        edge = {2: MAX, 3: float(torch.tensor(49120.0 * 4 / 3).to(dtype))}[world]
        assert mean[:2].tolist() == [edge, -edge]
        assert math.isinf(mean[2])
        assert math.isnan(mean[3])
        theirs = averaged(grad.to(dtype), fp16_compress_hook)
        assert bool(torch.isinf(theirs[0])) == (world == 3)  # the fault that ours has not
    # What does not fit shows as well.
    assert math.isinf(averaged(torch.full((1,), 2 * MAX))[0])


def check_scaler() -> None:
    """Raises if an overflow of the sum is not skipped by all ranks alike."""
    world = dist.get_world_size()
    model = Given(2)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, average_in_float16)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    scaler.name(wrapped)
    told = []
    for _ in range(6):
        scaler.backward(wrapped(torch.ones(2)))
        outcome = scaler.apply(optimizer)
        told.append((bool(outcome.applied), scaler.get_scale(), model.weight.tolist()))
    assert all(each == told for each in everyone(told))
    # The scale is the gradient. Times world / divisor it must be below 65520, so 2**16 is too
    # large where there are two ranks, and not where there are three, of which a quarter is taken.
    falls = 5 if world == 2 else 4
    assert [applied for applied, *_ in told] == [step >= falls for step in range(6)]
    assert told[-1][1] == 2.0 ** (20 - falls)
    assert told[-1][2] == [-float(6 - falls)] * 2


@pytest.mark.parametrize(
    ("check", "world"), on_ranks(2, "mean edge scaler") + on_ranks(3, "mean edge scaler")
)
def test_ranks_average(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
