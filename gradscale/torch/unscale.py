"""Reading and unscaling gradients: the reference path, in plain torch operations on any device.

One read gives the largest magnitude of every tensor, and that is enough: a NaN or an infinity shows
in it, and whether the unscaled values fit their format follows from the largest alone, because
rounding is monotone. Nothing here waits for a device, except for copies to the CPU; there, reading
a number costs nothing, and the flags pick the cheaper path. There is no float64 of our own, because
some devices have none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch import kernels
from gradscale.torch.shards import all_plain, local_grad

# A norm is taken of values whose largest magnitude is between these, or is brought near 1, so that
# squares, and sums of 2**40 of them, stay within float32.
_LARGE, _SMALL, _FURTHEST = 2.0**40, 2.0**-30, 100
# Elements of temporary copies at a time (256 MiB), so that a norm does not double the memory.
_CHUNK = 2**26
# Elements up to which a tensor is small, and of the rows that a large one is read by.
_PIECE = 2**12

Values = dict[tuple[torch.device, torch.dtype], list[Tensor]]
"""The numbers of gradients, by device and dtype: what a foreach operation takes at once."""


Gradients = Values | kernels.Place
"""Gradients, by where they lie or as numbers."""

Peaks = dict[tuple[torch.device, torch.dtype], Tensor]
"""The largest magnitude of every gradient (NaN if it has one), as vectors."""


class Reading(NamedTuple):
    """What one read of an optimizer's gradients told, as device values."""

    found_inf: dict[torch.device, Tensor]
    """float32, 1 where a scaled element on that device is not finite, else 0."""
    fits: Tensor
    """bool, on the device of the scale: every unscaled element is finite where it is stored."""
    amax: Tensor | None = None
    """float32, on the device of the scale: the largest magnitude; None if nobody looked."""
    peaks: Peaks | None = None
    """The largest magnitude of every tensor, where that is known."""
    counts: Peaks | None = None
    """The infinities and NaNs of every tensor, as rows, where somebody counted."""
    finite_amax: Tensor | None = None
    """float32: the largest finite magnitude, where somebody looked."""


class Norm(NamedTuple):
    """The 2-norm of gradients, which means nothing if they are not finite."""

    total: Tensor
    """float32, on the device of the scale: that of the unscaled values."""
    factor: Tensor
    """float32: what unscales and clips them."""


