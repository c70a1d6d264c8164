"""Lion in one pass: the sign of an average of gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from gradscale.torch.grads.triton.chunks import load, pointer_to, store
from gradscale.torch.grads.triton.fused_step import (
    BLOCK,
    OPTIONS,
    Step,
    gradient,
    piece_of,
    put_weight,
    weight,
)
from gradscale.torch.grads.triton.launch import Kernel


@triton.jit
def _walk(
    grad, param, master, average, left, divisor, rate, kept, beta1, rest1, beta2, rest2,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, DIVIDE: tl.constexpr,
    BACK: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps the elements of a piece."""
    for begin in range(0, SIZE, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        g = gradient(grad, offsets, left, divisor, DIVIDE, BACK, WHOLE)
        p = weight(param, master, offsets, left, MASTER, WHOLE)
        m = load(average, offsets, left, WHOLE)
        if MAXIMIZE:
            g = -g
        mixed = beta1 * m + rest1 * g
        signed = tl.where(mixed > 0, rate, tl.where(mixed < 0, -rate, mixed))
        if DECAY:
            p = p * kept
        put_weight(param, master, offsets, left, p - signed, MASTER, WHOLE)
        store(average, offsets, left, beta2 * m + rest2 * g, WHOLE)


@Kernel
def _lion(
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
    beta1,
    rest1,
    beta2,
    rest2,
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
    master = param
    if MASTER == 1:
        master = pointer_to(addresses, 3 * tensors + owner, start, tl.float32, ALIGNED)
    if MASTER == 2:
        master = pointer_to(addresses, 3 * tensors + owner, start, tl.int16, ALIGNED)
    rate = lr
    if LR_TENSOR:
        rate = tl.load(lr_at).to(tl.float32)
        kept = 1.0 - rate * weight_decay
    divisor = 1.0
    if DIVIDE:
        divisor = tl.load(divisor_at)
    if left >= SIZE:
        _walk(
            grad, param, master, average, left, divisor, rate, kept, beta1, rest1, beta2, rest2,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, SIZE, True,
        )  # fmt: skip
    else:
        _walk(
            grad, param, master, average, left, divisor, rate, kept, beta1, rest1, beta2, rest2,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, SIZE, False,
        )  # fmt: skip


def step(step: Step, betas: tuple[float, float]) -> None:
    """One step; the row of states is the average."""
    own = (float(betas[0]), 1.0 - betas[0], float(betas[1]), 1.0 - betas[1])
    _lion(step.programs, (*step.arguments(), *own), step.constants(), step.formats, **OPTIONS)
