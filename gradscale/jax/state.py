"""The state of `scaled`: that of the optimizer, and everything else in two arrays.

A compiled step takes about 5 us for each array that it is given and returns (H200, jaxlib 0.11):
with the thirteen scalars of `Headroom` and of an outcome apart, a step of 0.64 ms took 0.71 ms.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradscale.checkpoints.numbers import Counts
from gradscale.errors import SettingError
from gradscale.monitor import Outcome
from gradscale.policy import Policy, State

_FLAGS = 4
"""Booleans at the beginning of an outcome."""


class ScaledState(NamedTuple):
    """The state of `scaled`: a pytree of arrays, for any kind of checkpoint."""

    inner_state: Any
    """The state of the optimizer."""
    floats: Any
    """float32: the scale; scale, grad_norm, amax and headroom of the last step; then the float32
    fields of the policy's state other than the scale."""
    ints: Any
    """int32: applied, finite, fits and loss_finite of the last step; the counters; then the int32
    fields of the policy's state."""

    @property
    def scale(self) -> Any:
        """float32: the scale of the next step."""
        return _at(self.floats, 0)

    @property
    def counts(self) -> Counts:
        """The counters."""
        return Counts(*(_at(self.ints, place) for place in _COUNTS))

    @property
    def outcome(self) -> Outcome:
        """The outcome of the last step."""
        with jax.debug_nans(False):  # it has NaN where `pack` has numbers
            return _outcome(self.floats, self.ints)

    def policy_state(self, policy: Policy) -> Any:
        """Returns the state of `policy`, which must be the policy of the optimizer.

        Raises:
            SettingError: It is the state of another policy.
        """
        floats, ints = _FLOATS.stop, _COUNTS.stop
        first, fields = policy.init(), [self.scale]
        for value in first[1:]:
            if isinstance(value, float):
                fields.append(_at(self.floats, floats))
                floats += 1
            else:
                fields.append(_at(self.ints, ints))
                ints += 1
        if (floats, ints) != (self.floats.shape[-1], self.ints.shape[-1]):
            raise SettingError(
                f"policy must be the one of the optimizer whose state this is, got {policy!r}."
            )
        return type(first)(*fields)


_FLOATS = range(1, 1 + len(Outcome._fields) - _FLAGS - 1)
"""Where the numbers of the outcome are."""
_COUNTS = range(_FLAGS, _FLAGS + len(Counts._fields))
"""Where the counts are; `skipped_in_a_row`, the first, belongs to the outcome as well."""


def pack(
    inner_state: Any, policy_state: State, outcome: Outcome, steps: Any, bad_losses: Any
) -> ScaledState:
    """A state of two arrays besides `inner_state`.

    NaN is stored as numbers that cannot occur, because `jax_debug_nans` refuses a compiled step
    that returns it: a skipped step would end the training.
    """
    *flags, scale, grad_norm, amax, headroom, skipped = outcome
    grad_norm = jnp.where(outcome.applied, grad_norm, 0.0)
    amax, headroom = (jnp.where(jnp.isnan(amax), n, x) for n, x in ((-1.0, amax), (0.0, headroom)))
    fields = [jnp.asarray(field) for field in policy_state]
    floats = [fields[0], scale, grad_norm, amax, headroom]
    ints = [*flags, skipped, steps, bad_losses]
    for field in fields[1:]:
        (floats if jnp.issubdtype(field.dtype, jnp.floating) else ints).append(field)
    return ScaledState(
        inner_state,
        jnp.stack([jnp.asarray(value, dtype=jnp.float32) for value in floats], axis=-1),
        jnp.stack([jnp.asarray(value, dtype=jnp.int32) for value in ints], axis=-1),
    )


def first_state(inner_state: Any, policy_state: State) -> ScaledState:
    """The state before the first step: nothing was applied, and nothing was skipped."""
    nothing = Outcome(
        applied=False,
        finite=True,
        fits=True,
        loss_finite=True,
        scale=policy_state.scale,
        grad_norm=0.0,
        amax=0.0,
        headroom=jnp.inf,
        skipped_in_a_row=0,
    )
    return pack(inner_state, policy_state, nothing, steps=0, bad_losses=0)


@functools.partial(jax.jit, static_argnums=1)
def _at(numbers: Any, place: int) -> Any:
    """One of `numbers`, which `vmap` gives more axes, before the last.

    Compiled, because an index outside of a compiled step would be sent to the device.
    """
    return numbers[..., place]


@jax.jit
def _outcome(floats: Any, ints: Any) -> Outcome:
    """The outcome. Compiled, so that outside of a compiled step it is one call, not nine."""
    flags = [ints[..., place] != 0 for place in range(_FLAGS)]
    scale, grad_norm, amax, headroom = (floats[..., place] for place in _FLOATS)
    is_nan = amax < 0.0
    numbers = [
        scale,
        jnp.where(flags[0], grad_norm, jnp.nan),
        jnp.where(is_nan, jnp.nan, amax),
        jnp.where(is_nan, jnp.nan, headroom),
    ]
    return Outcome._make([*flags, *numbers, ints[..., _COUNTS.start]])
