from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import gradscale
from gradscale.errors import SettingError
from gradscale.formats import FORMATS, Format, format_named

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3": torch.float8_e4m3fn,
}
BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def finfo_differences(format: Format, dtype: torch.dtype) -> list[str]:
    """The facts on which `format` and torch.finfo are not equal."""
    info = torch.finfo(dtype)
    facts = {
        "max": (format.max, info.max),
        "smallest_normal": (format.smallest_normal, info.smallest_normal),
        "eps": (format.eps, info.eps),
        "bits": (1 + format.exponent_bits + format.mantissa_bits, info.bits),
    }
    return [f"{name}: {a} != {b}" for name, (a, b) in facts.items() if a != b]


def value_of(pattern: int, dtype: torch.dtype) -> float:
    """The number with this bit pattern."""
    bits = torch.tensor([pattern], dtype=BITS[torch.finfo(dtype).bits])
    return bits.view(dtype).float().item()


def every_value(dtype: torch.dtype) -> list[float]:
    """All numbers of a format of at most 16 bits."""
    count = 1 << torch.finfo(dtype).bits
    patterns = torch.arange(count).to(BITS[torch.finfo(dtype).bits])
    return patterns.view(dtype).double().tolist()


def test_every_format_has_its_torch_dtype_here() -> None:
    assert list(FORMATS) == [format.name for format in FORMATS.values()]
    assert set(FORMATS) == set(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_facts_are_those_of_torch_finfo(name: str) -> None:
    assert finfo_differences(FORMATS[name], DTYPES[name]) == []


@pytest.mark.parametrize("field", ["exponent_bits", "mantissa_bits", "max"])
@pytest.mark.parametrize("name", DTYPES)
def test_wrong_fact_is_found(name: str, field: str) -> None:
    right = FORMATS[name]
    value = getattr(right, field)
    nearest = math.nextafter(value, math.inf) if field == "max" else value + 1
    assert finfo_differences(dataclasses.replace(right, **{field: nearest}), DTYPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_smallest_subnormal_is_the_number_after_zero(name: str) -> None:
    assert FORMATS[name].smallest_subnormal == value_of(1, DTYPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_smallest_normal_is_the_first_with_a_nonzero_exponent(name: str) -> None:
    format = FORMATS[name]
    assert format.smallest_normal == value_of(1 << format.mantissa_bits, DTYPES[name])


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float32"])
def test_range_is_that_of_every_bit_pattern(name: str) -> None:
    format, values = FORMATS[name], every_value(DTYPES[name])
    finite = [value for value in values if math.isfinite(value)]
    assert max(finite) == format.max
    assert min(value for value in finite if value > 0) == format.smallest_subnormal
    assert (math.inf in values) == format.infinite


def test_float32_ends_where_its_infinity_begins() -> None:
    format = FORMATS["float32"]
    exponent = (1 << format.exponent_bits) - 1
    infinity = exponent << format.mantissa_bits
    assert value_of(infinity - 1, torch.float32) == format.max
    assert (value_of(infinity, torch.float32) == math.inf) == format.infinite


@pytest.mark.parametrize("name", DTYPES)
def test_format_is_found_by_its_name(name: str) -> None:
    assert format_named(name) is FORMATS[name] is gradscale.FORMATS[name]


@pytest.mark.parametrize("name", ["float64", "FLOAT16", "", None, 16])
def test_unknown_format_is_refused_with_the_names_known(name: object) -> None:
    with pytest.raises(SettingError) as caught:
        format_named(name)  # type: ignore[arg-type]
    assert all(known in str(caught.value) for known in ["format must be", *FORMATS])
    assert f"got {name!r}" in str(caught.value)


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["float16"].max = 1.0  # type: ignore[misc]
