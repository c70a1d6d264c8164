"""Adam and AdamW in one pass: unscale, clip, skip and step, all read from the device."""

from __future__ import annotations

import functools
import math
import struct

import triton
import triton.language as tl

from gradscale.torch.grads.triton.chunks import load, pointer_to, store
from gradscale.torch.grads.triton.fused_step import (
    BLOCK,
    OPTIONS,
    Step,
    count,
    gradient,
    piece_of,
    put_weight,
    weight,
)
from gradscale.torch.grads.triton.launch import Kernel


@triton.jit
def _walk(
    grad, param, master, average, square, left, divisor, weight_decay, kept, first, second, rest,
    eps, step_size, root,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, DIVIDE: tl.constexpr,
    BACK: tl.constexpr, ADAMW: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps the elements of a piece."""
    for begin in range(0, SIZE, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        g = gradient(grad, offsets, left, divisor, DIVIDE, BACK, WHOLE)
        p = weight(param, master, offsets, left, MASTER, WHOLE)
        m = load(average, offsets, left, WHOLE)
        v = load(square, offsets, left, WHOLE)
        if MAXIMIZE:
            g = -g
        if DECAY:
            if ADAMW:
                p = p * kept
            else:
                g = g + weight_decay * p
        m = m + first * (g - m)
        v = second * v + rest * g * g
        p = p - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        put_weight(param, master, offsets, left, p, MASTER, WHOLE)
        store(average, offsets, left, m, WHOLE)
        store(square, offsets, left, v, WHOLE)


@Kernel
def _adam(
    addresses,
    tensors,
    sizes,
    firsts,
    owners,
    divisor_at,
    skip_at,
    lr_at,
    lr,
    weight_decay,
    kept,
    arrivals,
    log_beta1,
    log_beta1_rest,
    log_beta2,
    log_beta2_rest,
    first,
    second,
    rest,
    eps,
    element: tl.constexpr,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,
    DIVIDE: tl.constexpr,
    BACK: tl.constexpr,
    SKIP: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ADAMW: tl.constexpr,
):
    """Steps a piece, or leaves it untouched."""
    if SKIP:
        if tl.load(skip_at) != 0:
            return
    owner, start, left = piece_of(sizes, firsts, owners, SIZE, CHUNK)
    if (left <= 0) & (start > 0):
        return
    grad = pointer_to(addresses, owner, start, element, ALIGNED)
    param = pointer_to(addresses, tensors + owner, start, element, ALIGNED)
    average = pointer_to(addresses, 2 * tensors + owner, start, tl.float32, ALIGNED)
    square = pointer_to(addresses, 3 * tensors + owner, start, tl.float32, ALIGNED)
    master = param
    if MASTER == 1:
        master = pointer_to(addresses, 5 * tensors + owner, start, tl.float32, ALIGNED)
    if MASTER == 2:
        master = pointer_to(addresses, 5 * tensors + owner, start, tl.int16, ALIGNED)
    count_at = tl.load(addresses + 4 * tensors + owner).to(tl.pointer_type(tl.float32))
    step = tl.load(count_at).to(tl.float64) + 1.0
    rate = lr
    if LR_TENSOR:
        rate = tl.load(lr_at).to(tl.float32)
        kept = 1.0 - rate * weight_decay
    divisor = 1.0
    if DIVIDE:
        divisor = tl.load(divisor_at)
    # In float64, as torch has it: 1 - 0.999**step loses half its digits in float32. A number from
    # the host comes as float32, so a logarithm comes in two.
    power1 = tl.exp2(step * log_beta1 + step * log_beta1_rest)
    power2 = tl.exp2(step * log_beta2 + step * log_beta2_rest)
    step_size = (rate / (1.0 - power1)).to(tl.float32)
    root = tl.sqrt(1.0 - power2).to(tl.float32)
    if left >= SIZE:
        _walk(
            grad, param, master, average, square, left, divisor, weight_decay, kept, first, second,
            rest, eps, step_size, root, MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, ADAMW, SIZE, True,
        )  # fmt: skip
    else:
        _walk(
            grad, param, master, average, square, left, divisor, weight_decay, kept, first, second,
            rest, eps, step_size, root, MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, ADAMW, SIZE, False,
        )  # fmt: skip
    count(count_at, arrivals, owner, start + left, SIZE)


def _two_floats(value: float) -> tuple[float, float]:
    """`value` as a sum of two float32 numbers."""
    large: float = struct.unpack("f", struct.pack("f", value))[0]
    return large, value - large


def step(step: Step, betas: tuple[float, float], eps: float, decoupled: bool) -> None:
    """One step; the rows of states are both averages, then come the counters."""
    constants = (*step.constants(), decoupled)
    arguments = (*step.arguments(), *_numbers(betas[0], betas[1]), float(eps))
    _adam(step.programs, arguments, constants, step.formats, **OPTIONS)


@functools.lru_cache(maxsize=64)
def _numbers(beta1: float, beta2: float) -> tuple[float, ...]:
    """What the kernel takes of the betas."""
    return (
        *_two_floats(math.log2(beta1) if beta1 else -1e30),
        *_two_floats(math.log2(beta2) if beta2 else -1e30),
        1.0 - beta1,
        float(beta2),
        1.0 - beta2,
    )
