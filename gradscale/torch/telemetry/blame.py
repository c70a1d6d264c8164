"""Which parameters had gradients that were not finite."""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.torch.grads.reference import Measurement, count_bad
from gradscale.torch.telemetry.names import Names
from gradscale.torch.telemetry.transport import Sent


class Culprit(NamedTuple):
    """A parameter whose gradient was not finite."""

    name: str
    """The name from `scaler.name(model)` or `named_parameters()`, otherwise its place and shape."""
    rank: int
    """The rank on which it was found."""
    infs: int | None
    """Number of infinite elements; None: not counted."""
    nans: int | None
    """Number of NaN elements; None: not counted."""


class Blame(NamedTuple):
    """What the gradients of a step show about it."""

    culprits: list[Culprit]
    finite_amax: float | None
    """The largest magnitude among the scaled gradients that are finite; None if not measured."""

    @staticmethod
    def nobody() -> Blame:
        """No parameter is to blame."""
        return Blame([], None)


def joined(found: Sequence[Callable[[], Blame]]) -> Blame:
    """What several optimizers together show."""
    blames = [find() for find in found]
    amaxes = [blame.finite_amax or 0.0 for blame in blames]
    return Blame([bad for blame in blames for bad in blame.culprits], max(amaxes))


def blame_now(
    names: Names,
    optimizers: Iterable[Any],
    params: list[Tensor],
    inverse: Tensor | None,
    own_losses: Iterable[Mapping[int, tuple[int, int]]],
    factor: float,
) -> Callable[[], Blame]:
    """A function that finds the parameters to blame from their gradients as they are now.

    Args:
        names: Names of parameters.
        optimizers: Those of the step.
        params: The parameters that have gradients.
        inverse: What the gradients are multiplied by, if that may make them infinite.
        own_losses: What was found in the gradients of losses with their own scales.
        factor: What the largest finite magnitude is multiplied by, to be that of scaled gradients.
    """
    count, rank, own = count_bad(params, inverse), _rank(), list(own_losses)
    known = names.of(optimizers)  # now: the optimizers may be gone by then
    there = set(map(id, params)) if own else set()

    @functools.cache
    def find() -> Blame:
        bad, amax = count()
        for other in own:
            bad |= {key: counts for key, counts in other.items() if key in there}
        culprits = [Culprit(name, rank, *bad[key]) for key, name in known.items() if key in bad]
        return Blame(culprits, amax * factor)

    return find


class BlameLater:
    """Finds the parameters to blame from reads of the gradients of `params`, when it is called.

    The first of these is of the gradients as the backward pass left them. Calling it **waits for
    the device**, unless what was read has been sent to the host and has arrived.
    """

    __slots__ = ("_chosen", "_measured", "_names", "_refs", "_sent")

    def __init__(
        self,
        names: Names,
        optimizers: Sequence[Any],
        params: list[Tensor],
        measured: Sequence[Measurement],
    ) -> None:
        self._names, self._measured = names, measured
        self._refs = [weakref.ref(optimizer) for optimizer in optimizers]
        total = sum([len(group["params"]) for o in optimizers for group in o.param_groups])
        # Ids rather than references: for most outcomes this is never called.
        self._chosen = None if len(params) == total else set(map(id, params))
        self._sent: list[Sent] | None = None

    def __call__(self) -> Blame:
        """What the gradients show."""
        alive = [optimizer for ref in self._refs if (optimizer := ref()) is not None]
        owners = [p for o in alive for g in o.param_groups for p in g["params"]]
        unique = {id(p): p for p in owners if self._chosen is None or id(p) in self._chosen}
        known = self._names.of(alive)
        for found in self._measured:
            culprits = _from_measured(found, known, list(unique.values()))
            if culprits:
                amax = found.finite_amax
                amax = amax() if callable(amax) else amax
                amax = amax.read() if isinstance(amax, Sent) else amax
                return Blame(culprits, None if amax is None else float(amax))
        return Blame.nobody()

    def send(self) -> None:
        """Sends what was read to the host, if that was not done; never in a capture."""
        if self._sent is None:
            self._sent = []
            self._measured = [self._on_host(found) for found in self._measured]

    def arrived(self) -> bool:
        """Whether what `send()` sent has arrived, so that calling it waits for nothing."""
        return self._sent is not None and all(sent.arrived() for sent in self._sent)

    def _on_host(self, found: Measurement) -> Measurement:
        """`found` with its tensors on their way to the host; they may be read when all arrived."""
        amax = found.finite_amax
        amax = amax() if callable(amax) else amax
        return found._replace(
            counts=found.counts and {key: self._send(each) for key, each in found.counts.items()},
            peaks=found.peaks and {key: self._send(each) for key, each in found.peaks.items()},
            finite_amax=self._send(amax) if isinstance(amax, Tensor) else amax,
        )

    def _send(self, value: Tensor) -> Any:
        """What reads as `value` does, and waits until that has arrived."""
        sent = Sent.away(value)
        self._sent.append(sent)  # type: ignore[union-attr]
        return sent


def _from_measured(
    found: Measurement, names: Mapping[int, str], params: Iterable[Tensor]
) -> list[Culprit]:
    """The parameters whose gradients are not finite by the counts or largest magnitudes found."""
    owners: dict[Any, list[int]] = defaultdict(list)
    for param in params:
        owners[param.device, param.dtype.to_real()].append(id(param))
    culprits = []
    groups: Any = found.counts or found.peaks or {}
    for key, group in groups.items():
        whose = owners[key]
        group = group.read() if isinstance(group, Sent) else group
        for place, bad in enumerate(_bad_elements(group)):
            plain = f"gradient {place} of {len(group)} in {key[1]} on {key[0]}"
            name = names[whose[place]] if len(whose) == len(group) else plain
            if bad != (0, 0):
                culprits.append(Culprit(name, _rank(), *bad))
    return culprits


def _bad_elements(group: Tensor) -> list[tuple[int | None, int | None]]:
    """Infinities and NaNs of every tensor, from counts or from largest magnitudes."""
    if group.dim() == 2:
        return [(infs, nans) for infs, nans in group.tolist()]
    # A NaN hides the infinities beside it; both are uncounted.
    peaks = [(math.isfinite(peak), math.isnan(peak)) for peak in group.tolist()]
    return [(0, 0) if sound else (None, None if nan else 0) for sound, nan in peaks]


def _rank() -> int:
    """The rank of this process among all; 0 if it is alone."""
    alive = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if alive else 0
