"""Examining a model before training: which scales and which format suit it, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32, Format, format_named
from gradscale.monitor.sample_table import columns, per_cent
from gradscale.monitor.samples import ACTIVATION, WEIGHT_GRAD, Sample, TensorSample
from gradscale.torch.inspect.compiled import Eager
from gradscale.torch.inspect.probe import Subject
from gradscale.torch.inspect.replay import Pass, error, flushed, run
from gradscale.torch.mixed_precision.modes import Mode, mode_named
from gradscale.torch.step.contract import as_optimizers

MARGIN = 2
"""Binades that the recommended scale leaves, as `Headroom` does."""
FLUSHED = 0.01
"""The share of the gradients that may be lost at a scale that works."""
MISSED = 0.25
"""A relative error of a gradient at which its module is better kept in float32: rounding alone
gives 0.01 or less with float16, and about 0.1 with bfloat16 in deep models."""
_TRIES = 6


class Row(NamedTuple):
    """The results for one module."""

    name: str
    room: int | None
    """Binades between its largest output and the largest number of the format."""
    headroom: int | None
    """Binades between its largest gradient, of outputs or weights, and the largest number of the
    format, at the recommended scale."""
    underflow: float
    """Share of its gradients that are zero in the format and nonzero in float32."""
    error: float | None
    """Relative error of the gradients of its own weights; None if it has none."""


class Examination(NamedTuple):
    """The result of `examine()`; `print()` shows it as a table."""

    rows: list[Row]
    """One row per module."""
    mode: str
    """The recommended mode."""
    scale: float
    """The recommended scale."""
    scales: tuple[float, float] | None
    """The smallest and the largest scale that work: at most 1 % of the gradients are lost, and none
    overflows. None if there is no such scale."""
    keep_float32: list[str]
    """Modules that should stay in float32: `MixedPrecision(..., keep_float32=...)`."""
    error: float
    """Relative error of all weight gradients together; infinity if they are not finite."""
    loss: tuple[float, float]
    """The loss in float32, and in the format."""

    def __str__(self) -> str:
        lines = [("module", "room", "headroom", "underflow", "error")]
        for row in self.rows:
            shown = (_number(row.room), _number(row.headroom), per_cent(row.underflow))
            lines.append((row.name or "(model)", *shown, _error(row.error)))
        works = "no scale works for all gradients: see gradscale.torch.blocks"
        if self.scales is not None:
            works = f"scales from {_power(self.scales[0])} to {_power(self.scales[1])} work"
        keep = f"keep in float32: {', '.join(self.keep_float32)}\n" if self.keep_float32 else ""
        return (
            f"{columns(lines)}\n\nmode {self.mode}, scale {_power(self.scale)}; {works}\n{keep}"
            f"loss {self.loss[0]:.6g} in float32, {self.loss[1]:.6g} in the format; relative error "
            f"of the gradients {_error(self.error)}"
        )


def examine(
    model: nn.Module,
    closure: Callable[[], Tensor],
    optimizer: Any = None,
    mode: str = "fp16",
) -> Examination:
    """Returns what a mode would do to `model`: headroom, underflow and errors by module.

        print(examine(model, lambda: loss_fn(model(batch), target)))

    Runs `closure`, which computes the loss, and its backward pass in float32 and in the format of
    `mode`. Weights, gradients, buffers and random state do not change. **Waits for the device.**

    Args:
        model: The model, before it is cast.
        closure: Computes the loss, without autocast, and returns it.
        optimizer: Limits the examination to its parameters. Default: all that require gradients.
        mode: A mode of `MixedPrecision`; only its format is used.

    Raises:
        SettingError: An argument is wrong, or the closure is not finite in float32.
    """
    wanted, subject, eager = mode_named(mode), Subject(model), Eager(model)
    if optimizer is not None:
        groups = [g for one in as_optimizers(optimizer, "examine()") for g in one.param_groups]
        trained = {id(param) for group in groups for param in group["params"]}
        subject.params = {n: p for n, p in subject.params.items() if id(p) in trained}
    wide = run(subject, closure, "float32", 1.0, eager)
    _check_finite(wide)
    format = format_named(wanted.passes)
    scales = working_scales(wide.sample, format)
    scale = _first_scale(wide.sample, format, wanted)
    for _ in range(_TRIES):
        narrow = run(subject, closure, wanted.passes, scale, eager)
        bad = _first_bad(narrow.sample)
        if bad != "backward" or scale <= 1.0:
            break
        scale = max(scale / 16, 1.0)
    if scales is not None and bad == "":
        scales = (min(scales[0], scale), max(scales[1], scale))
    found = [_row(name, subject, narrow, wide, format, scale) for name in subject.modules]
    rows = [row for row in found if row is not None]
    keep = _to_keep(rows, narrow.sample, format)
    total = error(narrow, wide, [(WEIGHT_GRAD, name) for name in subject.params]) or 0.0
    leaves = [row for row in rows if row.room is not None]
    # With a quarter of the modules in float32 little is left of the format.
    advised = wanted.name
    if format.exponent_bits < 8 and (bad == "backward" or len(keep) * 4 > len(leaves)):
        advised = wanted.name.replace("fp16", "bf16").replace("pure", "master")
    return Examination(rows, advised, scale, scales, keep, total, (wide.loss, narrow.loss))


def _check_finite(wide: Pass) -> None:
    """Raises SettingError if a pass in float32 is not finite: there is nothing to compare with."""
    first = wide.sample.first_nonfinite
    if first is None and math.isfinite(wide.loss):
        return
    place = f", first in the {first[1]} pass of {first[0] or 'the model'}" if first else ""
    raise SettingError(
        "The loss of closure and its gradients must be finite in float32, got a loss of "
        f"{wide.loss:g} and values that are not finite{place}. No format or scale repairs this: "
        "check the data, the loss and this module."
    )


def working_scales(sample: Sample, format: Format) -> tuple[float, float] | None:
    """The smallest and the largest power of two that keep gradients inside of `format`.

    Args:
        sample: Of a pass in float32 at scale 1.
    """
    grads = _grads(sample)
    if not grads:
        return None
    # Largest: below 2**ceiling. Smallest: at most so many below half the smallest subnormal number.
    high = format.ceiling - 2 - max(t.low + len(t.counts) - 1 for t in grads)
    allowed = FLUSHED * sum(tensor.nonzero() for tensor in grads)
    tiny = math.frexp(format.smallest_subnormal)[1] - 2
    low = high
    while sum(t.below(2.0 ** (tiny - low)) for t in grads) <= allowed and low > high - 400:
        low -= 1
    low += 1
    return (2.0**low, 2.0**high) if low <= high else None


def _grads(sample: Sample) -> list[TensorSample]:
    """The gradients that are not all zero."""
    return [t for t in sample.tensors if t.kind != ACTIVATION and t.counts]


def _first_scale(sample: Sample, format: Format, mode: Mode) -> float:
    """The scale to try first: the largest gradient two binades below the ceiling."""
    grads = _grads(sample)
    if mode.passes != "float16" or not grads:
        return 1.0
    return float(2.0 ** (format.ceiling - 1 - MARGIN - max(t.high() or 0 for t in grads)))


def _first_bad(sample: Sample) -> str:
    """In which direction something was not finite; "" if nothing was."""
    bad = any(t.infs + t.nans for t in sample.tensors if t.kind != ACTIVATION)
    first = sample.first_nonfinite
    return first[1] if first is not None else "backward" if bad else ""


def _row(
    name: str, subject: Subject, narrow: Pass, wide: Pass, format: Format, scale: float
) -> Row | None:
    """What was found in the module `name`; None if it was not used."""
    own = [(WEIGHT_GRAD, p) for p in subject.params if subject.owner(p) == name]
    keys = {(ACTIVATION, name), ("activation_grad", name), *own}
    wides = {(t.kind, t.name): t for t in wide.sample.tensors if (t.kind, t.name) in keys}
    narrows = {(t.kind, t.name): t for t in narrow.sample.tensors if (t.kind, t.name) in keys}
    if not wides:
        return None
    outputs = wides.pop((ACTIVATION, name), None)
    shift = math.frexp(scale)[1] - 1
    rooms = [room - shift for t in wides.values() if (room := t.headroom(format)) is not None]
    lost = there = 0
    for key, tensor in wides.items():
        zeros = narrows[key].zeros if key in narrows else 0
        lost += flushed(narrow, wide, key, zeros)
        there += tensor.nonzero()
    return Row(
        name,
        None if outputs is None else outputs.headroom(format),
        min(rooms, default=None),
        min(lost / there, 1.0) if there else 0.0,
        error(narrow, wide, own),
    )


def _to_keep(rows: Sequence[Row], sample: Sample, format: Format) -> list[str]:
    """The modules to keep in float32."""
    if format == FLOAT32:
        return []
    keep = [row.name for row in rows if row.room is not None and row.room < 0]
    if sample.first_nonfinite is not None and sample.first_nonfinite[1] == "forward":
        keep.append(sample.first_nonfinite[0])
    if not keep:  # else everything after them is wrong
        keep = [r.name for r in rows if r.error is not None and MISSED < r.error]
    # What contains one of them need not be kept as a whole.
    names = list(dict.fromkeys(keep))
    return [
        n for n in names if not any(m != n and m.startswith(f"{n}." if n else "") for m in names)
    ]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _power(scale: float) -> str:
    """A scale as a power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
