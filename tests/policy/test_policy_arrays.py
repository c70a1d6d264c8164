"""What a rule does with arrays: what it writes and reads, where they lie, and full counters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch

from gradscale.policy import DynamicState, GradStats, LogMaxState, Policy, scalars
from policy_cases import BAD, FLAGS, GOOD, HISTORIES, POLICIES, differences, dynamic
from policy_faults import InPlace, Reading, as_fault

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    "xp", [scalars, np, torch, jnp, keras.ops], ids=["plain", "numpy", "torch", "jax", "keras"]
)
def test_counter_at_the_end_of_int32_still_moves_the_scale(xp: Any) -> None:
    # A checkpoint may hold it: states.read takes every counter up to 2**31 - 1.
    policy = dynamic(8.0, 4.0, 0.25, 3, 2, 0.5, 64.0)
    first = policy.init(xp)
    full = xp.full_like(first.good_steps, INT32_MAX)
    state = DynamicState(first.scale, full, full)
    assert policy.update(state, GOOD, xp).scale == 32.0
    bad = policy.update(state, BAD, xp)
    assert bad.scale == 2.0
    assert bad.bad_steps > 0


# What update() does to its arguments, and where init() puts its arrays.


def changes(policy: Policy, xp: Any, copy_of: Callable[[Any], Any]) -> list[str]:
    """What `update` wrote into the state or the stats that it was given."""
    found, state = [], policy.init(xp)
    for stats in HISTORIES[0]:
        told = GradStats(*(copy_of(v) if isinstance(v, bool) else v for v in stats))
        before = type(state)(*(copy_of(value) for value in state))
        moved = policy.update(state, told, xp)
        found += [
            f"{n}: {a} to {b}"
            for n, a, b in zip(state._fields, before, state, strict=True)
            if a != b
        ]
        found += [f"{n} of stats" for n in FLAGS if getattr(told, n) != getattr(stats, n)]
        state = moved
    return found


@pytest.mark.parametrize(
    ("xp", "copy_of"), [(np, np.array), (torch, torch.clone)], ids=["numpy", "torch"]
)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_update_writes_into_nothing_it_is_given(
    policy: Policy, xp: Any, copy_of: Callable[[Any], Any]
) -> None:
    assert changes(policy, xp, lambda v: copy_of(xp.asarray(v))) == []


def test_write_into_the_state_is_found() -> None:
    policy = as_fault(POLICIES["Dynamic"], InPlace)
    assert changes(policy, np, np.array)
    assert changes(policy, torch, lambda v: torch.clone(torch.asarray(v)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool])
def test_torch_state_lies_where_like_does_and_stays_there(dtype: torch.dtype) -> None:
    like = torch.ones((), dtype=dtype, device="meta")
    for policy in POLICIES.values():
        state = policy.init(torch, like=like)
        for each in (state, policy.update(state, GOOD, torch)):
            assert {value.device.type for value in each} == {"meta"}
            assert each[0].dtype == torch.float32
            rest = torch.float32 if isinstance(each, LogMaxState) else torch.int32
            assert {value.dtype for value in each[1:]} <= {rest}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_two_fields_are_the_same_tensor(policy: Policy) -> None:
    state = policy.init(torch)
    assert len({value.data_ptr() for value in state}) == len(state)


def test_update_reads_no_value_back_to_the_host() -> None:
    # A meta tensor has no value, so a rule that asks for one raises.
    like = torch.empty((), device="meta")
    flag = torch.empty((), dtype=torch.bool, device="meta")
    number, count = like.float(), torch.empty((), dtype=torch.int32, device="meta")
    stats = GradStats(flag, number, flag, None, flag, count, number)
    for policy in POLICIES.values():
        moved = policy.update(policy.init(torch, like=like), stats, torch)
        assert moved.scale.device.type == "meta"
    policy = POLICIES["Dynamic"]
    with pytest.raises(RuntimeError, match="meta"):
        as_fault(policy, Reading).update(policy.init(torch, like=like), stats, torch)


@pytest.mark.parametrize("like", [3, 3.0, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_plain_state_is_the_same_whatever_like_is(policy: Policy, like: Any) -> None:
    state = policy.init(like=like)
    assert state == policy.init()
    rest = float if isinstance(state, LogMaxState) else int
    assert [type(value) for value in state] == [float, *[rest] * (len(state) - 1)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("xp", [np, jnp, keras.ops], ids=["numpy", "jax", "keras"])
def test_state_takes_nothing_but_the_device_of_like(xp: Any, dtype: str) -> None:
    for policy in POLICIES.values():
        state = policy.init(xp, like=xp.ones((), dtype=dtype))
        assert differences([policy.init()], [state]) == []


TWO_DEVICES = """
import jax, jax.numpy as jnp, keras
from gradscale.policy import Dynamic, GradStats

policy, (first, second) = Dynamic(init_scale=8.0, growth_interval=3), jax.devices()
for xp in (jnp, keras.ops):
    for device in (first, second):
        state = policy.init(xp, like=jax.device_put(jnp.float16(3), device))
        for each in (state, policy.update(state, GradStats(finite=True), xp)):
            assert [v.devices() for v in each] == [{device}] * 3, each
            assert [v.dtype for v in each] == ["float32", "int32", "int32"], each
print("both devices")
"""


def test_jax_state_lies_where_like_does_and_stays_there() -> None:
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-c", TWO_DEVICES]
    env = {**os.environ, **two, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "both devices\n", done.stderr
