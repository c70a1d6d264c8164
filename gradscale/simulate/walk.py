"""A policy on a history of gradients: a scale that is too high makes a bad step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscale.formats import format_named
from gradscale.policy import GradStats, Policy
from gradscale.policy.histogram import EDGE
from gradscale.simulate.histories import History

SPREAD = 1.2
"""How far the gradients of a model are apart: their log2 is taken for logistic with this scale."""
RAREST = 1e-7
"""The share of the elements that the largest one is among."""
GOOD = 2.0
"""Binades that a scale may be off the best one and still be a good one."""


class Report(NamedTuple):
    """The results of every run. Steps whose loss was not finite do not count as skipped."""

    skipped: NDArray[Any]
    """Steps that were not applied although their loss was finite."""
    wasted: NDArray[Any]
    """Those of them before the first applied step, or among the first 20."""
    settled: NDArray[Any]
    """The first step from which on the scale stays within 2 binades of a scale that could have been
    kept all the time, if there is one; else the number of steps."""
    moves: NDArray[Any]
    """How often the scale moved."""
    underflow: NDArray[Any]
    """The mean share of elements below the format's smallest normal number, in applied steps."""
    scale: NDArray[Any]
    """The scale after the last step."""
    scales: NDArray[Any]
    """log2 of the scale before every step."""
    below: NDArray[Any]
    """Binades between the median scale and the highest static one that skips no more steps."""


def walk(
    policy: Policy, history: History, scales: NDArray[Any] | None = None, format: str = "float16"
) -> Report:
    """What `policy` makes of every run of `history`, from its own first scale or from `scales`."""
    steps, runs = history.amax.shape
    facts = format_named(format)
    ceiling = facts.ceiling
    smallest = math.log2(facts.smallest_subnormal) - 1
    update: Callable[..., Any] = policy.update
    state: Any = policy.init(np, like=np.zeros(runs, dtype=np.float32))
    if scales is not None:
        state = state._replace(scale=np.asarray(scales, dtype=np.float32))
    log2 = np.empty((steps, runs))
    finite = np.empty((steps, runs), dtype=bool)
    for step in range(steps):
        log2[step] = np.log2(state.scale)
        amax = history.amax[step] + log2[step]
        there = np.where(amax < smallest, 0.0, np.exp2(np.minimum(amax, 127.0)))
        loss_finite = history.loss_finite[step]
        finite[step] = (amax + history.above[step] < ceiling) & loss_finite
        stats = GradStats(
            finite=finite[step],
            amax=there.astype(np.float32),
            loss_finite=loss_finite,
            exponent=np.frexp(there)[1].astype(np.int32),
            upper=above(amax, math.log2(facts.max * EDGE)).astype(np.float32),
        )
        state = update(state, stats, np)
    last = np.log2(state.scale)
    skipped = history.loss_finite & ~finite
    begun = np.logical_or.accumulate(finite, axis=0)
    early = np.arange(steps)[:, None] < 20
    below = 1 - above(history.amax + log2, math.log2(facts.smallest_normal))
    share = (below * finite).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    reach = np.where(history.loss_finite, history.amax + history.above, -np.inf)
    best = np.ceil(ceiling - reach.max(axis=0)) - 1
    bad = np.abs(log2 - best) > GOOD
    settled = np.where(bad.any(axis=0), steps - np.argmax(bad[::-1], axis=0), 0)
    scales = np.concatenate([log2, last[None]])
    return Report(
        skipped=skipped.sum(axis=0),
        wasted=(skipped & (early | ~begun)).sum(axis=0),
        settled=settled,
        moves=(np.diff(scales, axis=0) != 0).sum(axis=0),
        underflow=share,
        scale=np.exp2(last),
        scales=log2,
        below=_static(reach, skipped.sum(axis=0), ceiling) - np.median(log2, axis=0),
    )


def _static(reach: NDArray[Any], skips: NDArray[Any], ceiling: int) -> NDArray[Any]:
    """log2 of the highest power of two that overflows in at most `skips` steps of each run."""
    falling = np.sort(reach, axis=0)[::-1]
    highest = falling[np.minimum(skips, len(falling) - 1), np.arange(falling.shape[1])]
    best: NDArray[Any] = np.ceil(ceiling - highest) - 1
    return best


def above(amax: NDArray[Any], edge: float) -> NDArray[Any]:
    """The share of the elements above `edge`, if the largest is `amax`; both as log2.

    >>> float(above(np.array(13.0), 13.0)) < 2e-7
    True
    """
    middle = amax + SPREAD * math.log(RAREST)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp((edge - middle) / SPREAD))
