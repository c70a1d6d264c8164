"""Checkpoints: the state as a pytree, and as the JSON that the other engines read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import gradscale as gs
from gradscale.jax import (
    init,
    load_policy,
    load_state_dict,
    outcome_of,
    scale_of,
    scaled,
    state_dict,
    update,
)
from gradscale.policy import GradStats
from gradscale.torch import GradScaler
from jax_trees import same

POLICIES = [
    gs.Dynamic(init_scale=2.0**10, growth_interval=3, min_scale=2.0),
    gs.Headroom(margin=3),
    gs.Static(init_scale=8.0),
]
PARAMS = {"w": jnp.arange(4.0)}
STATES = {
    "rule": lambda: init("dynamic"),
    "all": lambda: scaled(optax.sgd(0.1), "dynamic").init({}),
}


def walked(policy: Any) -> tuple[Any, Any]:
    """An optimizer, and its state after a bad step, a good one and one with a bad loss."""
    optimizer = scaled(optax.adam(0.1), policy)
    state, step = optimizer.init(PARAMS), jax.jit(optimizer.update)
    for number, loss in ((jnp.inf, 1.0), (1.0, 1.0), (1.0, jnp.nan)):
        g = {"w": jnp.full(4, number)}
        _, state = step(g, state, PARAMS, value=jnp.float32(loss))
    return optimizer, state


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_json_holds_all_that_moves_the_scale(policy: Any) -> None:
    optimizer, state = walked(policy)
    text = json.dumps(state_dict(policy, state))
    other = load_state_dict(policy, jax.jit(optimizer.init)(PARAMS), json.loads(text))
    assert same(other.policy_state(policy), state.policy_state(policy))
    assert same(other.counts, state.counts)
    assert int(outcome_of(other).skipped_in_a_row) == 1
    assert load_policy(json.loads(text)) == policy
    alone = load_state_dict(policy, init(policy), json.loads(text))
    assert same(alone, state.policy_state(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_torch_reads_what_jax_wrote_and_the_other_way_round(policy: Any) -> None:
    _, state = walked(policy)
    scaler = GradScaler("cpu", policy=policy)
    scaler.load_state_dict(json.loads(json.dumps(state_dict(policy, state))))
    assert scaler.get_scale() == float(scale_of(state))
    back = load_state_dict(policy, init(policy), json.loads(json.dumps(scaler.state_dict())))
    assert same(back, state.policy_state(policy))
    bad = GradStats(finite=False, amax=jnp.float32(jnp.inf), exponent=jnp.int32(0))
    moved = update(policy, back, bad)
    assert isinstance(policy, gs.Static) or not same(moved, back)


def test_states_of_peers_are_read_and_what_is_none_is_refused() -> None:
    policy = POLICIES[0]
    flax = {"fin_steps": 2, "scale": 64.0}
    found = load_state_dict(policy, init(policy), flax)
    # One less: Flax grows one step later than its interval says.
    assert (float(found.scale), int(found.good_steps)) == (64.0, 1)
    with pytest.raises(gs.StateError, match="apple"):
        load_state_dict(policy, init(policy), {"apple": 1})


def test_scale_alone_is_taken_from_another_policy() -> None:
    saved = state_dict(POLICIES[2], init(POLICIES[2]))
    found = load_state_dict(gs.Headroom(), init(gs.Headroom()), saved)
    assert same(found, init(gs.Headroom())._replace(scale=jnp.float32(8)))


@pytest.mark.parametrize("state", [init("dynamic"), scaled(optax.sgd(0.1), "dynamic").init(PARAMS)])
def test_state_is_not_written_or_loaded_as_that_of_another_policy(state: Any) -> None:
    with pytest.raises(gs.SettingError, match="policy must be"):
        state_dict("headroom", state)
    with pytest.raises(gs.SettingError, match="policy must be"):
        load_state_dict("headroom", state, state_dict("dynamic", state))


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_state_of_an_ensemble_is_refused_and_that_of_a_member_is_not(make: Any) -> None:
    one = make()
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), one)
    saved = state_dict("dynamic", one)
    for use in (lambda s: state_dict("dynamic", s), lambda s: load_state_dict("dynamic", s, saved)):
        with pytest.raises(gs.SettingError, match=r"one scale, got scales of shape \(3,\)"):
            use(members)
    assert state_dict("dynamic", jax.tree.map(lambda leaf: leaf[0], members)) == saved


def test_scale_is_loaded_wherever_it_is_in_the_state() -> None:
    policy = POLICIES[0]
    optimizer = optax.chain(optax.identity(), scaled(optax.sgd(0.1), policy))
    state = load_state_dict(policy, optimizer.init(PARAMS), {"scale": 64.0, "fin_steps": 1})
    assert float(scale_of(state)) == 64.0


def test_orbax_and_pickle_restore_the_whole_state(tmp_path: Path) -> None:
    optimizer, state = walked(POLICIES[1])
    assert same(pickle.loads(pickle.dumps(jax.device_get(state))), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"opt_state": state})
        checkpointer.wait_until_finished()
        like = {"opt_state": optimizer.init(PARAMS)}
        found = checkpointer.restore(tmp_path / "state", like)["opt_state"]
    assert same(found, state)
    assert type(found) is type(state)
