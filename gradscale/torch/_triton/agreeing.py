"""What ranks tell one another, written, put together and decided about by kernels.

The words are those of `agree.Report`, in their order, and putting them together is
`agree.together`, written a second time: tests walk both.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch._triton.deciding import VALUES, Question, decide
from gradscale.torch._triton.launching import Kernel

_WORDS = tl.constexpr(12)
_FLAGS = tl.constexpr(6)
"""How many words are flags, of which one rank's is everybody's."""


@Kernel
def _report(
    summary,
    norm_at,
    loss_finite_at,
    mark_at,
    rank,
    words,
    LOSSES: tl.constexpr,
    MARKS: tl.constexpr,
):
    """Writes what this rank has found in gradients that are like `summary`."""
    found = tl.load(summary)
    bad_loss = 0.0
    if LOSSES:
        bad_loss = tl.where(tl.load(loss_finite_at) != 0, 0.0, 1.0)
    tl.store(words, found)
    tl.store(words + 1, 1.0 - tl.load(summary + 1))
    tl.store(words + 2, bad_loss)
    tl.store(words + 3, 0.0)
    tl.store(words + 4, 1.0)
    tl.store(words + 5, 1.0)
    tl.store(words + 6, tl.load(summary + 2))
    tl.store(words + 7, tl.load(norm_at))
    tl.store(words + 8, 0.0)
    tl.store(words + 9, 0.0)
    mark = 0.0
    if MARKS:
        mark = tl.load(mark_at)
    tl.store(words + 10, mark)
    tl.store(words + 11, tl.where(found != 0, rank, float("inf")))


def report(
    summary: Tensor, norm: Tensor, loss_finite: Tensor | None, mark: Tensor | float, rank: int
) -> Tensor:
    """The words of this rank, as a row.

    Args:
        summary: What `reading.read` says of its gradients.
        norm: float32, the 2-norm of those that it counts.
        loss_finite: bool: whether its losses were finite.
        mark: float32, the checksum of its scale; or 0.
        rank: Its number.
    """
    words = torch.empty((1, _WORDS.value), dtype=torch.float32, device=summary.device)
    marks = isinstance(mark, Tensor)
    flag = summary if loss_finite is None else loss_finite
    arguments = (summary, norm, flag, mark if marks else summary, float(rank), words)
    _report(1, arguments, (loss_finite is not None, marks))
    return words


@Kernel
def _fold(rows, ranks, losses, words, WORDS: tl.constexpr, FLAGS: tl.constexpr):
    """Puts the rows of all ranks together, for one loss."""
    loss = tl.program_id(0)
    first = rows + WORDS * loss
    stride = WORDS * losses
    for place in range(FLAGS):
        flag = 0.0
        for rank in range(ranks):
            flag = tl.maximum(flag, tl.load(first + stride * rank + place))
        tl.store(words + WORDS * loss + place, flag)
    amax = 0.0
    top = 0.0
    near = 0.0
    elements = 0.0
    lowest = float("inf")
    mark = tl.load(first + 10)
    for rank in range(ranks):
        row = first + stride * rank
        size = tl.load(row + 6)
        amax = tl.maximum(amax, tl.where(size != size, float("inf"), size))
        norm = tl.load(row + 7)
        top = tl.maximum(top, tl.where(norm != norm, float("inf"), norm))
        near += tl.load(row + 8)
        elements += tl.load(row + 9)
        mark = tl.where(tl.load(row + 10) == mark, mark, -1.0)
        lowest = tl.minimum(lowest, tl.load(row + 11))
    # By the largest, because squares may overflow where the root does not.
    safe = tl.where((top > 0) & (top < float("inf")), top, 1.0)
    squares = 0.0
    for rank in range(ranks):
        part = tl.div_rn(tl.load(first + stride * rank + 7), safe)
        squares += part * part
    length = tl.where(top < float("inf"), safe * tl.sqrt_rn(squares), top)
    tl.store(words + WORDS * loss + 6, amax)
    tl.store(words + WORDS * loss + 7, length)
    tl.store(words + WORDS * loss + 8, near)
    tl.store(words + WORDS * loss + 9, elements)
    tl.store(words + WORDS * loss + 10, mark)
    tl.store(words + WORDS * loss + 11, lowest)


def fold(rows: Tensor) -> Tensor:
    """What the rows of all ranks, of every loss (ranks, losses, words), say together."""
    ranks, losses, count = rows.shape
    words = torch.empty((losses, count), dtype=torch.float32, device=rows.device)
    _fold(losses, (rows.contiguous(), ranks, losses, words), (_WORDS.value, _FLAGS.value))
    return words


@Kernel
def _decide(
    words,
    summary,
    max_norm,
    window_scale_at,
    row_at,
    loss_finite_at,
    bad_losses_at,
    steps_at,
    scale_at,
    good_at,
    bad_at,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
    patience,
    period,
    values,
    told,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Decides about a step whose gradients are, on all ranks together, like `words`."""
    found = tl.load(words) != 0
    # Nobody has a gradient: there is nothing to step, and nothing wrong with the scale.
    fits = (tl.load(words + 1) == 0) & (tl.load(words + 4) != 0)
    norm = tl.load(words + 7)
    clip = 1.0
    if max_norm < float("inf"):
        clip = tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0)
    decide(
        found,
        fits,
        tl.load(words + 6),
        norm,
        clip,
        tl.load(summary + 5),
        tl.load(summary + 6),
        tl.load(words + 3) != 0,
        window_scale_at,
        row_at,
        loss_finite_at,
        bad_losses_at,
        steps_at,
        scale_at,
        good_at,
        bad_at,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        room,
        patience,
        period,
        values,
        told,
        LOSSES,
        MOVES,
    )


def decide_together(
    words: Tensor,
    summary: Tensor,
    scale: Tensor,
    max_norm: float,
    row: Tensor,
    question: Question,
    told: Tensor,
) -> Tensor:
    """What becomes of a step (`VALUES`) that all ranks have told their words of.

    As `reading.read_and_decide`, with `words` in the place of gradients; of `summary`, this rank's
    own, are the underflow and the largest finite magnitude.
    """
    values = torch.empty(VALUES, dtype=torch.float32, device=words.device)
    arguments = (words, summary, float(max_norm), scale, row, *question.arguments(), values, told)
    _decide(1, arguments, question.constants())
    return values
