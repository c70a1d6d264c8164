"""Adam and AdamW in one pass: unscale, clip, skip and step, all read from the device."""

from __future__ import annotations

import math
import struct

import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch._triton.reading import load
from gradscale.torch._triton.tables import CHUNK, Table

_BLOCK = tl.constexpr(1024)
# What one program takes of a chunk. Smaller than for reading: four lists are in flight at once.
PIECES = 8


@triton.jit
def _step_pieces(
    addresses,
    tensors,
    sizes,
    firsts,
    owners,
    divisor_at,
    skip_at,
    lr_at,
    lr,
    log_beta1,
    log_beta1_rest,
    log_beta2,
    log_beta2_rest,
    first,
    second,
    rest,
    eps,
    weight_decay,
    kept,
    ADAMW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DIVIDE: tl.constexpr,
    SKIP: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Steps one piece of a chunk, or leaves it untouched."""
    if SKIP:
        if tl.load(skip_at) != 0:
            return
    chunk = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK + piece * (CHUNK // PIECES)
    left = tl.load(sizes + owner) - start
    if left <= 0:
        return
    grad = tl.load(addresses + owner).to(tl.pointer_type(tl.float32))
    param = tl.load(addresses + tensors + owner).to(tl.pointer_type(tl.float32))
    average = tl.load(addresses + 2 * tensors + owner).to(tl.pointer_type(tl.float32))
    square = tl.load(addresses + 3 * tensors + owner).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        grad = tl.multiple_of(grad, 16)
        param = tl.multiple_of(param, 16)
        average = tl.multiple_of(average, 16)
        square = tl.multiple_of(square, 16)
    grad += start
    param += start
    average += start
    square += start
    count_at = tl.load(addresses + 4 * tensors + owner).to(tl.pointer_type(tl.float32))
    step = tl.load(count_at).to(tl.float64) + 1.0
    rate = lr
    if LR_TENSOR:
        rate = tl.load(lr_at).to(tl.float32)
        kept = 1.0 - rate * weight_decay
    # In float64, as torch has it: 1 - 0.999**step loses half its digits in float32. A number from
    # the host comes as float32, so a logarithm comes in two.
    power1 = tl.exp2(step * log_beta1 + step * log_beta1_rest)
    power2 = tl.exp2(step * log_beta2 + step * log_beta2_rest)
    step_size = (rate / (1.0 - power1)).to(tl.float32)
    root = tl.sqrt(1.0 - power2).to(tl.float32)
    divisor = 1.0
    if DIVIDE:
        divisor = tl.load(divisor_at)
    for begin in range(0, CHUNK // PIECES, _BLOCK):
        offsets = begin + tl.arange(0, _BLOCK)
        if left >= CHUNK // PIECES:
            g = load(grad, offsets, left, True)
            p = load(param, offsets, left, True)
            m = load(average, offsets, left, True)
            v = load(square, offsets, left, True)
        else:
            g = load(grad, offsets, left, False)
            p = load(param, offsets, left, False)
            m = load(average, offsets, left, False)
            v = load(square, offsets, left, False)
        if DIVIDE:
            g = tl.div_rn(g, divisor)
        if MAXIMIZE:
            g = -g
        if ADAMW:
            p = p * kept
        else:
            g = g + weight_decay * p
        m = m + first * (g - m)
        v = second * v + rest * g * g
        p = p - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        if left >= CHUNK // PIECES:
            tl.store(param + offsets, p)
            tl.store(average + offsets, m)
            tl.store(square + offsets, v)
        else:
            tl.store(param + offsets, p, mask=offsets < left)
            tl.store(average + offsets, m, mask=offsets < left)
            tl.store(square + offsets, v, mask=offsets < left)


@triton.jit
def _count_steps(addresses, tensors, skip_at, SKIP: tl.constexpr, WIDTH: tl.constexpr):
    """Adds 1 to every step counter, unless the step was skipped."""
    if SKIP:
        if tl.load(skip_at) != 0:
            return
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = places < tensors
    counters = tl.load(addresses + 4 * tensors + places, mask=there, other=0)
    at = counters.to(tl.pointer_type(tl.float32))
    tl.store(at, tl.load(at, mask=there, other=0.0) + 1.0, mask=there)


def _two_floats(value: float) -> tuple[float, float]:
    """`value` as a sum of two float32 numbers."""
    large: float = struct.unpack("f", struct.pack("f", value))[0]
    return large, value - large


def step(
    table: Table,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """One step of the tensors in `table`.

    Its rows are gradients, parameters, both averages and the step counters, all float32.
    `divisor` is float32, what is in the gradients; `skip` is float32, and not 0 skips.
    """
    chunks, addresses = table.chunks, table.addresses
    tensors = len(chunks.sizes)
    anywhere = chunks.sizes  # stands for what is not there
    flag = anywhere if skip is None else skip
    rate = 0.0 if isinstance(lr, Tensor) else lr
    if chunks.total:
        _step_pieces[(chunks.total * PIECES,)](
            addresses,
            tensors,
            chunks.sizes,
            chunks.firsts,
            chunks.owners,
            anywhere if divisor is None else divisor,
            flag,
            lr if isinstance(lr, Tensor) else anywhere,
            rate,
            *_two_floats(math.log2(betas[0]) if betas[0] else -1e30),
            *_two_floats(math.log2(betas[1]) if betas[1] else -1e30),
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            eps,
            weight_decay,
            1.0 - rate * weight_decay,
            ADAMW=decoupled,
            MAXIMIZE=maximize,
            DIVIDE=divisor is not None,
            SKIP=skip is not None,
            LR_TENSOR=isinstance(lr, Tensor),
            ALIGNED=table.aligned,
            CHUNK=CHUNK,
            PIECES=PIECES,
            num_warps=4,
        )
    if tensors:
        _count_steps[(triton.cdiv(tensors, 128),)](
            addresses, tensors, flag, SKIP=skip is not None, WIDTH=128
        )
