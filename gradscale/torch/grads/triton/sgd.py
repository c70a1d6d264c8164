"""SGD in one pass, with momentum, dampening, nesterov and weight decay."""

from __future__ import annotations

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
    grad, param, master, buffer, left, divisor, rate, weight_decay, momentum, taken,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, DIVIDE: tl.constexpr,
    BACK: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps the elements of a piece."""
    for begin in range(0, SIZE, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        g = gradient(grad, offsets, left, divisor, DIVIDE, BACK, WHOLE)
        p = weight(param, master, offsets, left, MASTER, WHOLE)
        if MAXIMIZE:
            g = -g
        if DECAY:
            g = g + weight_decay * p
        if MOMENTUM:
            b = momentum * load(buffer, offsets, left, WHOLE) + taken * g
            store(buffer, offsets, left, b, WHOLE)
            if NESTEROV:
                g = g + momentum * b
            else:
                g = b
        put_weight(param, master, offsets, left, p - rate * g, MASTER, WHOLE)


@Kernel
def _sgd(
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
    momentum,
    taken,
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
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
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
    rate = lr
    if LR_TENSOR:
        rate = tl.load(lr_at).to(tl.float32)
    divisor = 1.0
    if DIVIDE:
        divisor = tl.load(divisor_at)
    buffer = param
    if MOMENTUM:
        buffer = pointer_to(addresses, 2 * tensors + owner, start, tl.float32, ALIGNED)
        # The first step takes the gradient as it is, whatever the dampening.
        count_at = tl.load(addresses + 3 * tensors + owner).to(tl.pointer_type(tl.float32))
        taken = tl.where(tl.load(count_at) == 0, 1.0, taken)
    row = 2 + 2 * MOMENTUM
    master = param
    if MASTER == 1:
        master = pointer_to(addresses, row * tensors + owner, start, tl.float32, ALIGNED)
    if MASTER == 2:
        master = pointer_to(addresses, row * tensors + owner, start, tl.int16, ALIGNED)
    if left >= SIZE:
        _walk(
            grad, param, master, buffer, left, divisor, rate, weight_decay, momentum, taken,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, MOMENTUM, NESTEROV, SIZE, True,
        )  # fmt: skip
    else:
        _walk(
            grad, param, master, buffer, left, divisor, rate, weight_decay, momentum, taken,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, MOMENTUM, NESTEROV, SIZE, False,
        )  # fmt: skip
    if MOMENTUM:
        count(count_at, arrivals, owner, start + left, SIZE)


def step(step: Step, momentum: float, dampening: float, nesterov: bool) -> None:
    """One step; with momentum the row of states is its buffer, then come the counters."""
    constants = (*step.constants(), momentum != 0, nesterov)
    own = (float(momentum), 1.0 - dampening)
    _sgd(step.programs, (*step.arguments(), *own), constants, step.formats, **OPTIONS)
