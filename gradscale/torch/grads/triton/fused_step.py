"""The steps of all optimizers in one pass: unscale, clip, skip and step, all read from the device.

A weight in float16 or bfloat16 has a master of 32 bits: either a float32 of its own beside it, or
16 more bits that make one together with it. For bfloat16 those bits are exactly the missing half of
a float32; the weight is then the nearest one, ties away from 0. For float16 they count 2**-15 parts
of the distance to the next float16 number: exact from 2**-16 up to 65504, and below 2**-16 within
2**-40. A float16 weight is at most 65504: there a split master ends as well, and a float32 master
beyond it keeps its value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.chunks import (
    ELEMENTS,
    chunk_of,
    fetch,
    load,
    pointer_to,
    power_of_two,
    store,
)
from gradscale.torch.grads.triton.launch import Kernel
from gradscale.torch.grads.triton.tables import CHUNK, Table

BLOCK = tl.constexpr(1024)
"""Elements that a program has in hand at a time: fewer than for reading, because there are four
lists."""
SIZE = 4096
"""Elements that a program takes."""

_MASTERS = {None: 0, "float32": 1, "split": 2}
"""The values of the constant MASTER: where the master of a weight is."""
_FLOAT32, _SPLIT = tl.constexpr(1), tl.constexpr(2)
_RULES = {"adam": 0, "sgd": 1, "lion": 2}
"""The values of the constant RULE."""
_ADAM, _SGD, _LION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NUMBERS = 9
"""From `beta1` to `eps`: the numbers of a rule."""
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2**22, it leaves no room for a fraction."""


