"""A kernel that moves many states at once, by the rules that are in the library's kernels."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.decide import moved
from gradscale.torch.grads.triton.launch import Kernel
from gradscale.torch.grads.triton.offsets import HEADROOM


@Kernel
def _update(
    state_at,
    finite_at,
    fits_at,
    amax_at,
    loss_finite_at,
    settings_at,
    WORDS: tl.constexpr,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Moves one of several states."""
    which = tl.program_id(0)
    finite = tl.load(finite_at + which) != 0
    counts = finite == finite
    if LOSS:
        counts = tl.load(loss_finite_at + which) != 0
    amax = 0.0
    fits = counts
    if RULE == HEADROOM:
        amax = tl.load(amax_at + which)
        fits = tl.load(fits_at + which) != 0
    moved(state_at + WORDS * which, settings_at, finite, fits, amax, counts, RULE)


def update(
    state: Tensor,
    finite: Tensor,
    fits: Tensor | None,
    amax: Tensor | None,
    loss_finite: Tensor | None,
    settings: Tensor,
    rule: int,
) -> None:
    """Moves a packed `state`, or each row of several, in place, as `policy.update` would.

    The flags are bool and `amax` float32, one for each state. `HEADROOM` alone needs `fits` and
    `amax`. `loss_finite` None means that the loss was finite. The counters do not change.
    """
    words = state.shape[-1]
    arguments = (
        state,
        finite,
        finite if fits is None else fits,
        finite if amax is None else amax,
        finite if loss_finite is None else loss_finite,
        settings,
    )
    constants = (words, loss_finite is not None, rule)
    _update(state.numel() // words, arguments, (), constants, num_warps=1)
