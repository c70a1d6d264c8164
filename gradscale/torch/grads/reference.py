"""Measuring and rescaling gradients with torch operations, on any device.

One read gives the largest magnitude of every tensor, and that is enough: a NaN or an infinity shows
in it, and whether the unscaled values fit their format follows from the largest alone, because
rounding is monotone. Nothing waits for a device, except for copies to the CPU. On the CPU, reading
a number costs nothing: there the results are plain numbers, and they choose the cheaper path. There
is no float64 of our own, because some devices have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.policy import GradStats
from gradscale.torch.grads.collect import Gradients, Values, dense_grads
from gradscale.torch.grads.scale import Scale, constant, move

# A norm is taken of values whose largest magnitude is between these, or is brought near 1, so that
# squares, and sums of 2**40 of them, stay within float32.
_LARGE, _SMALL, _FURTHEST = 2.0**40, 2.0**-30, 100
# Elements of temporary copies at a time (256 MiB), so that a norm does not double the memory.
_CHUNK = 2**26
# Elements up to which a tensor is small, and of the rows that a large one is read by.
_PIECE = 2**12

_WIDE = (torch.float32, torch.float64)

Peaks = dict[tuple[torch.device, torch.dtype], Tensor]
"""The largest magnitude of every gradient (NaN if it has one), as vectors."""


class Measurement(NamedTuple):
    """What one read of gradients found: numbers on the CPU, 0-dim tensors elsewhere."""

    stats: GradStats
    """`finite`, `fits`; `amax` and `norm` if they were asked for."""
    clip: Any = 1.0
    """What clips the unscaled gradients to the norm that was asked for, at most 1."""
    peaks: Peaks | None = None
    """The largest magnitude of every tensor, on devices where nobody looks at once."""
    counts: Peaks | None = None
    """The infinities and NaNs of every tensor, as rows, where a kernel has counted them."""
    finite_amax: Any = None
    """The largest finite scaled magnitude, where a kernel has found it."""


def clip_factor(norm: Any, max_norm: float) -> Any:
    """What clips gradients of this 2-norm to `max_norm`: a number for a number, at most 1."""
    if isinstance(norm, Tensor):
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return min(max_norm / (norm + 1e-6), 1.0)


@torch.no_grad()
def measure(
    grads: Gradients,
    scale: Scale,
    *,
    unscale: bool = False,
    amax: bool = False,
    max_norm: float | None = None,
) -> Measurement:
    """What the gradients were like before they are unscaled, if they are to be.

    Args:
        grads: The gradients, which have the scale `scale`.
        scale: Their scale; `Scale(constant(1.0), 1.0)` if they are unscaled.
        unscale: Whether to divide them by it, in place.
        amax: Whether the largest magnitude must be measured, also where that takes longer.
        max_norm: Measures the 2-norm, and what clips it to this; None does not.
    """
    values = grads.values
    if scale.number is not None and scale.number >= 1.0 and grads.on_host():
        quick = None if amax or max_norm is not None else _check(values, scale, unscale)
        if quick is None and max_norm is not None:
            quick = _norm_alone(values, scale, amax, max_norm)
        if quick is not None:
            if unscale and max_norm is not None:
                multiply(values, scale.inverse)
            return quick
    found = _survey(values, scale, max_norm)
    if unscale:
        multiply(values, scale.inverse)
    return found if scale.number is None else _as_numbers(found)


def _check(values: Values, scale: Scale, unscale: bool) -> Measurement | None:
    """Whether `values` on the CPU are finite, unscaled on the way; None if torch's kernel cannot.

    Unscaling by at most 1 always fits.
    """
    if not all(dtype in _WIDE for _, dtype in values):
        return None
    found = torch.zeros((), dtype=torch.float32, device="cpu")
    inverse = scale.reciprocal if unscale else constant(1.0)
    for group in values.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)  # type: ignore[arg-type]
    return Measurement(GradStats(finite=found.item() == 0.0))


def _norm_alone(values: Values, scale: Scale, amax: bool, max_norm: float) -> Measurement | None:
    """The norm of `values` on the CPU, if it shows by itself that all of them are finite.

    It does within a certain range: then one read is enough. None outside of it, or for a NaN.
    """
    roots, largest = [], 0.0
    for (_, dtype), group in values.items():
        for part in _parts(group):
            wide = part if dtype in _WIDE else part.float()
            roots.append(_root_of(wide))
            if amax and wide.numel():
                low, high = torch.aminmax(wide)
                largest = max(largest, -low.item(), high.item())
    root = math.hypot(*roots)
    if not _SMALL < root < _LARGE:
        return None
    norm = root / scale.number  # type: ignore[operator]
    stats = GradStats(finite=True, amax=largest if amax else None, norm=norm)
    return Measurement(stats, clip_factor(norm, max_norm))


def _survey(values: Values, scale: Scale, max_norm: float | None) -> Measurement:
    """What `values` are like, as tensors on the device of the scale."""
    inverse = scale.inverse
    home = inverse.device
    yes = torch.ones_like(inverse, dtype=torch.bool)
    double = any(dtype is torch.float64 for _, dtype in values)
    largest = torch.zeros_like(inverse, dtype=torch.float64 if double else torch.float32)
    finite, fits, peaks = yes, yes, Peaks()
    for (device, dtype), group in values.items():
        if device.type == "cpu":
            amax = _amax(group)
        else:
            peaks[device, dtype] = _peaks(group)
            amax = peaks[device, dtype].amax()
        finite = finite & move(torch.isfinite(amax), home)
        unscaled = amax.to(torch.promote_types(dtype, torch.float32)) * move(inverse, device)
        fits = fits & move(torch.isfinite(unscaled.to(dtype)), home)
        largest = torch.maximum(largest, move(amax.to(largest.dtype), home))
    # Where something is infinite already, nothing fails to fit: the scale that made it was too
    # high, not too low.
    stats = GradStats(finite=finite, fits=fits | ~finite, amax=largest.float())
    if max_norm is None:
        return Measurement(stats, peaks=peaks)
    norm, clip = _norm(values, largest, inverse, max_norm)
    return Measurement(stats._replace(norm=norm), clip, peaks)


def _norm(values: Values, amax: Tensor, inverse: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The 2-norm of `values` times `inverse`, and what clips it to `max_norm`."""
    # An even power of two, whose root is exact; by its bits, because no other way surely is.
    if amax.dtype is torch.float64:
        power = -torch.frexp(amax).exponent.clamp(-1000, 1000) // 2 * 2
        near = ((power.to(torch.int64) + 1023) << 52).view(torch.float64)
    else:
        power = torch.frexp(amax).exponent.clamp(-_FURTHEST, _FURTHEST) // 2 * -2
        near = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    shift = torch.where((amax > _LARGE) | (amax < _SMALL), near, torch.ones_like(near))
    root = _root(values, shift)
    # In two steps, because the scaled norm may overflow where the unscaled one does not.
    half = shift.sqrt()
    norm = root / half * inverse / half
    beyond = max_norm * (shift / root) / inverse
    clip = torch.where(torch.isfinite(norm), clip_factor(norm, max_norm), beyond.clamp(max=1.0))
    return norm, clip  # in float64 where a gradient is: it may be 0 in float32


