"""Vectors of fields, and states and settings as one vector."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscale.policy import (
    Dynamic,
    Headroom,
    Histogram,
    LogMax,
    Off,
    Policy,
    Static,
)
from gradscale.torch.grads import packed
from gradscale.torch.grads.fields import DECISION, RECORD, REPORT, SUMMARY, Field, offset, value_at

CPU = torch.device("cpu")
POLICIES: list[Policy] = [
    Off(),
    Static(init_scale=4.0),
    Dynamic(init_scale=2.0**-3),
    Headroom(init_scale=2.0**70, max_scale=2.0**80),
    LogMax(),
    Histogram(),
]


@pytest.mark.parametrize("fields", [DECISION, SUMMARY, REPORT, RECORD])
def test_names_are_unique_and_offsets_their_places(fields: tuple[Field, ...]) -> None:
    names = [field.name for field in fields]
    assert len(set(names)) == len(names)
    assert [offset(fields, name) for name in names] == list(range(len(names)))
    with pytest.raises(ValueError, match="nothing"):
        offset(fields, "nothing")


def test_every_word_of_a_report_has_a_fold_and_flags_come_first() -> None:
    assert {field.fold for field in REPORT} == {"max", "min", "norm", "checksum"}
    flags = [field.name for field in REPORT[: offset(REPORT, "amax")]]
    assert all("non_finite" in f or f.startswith("has_") or f == "unfit" for f in flags)


def test_values_have_the_type_of_their_field_and_share_memory() -> None:
    bits = torch.zeros(len(DECISION), dtype=torch.int32, device=CPU)
    bits[offset(DECISION, "skipped_in_a_row")] = 70000
    bits[offset(DECISION, "applied")] = 1
    vector = bits.view(torch.float32)
    vector[offset(DECISION, "grad_norm")] = 2.5
    assert value_at(vector, "skipped_in_a_row").item() == 70000
    assert value_at(vector, "applied").item() is True
    assert value_at(vector, "finite").item() is False
    assert value_at(vector, "grad_norm").item() == 2.5
    value_at(vector, "amax").fill_(3.0)
    assert value_at(vector, "amax").item() == 3.0
    record = torch.zeros(len(RECORD), dtype=torch.int32, device=CPU)
    value_at(record, "scale", RECORD).fill_(0.5)
    assert value_at(record.clone(), "scale", RECORD).item() == 0.5


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_state_is_packed_and_viewed_without_a_loss(policy: Policy) -> None:
    state = policy.init()
    vector = packed.pack(state, device=CPU, bad_losses=3, steps=2**31 - 1)
    assert vector.dtype is torch.int32
    assert len(vector) == 2 + len(state)
    views = packed.views(vector, type(state))
    assert type(views) is type(state)
    assert [view.item() for view in views] == list(state)
    counters = [value_at(vector, name, packed.COUNTERS).item() for name in ("bad_losses", "steps")]
    assert counters == [3, 2**31 - 1]
    expected = policy.init(torch, like=torch.zeros((), dtype=torch.float32, device=CPU))
    assert [view.dtype for view in views] == [value.dtype for value in expected]
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert [view.item() for view in packed.views(vector, type(state))] == [
        number + 1 for number in range(len(state))
    ]


def settings_of(vector: Tensor, rule: int) -> dict[str, Any]:
    fields = packed.SETTINGS[rule]
    return {field.name: value_at(vector, field.name, fields).item() for field in fields}


def test_settings_are_those_of_the_policy_and_cached() -> None:
    policy = Dynamic(growth_factor=1.7, backoff_factor=0.3, growth_interval=7, exact=False)
    vector = packed.pack_settings(policy, device=CPU)
    found = settings_of(vector, packed.DYNAMIC)
    for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
        assert math.isclose(found[name], getattr(policy, name), rel_tol=2.0**-24)
    assert (found["growth_interval"], found["hysteresis"]) == (7, 1)
    assert (found["patience"], found["period"]) == (32, 8)
    again = Dynamic(growth_factor=1.7, backoff_factor=0.3, growth_interval=7, exact=False)
    assert packed.pack_settings(again, device=CPU) is vector
    other = packed.pack_settings(policy, device=CPU, patience=2, period=5)
    assert settings_of(other, packed.DYNAMIC) == found | {"patience": 2, "period": 5}
    headroom = Headroom(margin=3, memory=5, forget=6, pause=7, format="bfloat16")
    found = settings_of(packed.pack_settings(headroom, device=CPU), packed.HEADROOM)
    numbers = [found[name] for name in ("margin", "memory", "forget", "pause", "room")]
    assert numbers == [3, 5, 6, 7, 128 - 3]
    assert list(packed.pack_settings(Off(), device=CPU)) == [32, 8]


def test_a_subclass_or_slow_growth_has_no_rule_in_kernels() -> None:
    class Mine(Dynamic):
        pass

    rules = [packed.rule_of(policy) for policy in POLICIES]
    assert rules == [
        packed.CONSTANT,
        packed.CONSTANT,
        packed.DYNAMIC,
        packed.HEADROOM,
        None,
        None,
    ]
    assert packed.rule_of(Dynamic(slow_growth_above=1.0)) is packed.rule_of(Mine()) is None


def test_offsets_in_kernels_are_part_of_the_key_of_a_compiled_kernel() -> None:
    pytest.importorskip("triton", minversion="3.4")
    language = importlib.import_module("triton.language")
    offsets = importlib.import_module("gradscale.torch.grads.triton.offsets")
    here, moved = offsets.Offsets(SUMMARY), offsets.Offsets(SUMMARY[::-1])
    # Triton's key has the text of every constexpr that a kernel refers to.
    assert isinstance(here, language.constexpr)
    assert str(here) != str(moved)
    assert copy.deepcopy(here).amax == here.value.amax == offset(SUMMARY, "amax") != moved.amax