def params_with_grad(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of `optimizer` that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@torch.no_grad()
def grouped(tensors: Iterable[Tensor]) -> Values:
    """The numbers of dense `tensors`, as real tensors that share their memory."""
    values: Values = defaultdict(list)
    for tensor in tensors:
        value = tensor
        if tensor.is_complex():
            # The factors are real, so the conjugate in the same memory will do.
            value = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        values[value.device, value.dtype].append(value)
    return values


def values_of(params: Iterable[Tensor]) -> Values:
    """The numbers of the gradients of `params`, as real dense tensors that share their memory.

    A sparse gradient is coalesced first, because duplicates add up and the sum may overflow; that
    replaces `.grad`. Of a DTensor it is the part that this rank has.
    """
    dense = []
    for param in params:
        grad = local_grad(param)
        if grad is not None and grad.layout is torch.sparse_coo:
            param.grad = grad.coalesce()
            grad = param.grad._values()
        elif grad is not None and grad.layout is not torch.strided:
            grad = grad.values()
        if grad is not None:
            dense.append(grad)
    return grouped(dense)


def grads_of(params: list[Tensor]) -> list[Any]:
    """What this rank has of the gradient of each of `params`."""
    if all_plain(params):
        return [param.grad for param in params]
    return [local_grad(param) for param in params]


def gradients_of(params: list[Tensor]) -> Gradients:
    """Where the gradients of `params` lie, if kernels can take them, and else their numbers."""
    if params and kernels.take(params[0].device):
        place = kernels.locate(params, grads_of(params))
        if place is not None:
            return place
    return values_of(params)


def read(values: Gradients, inv_scale: Tensor) -> Reading:
    """Whether `values` are finite, and would be when multiplied by `inv_scale` where they are."""
    values = kernels.placed(values)
    if isinstance(values, kernels.Place):
        return _read_by_kernel(values, inv_scale)[0]
    return _survey(values, inv_scale)[0]


def _read_by_kernel(
    place: kernels.Place, inv_scale: Tensor, max_norm: float | None = None, unscale: bool = False
) -> tuple[Reading, Norm]:
    """One pass for everything, with `unscale` also for that.

    Without a `max_norm` the norm is of no use.
    """
    device = place.keys[0][0]
    here = move(inv_scale, device)
    limit = math.inf if max_norm is None else max_norm
    summary, counts = kernels.reading().read(place.groups, here, limit, unscale=unscale)
    rows = place.rows(counts)
    found, amax, peak = {device: summary.found_inf}, summary.amax, summary.finite_amax
    reading = Reading(found, summary.fits > 0, amax, None, rows, peak)
    norm = Norm(summary.norm, here if max_norm is None else here * summary.clip)
    if inv_scale.device == device:
        return reading, norm
    back = inv_scale.device
    reading = reading._replace(fits=move(reading.fits, back), amax=move(summary.amax, back))
    return reading, Norm(*(move(value, back) for value in norm))


@torch.no_grad()
def _survey(values: Values, inv_scale: Tensor) -> tuple[Reading, Tensor]:
    """The reading of `values`, and their largest magnitude (float32, where the scale is)."""
    found_inf = _clean(values)
    peaks: Peaks = {}
    fits = torch.ones_like(inv_scale, dtype=torch.bool)
    largest = torch.zeros_like(inv_scale)
    for (device, dtype), group in values.items():
        if device.type != "cpu":
            peaks[device, dtype] = _peaks(group)
        amax = _amax(group) if device.type == "cpu" else peaks[device, dtype].amax()
        infinite = ~torch.isfinite(amax)
        found_inf[device] = torch.maximum(found_inf[device], infinite.float())
        unscaled = _widen(amax) * move(inv_scale, device)
        fits = fits & move(torch.isfinite(unscaled.to(dtype)), fits.device)
        largest = torch.maximum(largest, move(amax.float(), largest.device))
    # Where something is infinite already, nothing fails to fit: the scale that made it was too
    # high, not too low.
    fits = fits | ~torch.isfinite(largest)
    return Reading(found_inf, fits, largest, peaks), largest


@torch.no_grad()
def unscale(values: Gradients, inv_scale: Tensor, amax: bool = False) -> Reading:
    """Multiplies `values` by `inv_scale` in place; what `read` would have said of them before.

    The largest magnitude is there if `amax` asks for it, or if it costs nothing.
    """
    values = kernels.placed(values)
    if isinstance(values, kernels.Place):
        return _read_by_kernel(values, inv_scale, unscale=True)[0]
    if amax or not readable(inv_scale) or float(inv_scale) > 1:
        reading = read(values, inv_scale)
        multiply(values, inv_scale)
        return reading
    # Unscaling by at most 1 always fits, and torch's own kernel checks on the way: one pass instead
    # of two.
    found_inf = _clean(values)
    for (device, dtype), group in values.items():
        if device.type == "cpu" and dtype in (torch.float32, torch.float64):
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf[device], inv_scale)
        else:
            infinite = ~torch.isfinite(_amax(group))  # on the CPU: else `read` above
            found_inf[device] = torch.maximum(found_inf[device], infinite.float())
            multiply({(device, dtype): group}, inv_scale)
    return Reading(found_inf, torch.ones_like(inv_scale, dtype=torch.bool))


@torch.no_grad()
def multiply(values: Gradients, factor: Tensor) -> None:
    """Multiplies `values` by the float32 `factor` in place, each product rounded once."""
    values = kernels.placed(values)
    if isinstance(values, kernels.Place):
        for dtype, table in values.groups:
            kernels.writing().multiply(dtype, table, move(factor, table.device))
        return
    for (device, dtype), group in values.items():
        here = move(factor, device)
        if dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(group, here)
            continue
        # torch would first round the factor to the narrow format, where 2**-30 is 0.
        for value in group:
            value.copy_(value.float().mul_(here))


@torch.no_grad()
def clamp(values: Values, limit: float) -> None:
    """Holds every one of `values` within `limit` of 0, in place; a NaN stays one."""
    for group in values.values():
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


@torch.no_grad()
def clear(values: Values, where: Tensor) -> None:
    """Sets `values` to 0 if the bool `where` holds. By selection: infinity times 0 is NaN."""
    for (device, _), group in values.items():
        here = move(where, device)
        for value in group:
            value.masked_fill_(here, 0)


