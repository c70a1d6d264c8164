"""Gradients averaged over ranks in float16, which takes half the bytes and makes no overflow.

Every rank divides its gradients by P, the power of two at or above the number R of ranks; the
backend adds them up in float16, in whatever order it likes; the sum is divided by R / P in float32.
If all gradients fit float16, so do all sums and the mean, as follows.

Let N be 65536 / P, pred(x) the float16 number before x, and gap(x) = x - pred(x). With 11 bits

    x / 2**11 <= gap(x) < x / 2**10.

A gradient of at most 65504 becomes at most 65504 / P = pred(N). A sum of k of them is at most
pred(k N): where parts of i, j, ... of them are at most pred(i N), pred(j N), ..., they are together

    k N - gap(i N) - gap(j N) - ... <= k N - k N / 2**11 < k N - gap(k N) / 2

at most, which is rounded to pred(k N) or below. That needs k N to be a float16 number, or 65536,
and so k <= 2048. Of R <= P gradients, the sum before it is rounded is less than 65536 - 32 / 2 =
65520, where float16 begins to round to infinity; and the mean is at most

    pred(R N) P / R <= R N (1 - 2**-11) P / R = 65504.

Half of P would be too little: P / 2 gradients of 65504 make 65504 in pairs, and the next one brings
at least 64 to it. Dividing by R is too little as well where that rounds up: 65504 / 3 is 21840 in
float16, and three of those are 65520.
"""

# No `from __future__ import annotations`: DDP compares those of the hook, which must be types.

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradscale.errors import SettingError

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
else:
    GradBucket = Any  # a torch without ranks

MAX_RANKS = 2048


def predivisor(ranks: int) -> int:
    """The power of two by which gradients are divided before those of `ranks` are added up.

    >>> [predivisor(ranks) for ranks in (1, 2, 3, 4, 5)]
    [1, 2, 4, 4, 8]
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise SettingError(
            f"average_in_float16 supports 1 to {MAX_RANKS} ranks, got {ranks}, because with more "
            "of them sums may overflow. Do not register the hook; gradients are then averaged in "
            "their own format."
        )
    return 1 << (ranks - 1).bit_length()


def average_in_float16(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Returns the mean gradients of all ranks, added in float16: a communication hook for DDP.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, average_in_float16)

    It replaces torch's `fp16_compress_hook`, whose sums can overflow although all gradients fit.
    Gradients that are not finite stay so, and so does a sum that does not fit, so the scaler skips
    the step.

    Gradients are scaled when the hook runs. Each rank divides them by `predivisor(ranks)`, which
    costs log2 of it in binades at the lower end: with 8 ranks, values below `8 * 2**-25` become
    zero (otherwise those below `2**-25`), and values below `8 * 2**-14` lose bits. A larger scale
    makes up for this where there is headroom. The mean of float32 gradients is float32; the mean of
    float16 gradients is rounded to float16.

    Args:
        group: The process group of the DDP model; None: all ranks.
        bucket: A bucket of gradients, from DDP.
    """
    ranks = dist.get_world_size(group)
    divisor = predivisor(ranks)
    mine = bucket.buffer()
    # One pass without a copy in between: the product is exact, and rounded when it is written.
    halves = torch.empty_like(mine, dtype=torch.float16)
    torch.mul(mine, 1 / divisor, out=halves)
    work = dist.all_reduce(halves, group=group, async_op=True)

    def mean(sums: Future[list[Tensor]]) -> Tensor:
        # ranks / divisor has no more than 11 bits, so there is one rounding, to float32.
        return mine.copy_(sums.value()[0].float().div_(ranks / divisor))

    return work.get_future().then(mean)
