"""The part of the scaler that tells the policy what gradients were like, and moves the scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import Format
from gradscale.policy import Dynamic, GradStats, Headroom, State
from gradscale.policy.histogram import EDGE
from gradscale.torch import kernels
from gradscale.torch.events import Move
from gradscale.torch.keeper import LOSSES, ScaleKeeper, plain
from gradscale.torch.unscale import readable
from gradscale.torch.window import Window

# A non-finite loss says nothing about the scale, unless it is non-finite *because of* the scale (a
# penalty computed from scaled gradients by hand). So after many in a row, one in a few counts as an
# overflow after all.
PATIENT_LOSSES, LOSS_PERIOD = 32, 8


class Moving(ScaleKeeper):
    """Scales that move by a policy."""

    _format: Format

    def _move(
        self, finite: Tensor, fits: Tensor, window: Window | None, sizes: Mapping[str, Tensor]
    ) -> Iterator[Move]:
        """Tells the policy what the gradients of `window` were like, and takes its answers."""
        live = self._live("update()")
        loss_finite: Tensor | bool = True
        news = None
        if window is not None:
            if window.penalty_finite is not None:
                finite = finite & window.penalty_finite
            if window.dropped is not None:
                finite = finite & (window.dropped == 0)
            if window.finite is None or window.captured:
                loss_finite = self._loss_finite(window)
            else:
                # A further update() for the same backward passes: only an overflow that is news
                # counts.
                news = window.finite & ~finite
                if window.loss_finite is not None:
                    news = news & window.loss_finite
                finite = finite & window.finite
            window.finite = finite
            if window.blank is not None:
                news = ~window.blank if news is None else news & ~window.blank
            if window.idle is not None:
                news = ~window.idle if news is None else news & ~window.idle
            # If loss 0 took no part, its scale, which the gradients have now, can be found too high
            # but not good enough to grow.
            if window.common is not None:
                told = window.common | ~finite
                news = told if news is None else news & told
            elif window.own_passes and window.own_passes == window.begun:
                news = ~finite if news is None else news & ~finite
        stats = GradStats(finite=finite, loss_finite=loss_finite, fits=fits, **sizes)
        yield self._update(0, live, stats, news)
        yield from self._move_losses(window)

    def _move_losses(self, window: Window | None) -> Iterator[Move]:
        """Tells the policy of the losses with a scale of their own."""
        for loss_id, own in window.take_losses() if window is not None else ():
            sizes = self._sizes_of(own.amax)
            fits = torch.ones_like(own.finite)
            stats = GradStats(own.finite, loss_finite=own.loss_finite, fits=fits, **sizes)
            yield self._update(loss_id, self._loss_state(loss_id), stats, own.present)

    def _update(
        self, loss_id: int | str, live: State, stats: GradStats, news: Tensor | None = None
    ) -> Move:
        """Moves a state in place, only where there is `news`."""
        before = live.scale.clone()
        if news is None and type(self._policy) is Dynamic and kernels.take(before.device):
            told = stats.loss_finite
            losses = told if isinstance(told, Tensor) else None
            kernels.writing().update(self._policy, live, stats.finite, losses)
        else:
            moved = self._moved(live, stats, news)
            for value, new in zip(live, moved, strict=True):
                value.copy_(new if news is None else torch.where(news, new, value))
        return Move(loss_id, before, live.scale.clone(), getattr(self._policy, "min_scale", 0.0))

    def _moved(self, live: State, stats: GradStats, news: Tensor | None) -> Any:
        """The state after `stats`; itself, moved in place, if a kernel has done it."""
        rule: Any = self._policy
        if isinstance(rule, Headroom) and news is None and kernels.take(live.scale.device):
            told = stats.loss_finite
            losses = told if isinstance(told, Tensor) else None
            kernels.headroom().update(rule, live, stats.finite, stats.fits, stats.amax, losses)
            return live
        if not rule.goes_by or not readable(live.scale):
            return rule.update(live, stats, torch)
        # The larger rules are a hundred operations, which plain numbers are quicker at.
        told = GradStats(*(v.item() if isinstance(v, Tensor) else v for v in stats))
        return map(torch.tensor, rule.update(plain(live), told))

    def _lower(self, used: float) -> bool:
        """Whether the scale is below the one that was `used`, in a step that overflowed.

        A policy that waits for further overflows is told of this one again.
        """
        live = self._live("update()")
        for _ in range(getattr(self._policy, "hysteresis", 1) - 1):
            if float(live.scale) < used:
                break
            no, yes = torch.zeros_like(live.scale).bool(), torch.ones_like(live.scale).bool()
            sizes = self._sizes_of(torch.zeros_like(live.scale))
            self._update(0, live, GradStats(finite=no, fits=yes, **sizes))
        return float(live.scale) < used

    def _sizes_of(self, amax: Tensor, upper: Tensor | None = None) -> dict[str, Tensor]:
        """What the policy goes by besides flags, if this is the largest scaled magnitude.

        `upper` is the share of elements near the ceiling; where nobody has counted, one is enough.
        """
        sizes = {"amax": amax.float()}
        if "exponent" in self._policy.goes_by:
            sizes["exponent"] = torch.frexp(sizes["amax"]).exponent.to(torch.int32)
        if "upper" in self._policy.goes_by:
            near = (amax > self._format.max * EDGE).float()
            sizes["upper"] = near if upper is None else upper
        return sizes if self._policy.goes_by else {}

    def _loss_finite(self, window: Window) -> Tensor | bool:
        """bool: whether the losses of `window` were finite, as the policy is told."""
        if window.loss_finite is None:
            return True
        finite, count = window.loss_finite, self._counters[LOSSES]
        if window.penalty_finite is not None:
            finite = finite | ~window.penalty_finite  # non-finite through the scale: it is to blame
        count.copy_(torch.where(finite, torch.zeros_like(count), count + 1))
        over = count - PATIENT_LOSSES
        return finite | ((over > 0) & (over % LOSS_PERIOD == 0))