@triton.jit
def _piece_of(sizes, firsts, owners, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Whose piece this is, where it begins, and how many elements are left from there."""
    pieces = CHUNK // SIZE
    owner, start, left = chunk_of(sizes, firsts, owners, tl.program_id(0) // pieces, CHUNK)
    begin = (tl.program_id(0) % pieces) * SIZE
    return owner, start + begin, left - begin


@triton.jit
def _gradient(
    pointer, offsets, left, divisor, DIVIDE: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr
):
    """A gradient without its scale; `BACK` leaves it so where it is."""
    g = load(pointer, offsets, left, WHOLE)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        if BACK:
            store(pointer, offsets, left, g, WHOLE)
    return g


@triton.jit
def _weight(param, master, offsets, left, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Weights as float32."""
    if MASTER == _FLOAT32:
        return load(master, offsets, left, WHOLE)
    if MASTER == _SPLIT:
        low = fetch(master, offsets, left, WHOLE)
        return _joined(fetch(param, offsets, left, WHOLE), low)
    return load(param, offsets, left, WHOLE)


@triton.jit
def _put_weight(param, master, offsets, left, p, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Writes weights, rounded, and their masters."""
    if MASTER == _SPLIT:
        high, low = _parted(p, param.dtype.element_ty)
        store(param, offsets, left, high, WHOLE)
        store(master, offsets, left, low, WHOLE)
    else:
        if MASTER == _FLOAT32:
            store(master, offsets, left, p, WHOLE)
            p = _saturated(p, param.dtype.element_ty)
        store(param, offsets, left, p, WHOLE)


@triton.jit
def _saturated(p, element: tl.constexpr):
    """Numbers within the range of float16, where `element` is that; NaN stays."""
    if element == tl.float16:
        p = tl.where(p > 65504.0, 65504.0, tl.where(p < -65504.0, -65504.0, p))
    return p


@triton.jit
def _binade(high):
    """The exponent of float16 numbers; that of the smallest normal one for all below it."""
    bits = high.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(((bits >> 23) & 0xFF) - 127, -14)


@triton.jit
def _joined(high, low):
    """The float32 that a weight and its 16 more bits are."""
    if high.dtype == tl.bfloat16:
        top = high.to(tl.int16, bitcast=True).to(tl.int32)
        rest = low.to(tl.int32)
        # Beside a 0 they are never below 0, unless somebody has set the weight to 0.
        rest = tl.where((top & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
        return ((top << 16) + rest).to(tl.float32, bitcast=True)
    return high.to(tl.float32) + low.to(tl.float32) * power_of_two(_binade(high) - 25)


@triton.jit
def _parted(p, element: tl.constexpr):
    """A float32 as a weight and its 16 more bits."""
    if element == tl.bfloat16:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        low = (bits - (high << 16)).to(tl.int16)
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True), low
    p = _saturated(p, element)
    high = p.to(element)
    rest = tl.where(p == p, (p - high.to(tl.float32)) * power_of_two(25 - _binade(high)), 0.0)
    return high, ((rest + _ROUNDER) - _ROUNDER).to(tl.int32).to(tl.int16)


@triton.jit
def _count(count_at, arrivals, owner, size, SIZE: tl.constexpr):
    """Counts the step, once for a tensor: by the last of its pieces, when all have read it."""
    pieces = tl.maximum((size + SIZE - 1) // SIZE, 1)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + owner, 1, sem="acq_rel") == pieces - 1:
        tl.store(arrivals + owner, 0)
        tl.store(count_at, tl.load(count_at) + 1.0)


@triton.jit
def _walk(
    grad, param, master, average, square, left, divisor, rate, weight_decay, kept,
    beta1, rest1, beta2, rest2, eps, root,
    RULE: tl.constexpr, STATES: tl.constexpr, DECOUPLED: tl.constexpr, NESTEROV: tl.constexpr,
    MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, DIVIDE: tl.constexpr,
    BACK: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps the elements of a piece."""
    for begin in range(0, SIZE, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        g = _gradient(grad, offsets, left, divisor, DIVIDE, BACK, WHOLE)
        p = _weight(param, master, offsets, left, MASTER, WHOLE)
        if STATES > 0:
            m = load(average, offsets, left, WHOLE)
        if STATES > 1:
            v = load(square, offsets, left, WHOLE)
        if MAXIMIZE:
            g = -g
        if DECAY:
            if DECOUPLED:
                p = p * kept
            else:
                g = g + weight_decay * p
        if RULE == _ADAM:
            m = m + rest1 * (g - m)
            v = beta2 * v + rest2 * g * g
            p = p - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        if RULE == _LION:
            mixed = beta1 * m + rest1 * g
            p = p - tl.where(mixed > 0, rate, tl.where(mixed < 0, -rate, mixed))
            m = beta2 * m + rest2 * g
        if RULE == _SGD:
            if STATES > 0:
                m = beta1 * m + rest1 * g
                if NESTEROV:
                    g = g + beta1 * m
                else:
                    g = m
            p = p - rate * g
        _put_weight(param, master, offsets, left, p, MASTER, WHOLE)
        if STATES > 0:
            store(average, offsets, left, m, WHOLE)
        if STATES > 1:
            store(square, offsets, left, v, WHOLE)


@Kernel
def _step(
    addresses,
    sizes,
    firsts,
    owners,
    divisor_at,
    skip_at,
    lr_at,
    arrivals,
    tensors,
    lr,
    weight_decay,
    kept,
    beta1,
    rest1,
    beta2,
    rest2,
    log_beta1,
    log_beta1_rest,
    log_beta2,
    log_beta2_rest,
    eps,
    element: tl.constexpr,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    DECOUPLED: tl.constexpr,
    NESTEROV: tl.constexpr,
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
    owner, start, left = _piece_of(sizes, firsts, owners, SIZE, CHUNK)
    if (left <= 0) & (start > 0):
        return
    grad = pointer_to(addresses, owner, start, element, ALIGNED)
    param = pointer_to(addresses, tensors + owner, start, element, ALIGNED)
    average = param
    square = param
    if STATES > 0:
        average = pointer_to(addresses, 2 * tensors + owner, start, tl.float32, ALIGNED)
    if STATES > 1:
        square = pointer_to(addresses, 3 * tensors + owner, start, tl.float32, ALIGNED)
    row = 2 + STATES
    count_at = addresses
    if (RULE != _LION) & (STATES > 0):
        count_at = tl.load(addresses + row * tensors + owner).to(tl.pointer_type(tl.float32))
        row += 1
    master = param
    if MASTER == _FLOAT32:
        master = pointer_to(addresses, row * tensors + owner, start, tl.float32, ALIGNED)
    if MASTER == _SPLIT:
        master = pointer_to(addresses, row * tensors + owner, start, tl.int16, ALIGNED)
    rate = lr
    if LR_TENSOR:
        rate = tl.load(lr_at).to(tl.float32)
        kept = 1.0 - rate * weight_decay
    divisor = 1.0
    if DIVIDE:
        divisor = tl.load(divisor_at)
    root = 1.0
    if RULE == _ADAM:
        # In float64, as torch has it: 1 - 0.999**step loses half its digits in float32. A number
        # from the host comes as float32, so a logarithm comes in two.
        step = tl.load(count_at).to(tl.float64) + 1.0
        power1 = tl.exp2(step * log_beta1 + step * log_beta1_rest)
        power2 = tl.exp2(step * log_beta2 + step * log_beta2_rest)
        rate = (rate / (1.0 - power1)).to(tl.float32)
        root = tl.sqrt(1.0 - power2).to(tl.float32)
    if (RULE == _SGD) & (STATES > 0):
        # The first step takes the gradient as it is, whatever the dampening.
        rest1 = tl.where(tl.load(count_at) == 0, 1.0, rest1)
    if left >= SIZE:
        _walk(
            grad, param, master, average, square, left, divisor, rate, weight_decay, kept,
            beta1, rest1, beta2, rest2, eps, root, RULE, STATES, DECOUPLED, NESTEROV,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, SIZE, True,
        )  # fmt: skip
    else:
        _walk(
            grad, param, master, average, square, left, divisor, rate, weight_decay, kept,
            beta1, rest1, beta2, rest2, eps, root, RULE, STATES, DECOUPLED, NESTEROV,
            MASTER, MAXIMIZE, DECAY, DIVIDE, BACK, SIZE, False,
        )  # fmt: skip
    if (RULE != _LION) & (STATES > 0):
        _count(count_at, arrivals, owner, start + left, SIZE)


def step(
    table: Table,
    dtype: torch.dtype,
    master: str | None,
    group: dict[str, Any],
    divisor: Tensor | None,
    skip: Tensor | None,
    back: bool,
    rule: str,
    states: int,
    numbers: tuple[float, ...],
    decoupled: bool,
    nesterov: bool,
) -> None:
    """Takes one step of an optimizer.

    Args:
        table: Rows of gradients, weights, the states of the rule, step counters where it counts,
            and masters where there are some. States and counters are float32.
        dtype: The format of weights and gradients.
        master: Where the masters are: "float32", "split", or None.
        group: Has `lr`, `weight_decay` and `maximize`.
        divisor: float32: what the gradients are divided by; None if they are not.
        skip: float32: not 0 skips.
        back: Whether to leave the gradients divided.
        rule: "adam", "sgd" or "lion".
        states: How many states each weight has: 2, 0 or 1, 1.
        numbers: The arguments of the kernel from `beta1` on. Of SGD `beta1` is the momentum, and
            `rest1` what is taken of a gradient.
        decoupled: Whether weight decay is, as in AdamW and Lion.
        nesterov: Whether momentum is.
    """
    lr, weight_decay, chunks = group["lr"], group["weight_decay"], table.chunks
    tensor = isinstance(lr, Tensor)
    rate = 0.0 if tensor else float(lr)
    anywhere = chunks.sizes  # an argument that is not read
    if "arrivals" not in table.workspace:
        # Counters, at 0 between launches, of the pieces of every tensor that are done.
        none = torch.zeros(table.tensors, dtype=torch.int32, device=table.device)
        table.workspace["arrivals"] = [none]
    pointers = (
        table.addresses,
        *chunks[:3],
        anywhere if divisor is None else divisor,
        anywhere if skip is None else skip,
        lr if tensor else anywhere,
        *table.workspace["arrivals"],
    )
    values = (
        table.tensors,
        rate,
        float(weight_decay),
        1.0 - rate * weight_decay,
        *numbers,
        *(0.0,) * (_NUMBERS - len(numbers)),
    )
    constants = (
        ELEMENTS[dtype],
        _RULES[rule],
        states,
        decoupled,
        nesterov,
        _MASTERS[master],
        group["maximize"],
        weight_decay != 0,
        divisor is not None,
        back,
        skip is not None,
        tensor,
        table.aligned,
        SIZE,
        CHUNK,
    )
    programs, formats = chunks.total * (CHUNK // SIZE), (lr.dtype,) if tensor else ()
    # A product that is rounded before it is added is the same on every machine and in the
    # interpreter; the step waits for memory anyway.
    _step(programs, pointers, values, constants, formats, num_warps=4, enable_fp_fusion=False)