@torch.no_grad()
def read_norm(
    values: Gradients, inv_scale: Tensor, max_norm: float = math.inf, amax: bool = False
) -> tuple[Reading, Norm]:
    """What `read` says, and the norm; the largest magnitude as in `unscale`."""
    one = torch.ones_like(inv_scale)
    if (
        not amax
        and not isinstance(values, kernels.Place)
        and all(device.type == "cpu" for device, _ in values)
        and readable(inv_scale)
    ):
        root = _root(values, one)
        # A norm in this range says by itself that nothing is infinite, and what is unscaled by at
        # most 1 fits: one read instead of two. False for NaN, too.
        if float(inv_scale) <= 1 and _SMALL < float(root) < _LARGE:
            reading = Reading(_clean(values), one > 0)
            return reading, _norm(root, one, inv_scale, max_norm)
    return read_all(values, inv_scale, max_norm)


@torch.no_grad()
def read_all(
    values: Gradients, inv_scale: Tensor, max_norm: float = math.inf
) -> tuple[Reading, Norm]:
    """What `read` says, and the norm."""
    values = kernels.placed(values)
    if isinstance(values, kernels.Place):
        return _read_by_kernel(values, inv_scale, max_norm)
    reading, amax = _survey(values, inv_scale)
    one = torch.ones_like(inv_scale)
    # An even power of two, whose root is exact; by its bits, because no other way surely is.
    power = torch.frexp(amax).exponent.clamp(-_FURTHEST, _FURTHEST) // 2 * -2
    odd = (amax > _LARGE) | (amax < _SMALL)
    shift = torch.where(odd, ((power.to(torch.int32) + 127) << 23).view(torch.float32), one)
    return reading, _norm(_root(values, shift), shift, inv_scale, max_norm)


