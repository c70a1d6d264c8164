"""Lines of a run log: mappings to strict JSON and back.

JSON has no numbers that are not finite: they are the strings "Infinity", "-Infinity" and "NaN". A
parameter or a loss can have such a name too, so they are numbers again only in fields that hold
numbers (`_NUMBERS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gradscale.monitor.findings import Finding
from gradscale.monitor.samples import Sample, TensorSample

VERSION = 1
"""The version of the lines that are written; readers refuse higher ones."""

_SPELLED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_NUMBERS = ("time", "scale", "loss", "grad_norm", "amax", "headroom", "underflow")
"""Fields that hold a number wherever they are."""


def encode(line: Mapping[str, Any]) -> bytes:
    """Returns `line` as one line of JSON in ASCII, with its newline."""
    # These come first, so that a line can be recognised without decoding it.
    ordered = {name: line[name] for name in ("kind", "step") if name in line} | dict(line)
    try:
        text = json.dumps(ordered, allow_nan=False, separators=(",", ":"))
    except ValueError:  # some number is not finite, which is rare
        text = json.dumps(_spelled(ordered), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def decode(text: bytes | str) -> dict[str, Any]:
    """Returns the line that `encode()` encoded; a ValueError if it is not one."""
    line = json.loads(text, parse_constant=_refuse)
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError("A line of a run log is an object with a kind.")
    kind = line["kind"]
    if kind in ("step", "event", "run"):
        _to_numbers(line)
    if kind == "step":
        for step in line.get("steps", ()):
            _to_numbers(step)
        for move in line.get("moves", ()):
            move[1:] = [_number(value) for value in move[1:]]
    if kind == "sample":
        for tensor in line["tensors"]:
            _to_numbers(tensor)
        first = line.get("first_nonfinite")
        if first is not None:
            first[2:] = [_number(value) for value in first[2:]]
        for fact in line.get("facts", ()):
            fact[2:] = [_number(value) for value in fact[2:]]
    return line


def finding_line(finding: Finding) -> dict[str, Any]:
    """Returns the line of `finding`."""
    fields = finding.as_dict()
    line: dict[str, Any] = {"kind": "finding"}
    for name in ("step", "rank"):
        if name in fields:
            line[name] = fields.pop(name)
    return {**line, "finding": fields}


def finding_of(line: Mapping[str, Any]) -> Finding:
    """The finding of a line; a TypeError if it is none."""
    finding = Finding.from_dict({**line, **line["finding"]})
    texts = finding.kind, finding.where, finding.evidence, finding.remedy
    numbers = [each for each in (finding.step, finding.rank) if each is not None]
    if not all(isinstance(t, str) for t in texts) or not all(type(n) is int for n in numbers):
        raise TypeError(f"A finding has texts and whole numbers, got {finding!r}.")
    return finding


def sample_line(sample: Sample) -> dict[str, Any]:
    """Returns the line of `sample`, without fields of tensors that have their default."""
    tensors = [
        {name: value for name, value in tensor._asdict().items() if not _is_default(name, value)}
        for tensor in sample.tensors
    ]
    return {"kind": "sample", **sample._asdict(), "tensors": tensors}


def _is_default(name: str, value: Any) -> bool:
    """Whether a field of a tensor need not be written."""
    defaults = TensorSample._field_defaults
    return name in defaults and bool(value == defaults[name])


def sample_of(line: Mapping[str, Any]) -> Sample:
    """Returns the sample of a line; unknown fields are ignored.

    Raises:
        TypeError: A field is not of its type.
    """
    tensors = tuple(
        TensorSample(**{n: _frozen(each[n]) for n in TensorSample._fields if n in each})
        for each in line["tensors"]
    )
    fields = {name: _frozen(line[name]) for name in Sample._fields if name in line}
    sample = Sample(**{**fields, "tensors": tensors})
    first = sample.first_nonfinite
    rows = [*sample.facts, *([] if first is None else [(*first[:2], each) for each in first[2:]])]
    if (
        not _are([sample.step], int)
        or not _are([sample.format], str)
        or not all(map(_is_tensor, sample.tensors))
        or not (first is None or len(first) == 4)
        or not all(len(row) == 3 and _are(row[:2], str) and _are(row[2:], *_REAL) for row in rows)
    ):
        raise TypeError(f"A sample has names and numbers, got {sample!r:.200}.")
    return sample


_REAL = (int, float)


def _are(values: Iterable[Any], *kinds: type) -> bool:
    """Whether all values are of these types themselves: no bool is an int."""
    return all(type(value) in kinds for value in values)


def _is_tensor(tensor: TensorSample) -> bool:
    """Whether the fields of a tensor have their types."""
    flushed = () if tensor.flushed is None else (tensor.flushed,)
    whole = tensor.numel, tensor.low, tensor.zeros, tensor.infs, tensor.nans, *flushed
    texts = tensor.name, tensor.kind, tensor.format
    counts: Any = tensor.counts
    is_row = type(counts) is tuple and _are(counts, int)
    return is_row and _are(texts, str) and _are(whole, int) and _are([tensor.scale], *_REAL)


def _frozen(value: Any) -> Any:
    """`value` with tuples for its lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _spelled(value: Any) -> Any:
    """`value` with strings for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _spelled(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(each) for each in value]
    return value


def _to_numbers(fields: dict[str, Any]) -> None:
    """Replaces the strings of numbers that are not finite, in place."""
    for name in _NUMBERS:
        if name in fields:
            fields[name] = _number(fields[name])


def _number(value: Any) -> Any:
    """`value`, or the number that it spells."""
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def _refuse(name: str) -> Any:
    """Python's decoder takes NaN without quotes, which is not JSON."""
    raise ValueError(f"{name} is not JSON.")
