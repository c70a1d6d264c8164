"""What ranks report to one another: written and folded by kernels.

The words are those of `fields.REPORT`, and each is folded as that list says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.grads import fields
from gradscale.torch.grads.triton.decide import loss_is_finite
from gradscale.torch.grads.triton.launch import Kernel, formats_of
from gradscale.torch.grads.triton.offsets import REPORT, SUMMARY

_FOLDS = ("max", "min", "norm", "checksum")
_MIN, _NORM, _CHECKSUM = (tl.constexpr(_FOLDS.index(fold)) for fold in _FOLDS[1:])


@Kernel
def _report(
    summary,
    norm_at,
    loss_at,
    checksum_at,
    words,
    rank,
    LOSS: tl.constexpr,
    CHECKSUM: tl.constexpr,
):
    """Writes what this rank has found in gradients that are like `summary`."""
    non_finite = tl.load(summary + SUMMARY.non_finite)
    bad_loss = tl.where(loss_is_finite(loss_at, LOSS), 0.0, 1.0)
    checksum = 0.0
    if CHECKSUM:
        checksum = tl.load(checksum_at)
    tl.store(words + REPORT.non_finite, non_finite)
    tl.store(words + REPORT.unfit, 1.0 - tl.load(summary + SUMMARY.fits))
    tl.store(words + REPORT.loss_non_finite, bad_loss)
    tl.store(words + REPORT.penalty_non_finite, 0.0)
    tl.store(words + REPORT.has_gradients, 1.0)
    tl.store(words + REPORT.has_common_loss, 1.0)
    tl.store(words + REPORT.amax, tl.load(summary + SUMMARY.amax))
    tl.store(words + REPORT.norm, tl.load(norm_at))
    tl.store(words + REPORT.checksum, checksum)
    tl.store(words + REPORT.bad_rank, tl.where(non_finite != 0, rank, float("inf")))


def report(
    summary: Tensor,
    norm: Tensor,
    *,
    loss: Tensor | None,
    loss_kind: int,
    checksum: Tensor | None,
    rank: int,
) -> Tensor:
    """The `REPORT` of this rank, as one row (1, words), float32.

    It has gradients, a pass of the common loss, and no penalty.

    Args:
        summary: The `SUMMARY` of its gradients.
        norm: float32: the 2-norm of those elements that count as this rank's.
        loss: The loss, as `loss_kind` says.
        loss_kind: One of `packed.LOSS_*`.
        checksum: float32: of the scale and what goes with it; None for 0.
        rank: Its number.
    """
    words = torch.empty((1, len(REPORT.value)), dtype=torch.float32, device=summary.device)
    tensors = (
        summary,
        norm,
        summary if loss is None else loss,
        summary if checksum is None else checksum,
        words,
    )
    _report(1, tensors, (float(rank),), (loss_kind, checksum is not None), formats_of(loss))
    return words


@triton.jit
def _no_nan(value):
    """`value`, or infinity in the place of NaN."""
    return tl.where(value != value, float("inf"), value)


@Kernel
def _fold(rows, words, ranks, losses, WORDS: tl.constexpr, RULES: tl.constexpr):
    """Folds one word of the rows of all ranks, for one loss; `RULES` is a digit for each word."""
    loss = tl.program_id(0) // WORDS
    place = tl.program_id(0) % WORDS
    first = rows + WORDS * loss + place
    stride = WORDS * losses
    largest = 0.0
    smallest = float("inf")
    head = tl.load(first)
    common = head
    for rank in range(ranks):
        word = tl.load(first + stride * rank)
        largest = tl.maximum(largest, _no_nan(word))
        smallest = tl.minimum(smallest, word)
        common = tl.where(word == head, common, -1.0)
    # By the largest, because squares may overflow where the root does not.
    safe = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    squares = 0.0
    for rank in range(ranks):
        part = tl.div_rn(tl.load(first + stride * rank), safe)
        squares += part * part
    norm = tl.where(largest < float("inf"), safe * tl.sqrt_rn(squares), largest)
    rule = (RULES >> (2 * place)) & 3
    folded = tl.where(rule == _MIN, smallest, largest)
    folded = tl.where(rule == _NORM, norm, folded)
    folded = tl.where(rule == _CHECKSUM, common, folded)
    tl.store(words + WORDS * loss + place, folded)


_RULES = sum(_FOLDS.index(field.fold) << (2 * place) for place, field in enumerate(fields.REPORT))
"""How each word of a report is folded, two bits each."""


def fold(rows: Tensor) -> Tensor:
    """The words (losses, words) of all ranks together, from their rows (ranks, losses, words).

    The order is fixed, so every rank gets the same bits.
    """
    ranks, losses, count = rows.shape
    words = torch.empty((losses, count), dtype=torch.float32, device=rows.device)
    constants = (len(REPORT.value), _RULES)
    _fold(losses * count, (rows.contiguous(), words), (ranks, losses), constants)
    return words