def norm_of(total: Tensor, inv_scale: Tensor, max_norm: float) -> Norm:
    """What clips gradients that have this norm, unscaled, all ranks together."""
    if math.isinf(max_norm):
        return Norm(total, inv_scale)
    return Norm(total, inv_scale * torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _norm(root: Tensor, shift: Tensor, inv_scale: Tensor, max_norm: float) -> Norm:
    """The norm of values that have a 2-norm of `root / shift` as long as they are scaled."""
    # In two steps, because the scaled norm may overflow where the unscaled one does not.
    half = shift.sqrt()
    total = root / half * inv_scale / half
    factor = torch.where(
        torch.isfinite(total),
        inv_scale * torch.clamp(max_norm / (total + 1e-6), max=1.0),
        torch.minimum(inv_scale, max_norm * (shift / root)),
    )
    return Norm(total, factor)


@torch.no_grad()
def underflow(values: Gradients, smallest_normal: float, like: Tensor) -> Tensor:
    """The share of the nonzero `values` below `smallest_normal`, as float32 where `like` is."""
    values = kernels.placed(values)
    if isinstance(values, kernels.Place):
        one = torch.ones((), device=values.keys[0][0])
        summary, _ = kernels.reading().read(values.groups, one, smallest_normal=smallest_normal)
        return move(summary.underflow, like.device)
    below, nonzero = (torch.zeros_like(like, dtype=torch.int64) for _ in range(2))
    for group in values.values():
        for value in group:
            small = (value.abs() < smallest_normal) & (value != 0)
            below += move(small.count_nonzero(), like.device)
            nonzero += move(value.count_nonzero(), like.device)
    return below.float() / nonzero.clamp(min=1).float()


@torch.no_grad()
def share_above(values: Values, edge: float, like: Tensor) -> Tensor:
    """The share of `values` above `edge`, as float32 where `like` is."""
    above, total = torch.zeros_like(like, dtype=torch.int64), 0
    for group in values.values():
        for value in group:
            above += move((value.abs() > edge).count_nonzero(), like.device)
            total += value.numel()
    return above.float() / max(total, 1)


@torch.no_grad()
def count_bad(
    params: Iterable[Tensor], inv_scale: Tensor | None = None
) -> dict[int, tuple[int, int]]:
    """Infinities and NaNs of every gradient that has some, by the id of its parameter.

    With `inv_scale` also what becomes infinite where it is stored, when multiplied by it. Waits
    for the device.
    """
    bad = {}
    for param in params:
        for (_, dtype), group in values_of([param]).items():
            value = group[0]
            if inv_scale is not None:
                value = (_widen(value) * move(inv_scale, value.device)).to(dtype)
            if not torch.isfinite(value).all():
                bad[id(param)] = (int(torch.isinf(value).sum()), int(torch.isnan(value).sum()))
    return bad


@torch.no_grad()
def finite_amax(params: Iterable[Tensor]) -> float:
    """The largest finite magnitude among the gradients of `params`. Waits for the device."""
    largest = 0.0
    for group in values_of(params).values():
        for value in group:
            sound = value[torch.isfinite(value)]
            largest = max(largest, float(sound.abs().max()) if sound.numel() else 0.0)
    return largest


def _root(values: Values, shift: Tensor) -> Tensor:
    """The 2-norm of `values` times `shift`, in float64 if some of them are."""
    double = any(dtype is torch.float64 for _, dtype in values)
    parts = [shift.new_zeros((), dtype=torch.float64 if double else torch.float32)]
    for (device, dtype), group in values.items():
        here = move(shift, device)
        wide = dtype in (torch.float32, torch.float64)
        as_is = wide and readable(here) and float(here) == 1
        for chunk in [group] if as_is else _chunks(group):
            copies = chunk if wide else [value.float() for value in chunk]
            if not as_is:
                copies = list(torch._foreach_mul(copies, here))
            root = torch.linalg.vector_norm(torch.cat(_norms(copies)))
            parts.append(move(root.to(parts[0].dtype), shift.device))
    return torch.linalg.vector_norm(torch.stack(parts))


def _norms(group: list[Tensor]) -> list[Tensor]:
    """2-norms of parts of `group` that cover it, as vectors."""
    # On the CPU torch takes the norm of a tensor with one thread and one accumulator per lane: for
    # 2**24 uniform float32 it is off by 9,000 roundings. Norms of rows are taken by all threads
    # (7.3 ms against 10.5 ms for 50 M float32, 2 cores), and their norm is off by less than one.
    rows: list[Tensor] = []
    whole: list[Tensor] = []
    for value in group:
        if value.device.type != "cpu" or value.numel() <= _PIECE or not value.is_contiguous():
            whole.append(value)
            continue
        flat = value.view(-1)
        end = flat.numel() - flat.numel() % _PIECE
        rows.append(torch.linalg.vector_norm(flat[:end].view(-1, _PIECE), dim=-1))
        if end < flat.numel():
            whole.append(flat[end:])
    return [*rows, torch.stack(torch._foreach_norm(whole, 2))] if whole else rows


def _chunks(group: list[Tensor]) -> Iterable[list[Tensor]]:
    """The tensors of `group`, in lists of about `_CHUNK` elements."""
    chunk: list[Tensor] = []
    size = 0
    for value in group:
        if chunk and size + value.numel() > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(value)
        size += value.numel()
    yield chunk


def move(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`; waits for a copy to the CPU, which would be read too early."""
    return value.to(device, non_blocking=device.type != "cpu")


def times(value: Tensor, factor: Tensor) -> Tensor:
    """`value` times the float32 `factor`, in float32 where `value` is float16."""
    wide = value.float() if value.dtype is torch.float16 else value
    return wide * move(factor, value.device)


def _peaks(group: list[Tensor]) -> Tensor:
    """The largest magnitude of every tensor of `group`, NaN if it has one, in its own dtype."""
    if all(value.numel() for value in group):
        return torch.stack(torch._foreach_norm(group, float("inf")))
    none = group[0].new_zeros(())
    return torch.stack([value.norm(float("inf")) if value.numel() else none for value in group])


def _amax(group: list[Tensor]) -> Tensor:
    """The largest magnitude in `group` on the CPU, NaN if there is one, in its own dtype."""
    # 16 times as fast as foreach's infinity norm on the CPU (4.6 ms against 75 ms for 52 M float32,
    # 2 cores). Small tensors go in one piece: there a call costs more than the read.
    pieces = [value for value in group if value.numel() > _PIECE]
    small = [value.reshape(-1) for value in group if value.numel() <= _PIECE]
    pieces.append(torch.cat([group[0].new_zeros(1), *small]))
    return torch.stack([end for piece in pieces for end in torch.aminmax(piece)]).abs().amax()


def _clean(values: Values) -> dict[torch.device, Tensor]:
    """Nothing found yet, on every device of `values`."""
    devices = dict.fromkeys(device for device, _ in values)
    return {device: torch.zeros((), dtype=torch.float32, device=device) for device in devices}


def _widen(value: Tensor) -> Tensor:
    """`value` in float32, or as it is where it is wider."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def readable(value: Tensor) -> bool:
    """Whether reading `value` waits for nothing."""
    return value.device.type == "cpu"