def _as_numbers(found: Measurement) -> Measurement:
    """`found` with numbers in the place of tensors on the CPU."""
    stats = GradStats(*(v.item() if isinstance(v, Tensor) else v for v in found.stats))
    clip = found.clip.item() if isinstance(found.clip, Tensor) else found.clip
    return found._replace(stats=stats, clip=clip)


@torch.no_grad()
def multiply(values: Values, factor: Tensor) -> None:
    """Multiplies `values` by the float32 `factor` in place, each product rounded once."""
    for (device, dtype), group in values.items():
        here = move(factor, device)
        if dtype in _WIDE:
            torch._foreach_mul_(group, here)
            continue
        # torch would first round the factor to the narrow format, where 2**-30 is 0.
        wide = torch._foreach_mul([value.float() for value in group], here)
        torch._foreach_copy_(group, wide)


@torch.no_grad()
def clamp(values: Values, limit: float) -> None:
    """Holds every one of `values` within `limit` of 0, in place; a NaN stays one."""
    for group in values.values():
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


@torch.no_grad()
def zero(values: Values, where: Any) -> None:
    """Sets `values` to 0 if the bool `where` holds. By selection: infinity times 0 is NaN."""
    if not isinstance(where, Tensor):
        for group in values.values() if where else ():
            torch._foreach_zero_(group)
        return
    for (device, _), group in values.items():
        here = move(where, device)
        for value in group:
            value.masked_fill_(here, 0)


@torch.no_grad()
def underflow(values: Values, smallest_normal: float, like: Tensor) -> Tensor:
    """The share of the nonzero `values` below `smallest_normal`, as float32 where `like` is."""
    below, nonzero = (torch.zeros_like(like, dtype=torch.int64) for _ in range(2))
    for group in values.values():
        for value in group:
            small = (value.abs() < smallest_normal) & (value != 0)
            below += move(small.count_nonzero(), like.device)
            nonzero += move(value.count_nonzero(), like.device)
    return below.float() / nonzero.clamp(min=1).float()


Bad = tuple[dict[int, tuple[int, int]], float]
"""Infinities and NaNs by the id of a parameter, and the largest finite magnitude."""


