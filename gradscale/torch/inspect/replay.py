"""The same batch in two formats: what one of them loses, element by element.

Both passes start from the same random state, weights and buffers, so the n-th tensor of a module in
one of them is the n-th in the other. Of every tensor up to 65,536 elements are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradscale.errors import SettingError
from gradscale.monitor.samples import WEIGHT_GRAD, Sample
from gradscale.torch.inspect.compiled import Eager
from gradscale.torch.inspect.counts import Counts
from gradscale.torch.inspect.pending import Pending
from gradscale.torch.inspect.probe import Key, Probe, Subject
from gradscale.torch.inspect.weights import Numbers
from gradscale.torch.mixed_precision.casting import CastForward, device_of
from gradscale.torch.step.calibrate import undone
from gradscale.torch.step.contract import check_closure

COMPARED = 2**16
MOST_CALLS = 16
"""Tensors of one module that are compared, where it is called several times."""
HALVES = (torch.float16, torch.bfloat16)
_NO_MODULE = (
    "The loss of closure does not depend on any module of the model. closure must call the model "
    "that is examined."
)


class Pass(NamedTuple):
    """A forward and a backward pass that left nothing behind."""

    loss: float
    sample: Sample
    kept: dict[Key, list[Tensor]]
    """Some elements of every tensor, in float32."""


def run(
    subject: Subject, closure: Callable[[], Tensor], format: str, scale: float, eager: Eager
) -> Pass:
    """What a pass of `closure` in `format` is like, with its loss times `scale`.

    Gradients, random state and buffers are put back.
    """
    check_closure(closure)
    _check(subject)
    kept: dict[Key, list[Tensor]] = {}

    def keep(kind: str, name: str, value: Tensor) -> None:
        some = value[:: -(-value.numel() // COMPARED)].float().clone()
        if kind == WEIGHT_GRAD:  # counted anew after every pass
            kept[kind, name] = [some]
        elif len(kept.setdefault((kind, name), [])) < MOST_CALLS:
            kept[kind, name].append(some)

    tables: dict[torch.device, Counts] = {}
    probe = Probe(subject, tables, keep=keep)
    whole = format == "float32"
    cast = torch.autocast(
        device_of(subject.model).type,
        dtype=torch.bfloat16 if whole else getattr(torch, format),
        enabled=not whole,
    )
    eager.enter()
    try:
        probe.open()
        with undone(list(subject.params.values()), subject.model), _widened(subject, whole):
            with cast:
                loss = closure()
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise SettingError(
                    "closure must return the loss, a tensor that requires a gradient, got "
                    f"{type(loss).__name__}. It must compute the loss and nothing else."
                )
            if not probe.calls:  # before gradients of another model are added to
                raise SettingError(_NO_MODULE)
            torch.autograd.backward(loss.float().sum() * scale)
    finally:
        probe.close()
        eager.leave()
    if not probe.passes:
        raise SettingError(_NO_MODULE)
    if whole and any(dtype in HALVES for dtype in probe.formats.values()):
        raise SettingError(
            "closure must compute in float32, got activations in a 16-bit format. Remove autocast "
            "from the closure: the format of the run is applied to it."
        )
    probe.trail.send()
    scales = {("scale", ""): torch.tensor(scale)}
    counts = [(table.send(), list(table.numels)) for table in tables.values()]
    sample = Pending(subject, probe, counts, [Numbers(scales)], 0).read()
    return Pass(float(loss.detach().float().sum()), sample, kept)


def replay(
    subject: Subject,
    closure: Callable[[], Tensor],
    format: str,
    scale: float,
    step: int,
    eager: Eager,
) -> Sample:
    """The sample of a pass in `format`, with the zeros that a pass in float32 does not have."""
    narrow = run(subject, closure, format, scale, eager)
    wide = run(subject, closure, "float32", scale, eager)
    tensors = tuple(
        tensor._replace(flushed=flushed(narrow, wide, (tensor.kind, tensor.name), tensor.zeros))
        for tensor in narrow.sample.tensors
    )
    return narrow.sample._replace(step=step, tensors=tensors)


def flushed(narrow: Pass, wide: Pass, key: Key, zeros: int) -> int:
    """How many of the `zeros` of a tensor are not zero in the other pass."""
    lost = seen = 0
    for here, there in zip(narrow.kept.get(key, ()), wide.kept.get(key, ()), strict=False):
        if len(here) == len(there):
            lost += int(((here == 0) & (there != 0)).sum())
            seen += int((here == 0).sum())
    return round(zeros * lost / seen) if seen else 0


def error(narrow: Pass, wide: Pass, gradients: Iterable[Key]) -> float | None:
    """The relative error, in the 2-norm, of some gradients together; infinity if one is not finite.

    None if there are none, or all are zero. Together, because some are zero but for rounding: the
    bias in front of a batch norm, for one.
    """
    ratio = wide.sample.fact("scale")[""] / narrow.sample.fact("scale")[""]
    off = size = 0.0
    for key in gradients:
        for here, there in zip(narrow.kept.get(key, ()), wide.kept.get(key, ()), strict=False):
            if len(here) == len(there):
                off += float((here.double() * ratio - there.double()).square().sum())
                size += float(there.double().square().sum())
    if not size:
        return None
    return math.sqrt(off / size) if math.isfinite(off) else math.inf


def _check(subject: Subject) -> None:
    """Raises if the model cannot be run in two formats."""
    if any(hasattr(param, "device_mesh") for param in subject.params.values()):
        raise SettingError(
            "A model with DTensors cannot be run in another format. Call this before "
            "fully_shard() or distribute_module()."
        )


@contextmanager
def _widened(subject: Subject, whole: bool) -> Iterator[None]:
    """Runs a model that was cast in float32, if `whole`; weights are put back as they were."""
    weights = [p for p in subject.params.values() if whole and p.dtype in HALVES]
    narrow = [param.data for param in weights]
    casts = [forward for module in subject.modules.values() if (forward := _cast(module)) and whole]
    formats = [(each.inputs, each.autocast, each.outputs) for each in casts]
    try:
        for param in weights:
            param.data = param.data.float()
        for each in casts:
            each.inputs, each.autocast, each.outputs = torch.float32, None, None
        yield
    finally:
        for param, data in zip(weights, narrow, strict=True):
            param.grad = None
            param.data = data
        for each, kinds in zip(casts, formats, strict=True):
            each.inputs, each.autocast, each.outputs = kinds


def _cast(module: nn.Module) -> CastForward | None:
    """What casts the inputs and outputs of a module; None if nothing does."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, CastForward) else None
