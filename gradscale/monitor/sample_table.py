"""Samples as a table for people: one line for every module."""

from __future__ import annotations

from collections.abc import Sequence

from gradscale.monitor.samples import ACTIVATION, WEIGHT_GRAD, Sample, TensorSample

_HEAD = (
    "module",
    "outputs",
    "room",
    "gradients",
    "headroom",
    "subnormal",
    "zero",
    "flushed",
    "not finite",
)


def table(samples: Sequence[Sample]) -> str:
    """The last sample by module, with the zeros that the last replay has shown to be flushed.

    "outputs" and "gradients" are the binades of the elements; "room" and "headroom" the binades
    from there to the largest number of the format. Shares are those of the gradients, of outputs
    and weights together.
    """
    if not samples:
        return "No iteration has been sampled yet."
    last = samples[-1]
    replays = [s for s in samples if any(t.flushed is not None for t in s.tensors)]
    names = list(dict.fromkeys(_module(tensor) for tensor in last.tensors))
    if not names:
        return f"Step {last.step}: no module of the model was called outside of a compiled graph."
    lines = [_HEAD, *(_line(name, last, replays[-1:] or [last]) for name in names)]
    scale = last.fact("scale").get("", 1.0)
    return f"step {last.step}, {last.format}, scale {scale:g}\n\n{columns(lines)}"


def _module(tensor: TensorSample) -> str:
    """The module of a tensor."""
    weight = tensor.kind == WEIGHT_GRAD
    return tensor.name.rpartition(".")[0] if weight else tensor.name


def _line(name: str, last: Sample, replays: Sequence[Sample]) -> tuple[str, ...]:
    """The cells of one module."""
    mine = [tensor for tensor in last.tensors if _module(tensor) == name]
    outputs = [tensor for tensor in mine if tensor.kind == ACTIVATION]
    grads = [tensor for tensor in mine if tensor.kind != ACTIVATION]
    nonzero = sum(tensor.nonzero() for tensor in grads)
    below = sum(t.below(last.format_of(t).smallest_normal) for t in grads)
    numel, zeros = sum(t.numel for t in grads), sum(t.zeros for t in grads)
    again = [t for t in replays[0].tensors if _module(t) == name and t.kind != ACTIVATION]
    known = [t for t in again if t.flushed is not None]
    lost = sum(t.flushed or 0 for t in known)
    there = lost + sum(t.nonzero() for t in known)
    bad = sum(t.infs + t.nans for t in mine)
    return (
        name or "(model)",
        _binades(outputs),
        _room(outputs, last),
        _binades(grads),
        _room(grads, last),
        per_cent(below / nonzero) if nonzero else "-",
        per_cent(zeros / numel) if numel else "-",
        per_cent(lost / there) if there else "-",
        str(bad) if bad else "",
    )


def _binades(tensors: Sequence[TensorSample]) -> str:
    """From the smallest to the largest element."""
    some = [tensor for tensor in tensors if tensor.counts]
    if not some:
        return "-"
    low, high = min(t.low for t in some), max(t.low + len(t.counts) - 1 for t in some)
    return f"2**{low} .. 2**{high}"


def _room(tensors: Sequence[TensorSample], sample: Sample) -> str:
    """Binades to the largest number."""
    rooms = [room for t in tensors if (room := t.headroom(sample.format_of(t))) is not None]
    return str(min(rooms)) if rooms else "-"


def per_cent(share: float) -> str:
    """A share, to a tenth of a percent.

    >>> per_cent(0.5), per_cent(0.0001), per_cent(0)
    ('50.0 %', '<0.1 %', '0 %')
    """
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if share else "0 %"


def columns(lines: Sequence[tuple[str, ...]]) -> str:
    """Lines of cells as a table: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