@torch.no_grad()
def count_bad(params: list[Tensor], inverse: Tensor | None = None) -> Callable[[], Bad]:
    """What counts infinities and NaNs of the gradients as they are now, when it is called.

    Gradients without any are left out. With `inverse` also what becomes infinite where it is
    stored, when multiplied by it, is counted. Copies small gradients, and counts in others at once:
    that waits for the device.
    """
    small: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    found = []
    for param, grad in zip(params, dense_grads(params), strict=True):
        value = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
        if value.numel() > _PIECE:
            found.append(_count([id(param)], [], value, inverse))
        elif value.numel():
            small.setdefault((value.device, value.dtype), []).append((id(param), value))
    later = []
    for pairs in small.values():
        owners, values = [owner for owner, _ in pairs], [value for _, value in pairs]
        copies = torch._C._nn.flatten_dense_tensors([*values, values[0].new_empty(0)])
        later.append(partial(_count, owners, [v.numel() for v in values], copies, inverse))

    def count() -> Bad:
        both = [*found, *(each() for each in later)]
        bad = {owner: counts for rows, _ in both for owner, counts in rows.items()}
        return bad, max((peak for _, peak in both), default=0.0)

    return count


@torch.no_grad()
def _count(owners: list[int], sizes: Any, value: Tensor, inverse: Tensor | None) -> Bad:
    """As `count_bad`, of gradients of these `sizes`, one after the other in `value`."""
    largest = float(value.nan_to_num(0.0, 0.0, 0.0).abs().max())
    if inverse is not None:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        value = (wide * move(inverse, value.device)).to(value.dtype)
    parts = [value] if len(owners) == 1 else value.split(sizes)
    counts = [(int(part.isinf().sum()), int(part.isnan().sum())) for part in parts]
    return {owner: each for owner, each in zip(owners, counts, strict=True) if any(each)}, largest


def _root(values: Values, shift: Tensor) -> Tensor:
    """The 2-norm of `values` times `shift`, in the dtype of `shift`."""
    parts = [torch.zeros_like(shift)]
    for (device, dtype), group in values.items():
        here = move(shift, device)
        for chunk in _chunks(group):
            copies = chunk if dtype in _WIDE else [value.float() for value in chunk]
            copies = list(torch._foreach_mul(copies, here.to(copies[0].dtype)))
            if device.type == "cpu":
                norms = torch.cat([norm for part in _parts(copies) for norm in _norms(part)])
            else:
                norms = torch.stack(torch._foreach_norm(copies, 2))
            root = torch.linalg.vector_norm(norms.to(shift.dtype))
            parts.append(move(root, shift.device))
    return torch.linalg.vector_norm(torch.stack(parts))


def _root_of(part: Tensor) -> float:
    """The 2-norm of a tensor on the CPU."""
    norms = _norms(part)
    whole = norms[0] if len(norms) == 1 else torch.cat(norms)
    return float(whole if whole.numel() == 1 else torch.linalg.vector_norm(whole))


def _norms(value: Tensor) -> list[Tensor]:
    """2-norms of parts of `value` that cover it, as vectors."""
    # On the CPU torch takes the norm of a tensor with one thread and one accumulator per lane: for
    # 2**24 uniform float32 it is off by 9,000 roundings. Norms of rows are taken by all threads
    # (7.3 ms against 10.5 ms for 50 M float32, 2 cores), and their norm is off by less than one.
    if value.numel() <= _PIECE or not value.is_contiguous():
        return [torch.linalg.vector_norm(value).reshape(1)]
    flat = value.view(-1)
    end = flat.numel() - flat.numel() % _PIECE
    rows = [torch.linalg.vector_norm(flat[:end].view(-1, _PIECE), dim=-1)]
    return rows if end == flat.numel() else [*rows, torch.linalg.vector_norm(flat[end:]).reshape(1)]


def _parts(group: list[Tensor]) -> list[Tensor]:
    """Tensors on the CPU with the numbers of `group`: small ones together, as one.

    An operation on 1,000 tensors of 4 elements takes 13 times as long as copying them into one.
    Others are not copied.
    """
    small = [value for value in group if value.numel() <= _PIECE]
    if len(small) < 2:
        return group
    large = [value for value in group if value.numel() > _PIECE]
    return [*large, torch._C._nn.flatten_dense_tensors(small)]


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


def _peaks(group: list[Tensor]) -> Tensor:
    """The largest magnitude of every tensor of `group`, NaN if it has one, in its own dtype."""
    if all(value.numel() for value in group):
        return torch.stack(torch._foreach_norm(group, float("inf")))
    none = group[0].new_zeros(())
    return torch.stack([value.norm(float("inf")) if value.numel() else none for value in group])


def _amax(group: list[Tensor]) -> Tensor:
    """The largest magnitude in `group` on the CPU, NaN if there is one, in its own dtype."""
    # 16 times as fast as foreach's infinity norm on the CPU (4.6 ms against 75 ms for 52 M float32,
    # 2 cores).
    ends = [end for part in _parts(group) if part.numel() for end in torch.aminmax(part)]
    return torch.stack(ends).abs().amax() if ends else group[0].new_zeros(())
