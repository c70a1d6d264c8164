"""Configurations, files and weights of Keras, and checkpoints that other engines read."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import gradscale as gs
from gradscale.checkpoints.format import read
from gradscale.keras import LossScaleOptimizer, load_policy, load_state_dict, state_dict
from keras_models import fit, model
from keras_steps import Steps, array, arrays, quick, same, scale_of, state_of

# Keras 3.15's own `numpy()` meets a deprecation of NumPy's.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

POLICIES = [
    gs.Dynamic(init_scale=2.0**10, growth_interval=3, min_scale=2.0),
    gs.Headroom(margin=3),
    gs.LogMax(),
    gs.Static(init_scale=8.0),
]


def walked(policy: Any) -> LossScaleOptimizer:
    """An optimizer after a bad step, a good one and one with a bad loss."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), policy=policy)
    steps = Steps(optimizer, [keras.Variable(np.arange(4.0, dtype="f"))], loss=True)
    for number, loss in ((math.inf, 1.0), (1.0, 1.0), (1.0, math.nan)):
        steps([np.full(4, number, "f")], loss)
    return optimizer


def fresh(policy: Any) -> LossScaleOptimizer:
    """Another optimizer, before its first step."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), policy=policy)
    optimizer.build([keras.Variable(np.arange(4.0, dtype="f"))])
    return optimizer


@pytest.mark.parametrize("policy", [None, *POLICIES], ids=repr)
def test_configuration_builds_the_same_optimizer(policy: Any) -> None:
    clip_norm = None if policy is None else 0.5
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.3), policy=policy, clip_norm=clip_norm)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    other = keras.optimizers.deserialize(config)
    assert type(other) is LossScaleOptimizer
    assert (other.policy, other.clip_norm) == (optimizer.policy, clip_norm)
    assert type(other.policy.init_scale) is type(optimizer.policy.init_scale)
    assert repr(other.policy) == repr(optimizer.policy)
    assert math.isclose(array(other.inner_optimizer.learning_rate), 0.3, rel_tol=1e-6)
    kept = optimizer.get_config()
    LossScaleOptimizer.from_config(kept)
    assert kept == optimizer.get_config()  # nothing was taken out of it


def test_configuration_of_keras_own_class_is_read() -> None:
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 3.0, 7, name="its")
    ours = LossScaleOptimizer.from_config(theirs.get_config())
    assert (ours.initial_scale, ours.dynamic_growth_steps, ours.name) == (3.0, 7, "its")
    assert ours.get_config() == theirs.get_config()


@pytest.mark.parametrize("policy", [gs.Dynamic(init_scale=2.0**24)], ids=repr)
def test_training_from_a_file_continues_to_the_bit(policy: Any, tmp_path: Path) -> None:
    made = model(units=8)
    made.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), policy=policy), loss="mse")
    fit(made, epochs=1)
    made.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert type(other.optimizer) is LossScaleOptimizer
    assert same(arrays(other.optimizer.variables), arrays(made.optimizer.variables))
    for each in (made, other):
        fit(each, epochs=1)
    assert same(arrays(other.variables), arrays(made.variables))
    assert state_of(other.optimizer) == state_of(made.optimizer)
    assert int(array(other.optimizer.num_steps)) == 16


@dataclass(frozen=True, kw_only=True)
class Own(gs.Dynamic):
    """A policy that is not one of gradscale's."""

    extra: int = 1
    """A setting."""


def test_own_policy_is_read_from_a_file_with_its_class(tmp_path: Path) -> None:
    policy = Own(init_scale=2.0**24, extra=3)
    made = model(units=8)
    made.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy), loss="mse")
    fit(made, epochs=1)
    made.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Own": Own})
    assert other.optimizer.policy == policy
    assert same(arrays(other.optimizer.variables), arrays(made.optimizer.variables))
    with pytest.raises(gs.StateError, match=r"got 'Own'\. .* custom_objects=\{'Own': Own\}"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_weights_are_set_with_those_of_the_inner_optimizer() -> None:
    optimizer, other = walked(POLICIES[0]), fresh(POLICIES[0])
    other.set_weights(arrays(optimizer.variables))
    assert same(arrays(other.variables), arrays(optimizer.variables))
    with pytest.raises(ValueError, match="has not yet been built"):
        LossScaleOptimizer(keras.optimizers.SGD(0.1)).set_weights([])


@pytest.mark.parametrize("change", [lambda saved: saved[:-1], lambda saved: [*saved[:-1], 0.0]])
def test_weights_of_another_shape_are_refused_and_set_nothing(change: Any) -> None:
    optimizer, other = walked(POLICIES[0]), fresh(POLICIES[0])
    before = arrays(other.variables)
    with pytest.raises(gs.StateError, match=r"set_weights\(\) needs .* arrays with the shapes"):
        other.set_weights(change(arrays(optimizer.variables)))
    assert same(arrays(other.variables), before)


def test_weights_of_keras_own_class_are_loaded() -> None:
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 8.0, 5)
    steps = Steps(theirs, [keras.Variable(np.arange(4.0, dtype="f"))])
    for number in (math.inf, 1.0, 1.0):
        steps([np.full(4, number, "f")])
    store: dict[str, Any] = {}
    theirs.save_own_variables(store)
    ours = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 8.0, 5)
    ours.build([keras.Variable(np.arange(4.0, dtype="f"))])
    ours.load_own_variables(store)
    assert state_of(ours)[:2] == (4.0, 2)
    inner = (ours.inner_optimizer.variables, theirs.inner_optimizer.variables)
    assert same(*map(arrays, inner))
    used = walked(gs.Dynamic(hysteresis=3))  # the last step was skipped
    used.load_own_variables(store)
    assert state_of(used) == gs.DynamicState(4.0, 2, 0)
    assert int(array(used.outcome.skipped_in_a_row)) == int(array(used.num_steps)) == 0


@pytest.mark.parametrize(
    ("policy", "theirs", "ours"),
    [
        (gs.Dynamic(), math.inf, 2.0**64),
        (gs.Dynamic(), 0.0, 2.0**-14),
        (gs.Headroom(max_scale=2.0**20), 2.0**40, 2.0**20),
        (gs.Off(), 64.0, 1.0),
    ],
)
def test_scale_of_keras_own_class_is_brought_within_the_bounds(
    policy: Any, theirs: float, ours: float
) -> None:
    # Keras' own class has no bounds, and does not leave infinity and 0 any more.
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    wrapped.build([keras.Variable(np.arange(4.0, dtype="f"))])
    wrapped.dynamic_scale.assign(theirs)
    store: dict[str, Any] = {}
    wrapped.save_own_variables(store)
    optimizer = fresh(policy)
    if isinstance(policy, gs.Off):
        optimizer.load_own_variables(store)
    else:
        with pytest.warns(UserWarning, match="outside the range from min_scale to max_scale"):
            optimizer.load_own_variables(store)
    assert scale_of(optimizer) == ours


def stored(optimizer: Any) -> dict[str, Any]:
    """What a file has of `optimizer`."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return store


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (gs.Dynamic(), gs.Headroom(margin=3)),
        (gs.Headroom(), gs.Dynamic()),
        (gs.Static(4.0), gs.Dynamic()),
        (gs.Dynamic(), gs.LogMax()),
        (gs.Headroom(), gs.LogMax()),
    ],
    ids=repr,
)
def test_weights_of_another_policy_have_its_scale(before: Any, after: Any) -> None:
    theirs, ours = walked(before), fresh(after)
    ours.load_own_variables(stored(theirs))
    assert state_of(ours) == after.init()._replace(scale=scale_of(theirs))
    assert same(arrays(ours.inner_optimizer.variables), arrays(theirs.inner_optimizer.variables))
    assert int(array(ours.num_steps)) == 3
    assert int(array(ours.num_skipped)) == int(array(theirs.num_skipped)) > 0


def test_weights_of_another_inner_optimizer_are_skipped_as_in_keras() -> None:
    # As many variables as Keras' own class would have with momentum for three variables.
    def made(momentum: float) -> LossScaleOptimizer:
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=momentum))
        optimizer.build([keras.Variable(np.zeros(size, "f")) for size in (2, 3, 4)])
        return optimizer

    ours = made(0.9)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        ours.load_own_variables(stored(made(0.0)))
    assert state_of(ours) == ours.policy.init()


@pytest.mark.parametrize(
    ("saved", "policy", "scale"),
    [
        (2.0**40, gs.Dynamic(max_scale=2.0**20), 2.0**20),
        (2.0**-4, gs.Dynamic(min_scale=1.0), 1.0),
    ],
)
def test_scale_of_a_file_is_brought_within_the_bounds(
    saved: float, policy: Any, scale: float
) -> None:
    optimizer = fresh(policy)
    with pytest.warns(UserWarning, match="outside the range from min_scale to max_scale"):
        optimizer.load_own_variables(stored(fresh(gs.Dynamic(init_scale=saved))))
    assert scale_of(optimizer) == scale


def test_file_is_read_as_those_of_keras_own_class(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    made = model(units=8)
    made.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    made.optimizer.build(made.trainable_variables)
    made.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    with h5py.File(tmp_path / "model.weights.h5") as file:
        saved = read(file["optimizer/vars"])
    assert saved.state == {"scale": 2.0**15, "good_steps": 0}


@pytest.mark.parametrize("policy", quick(POLICIES, 2), ids=repr)
def test_json_holds_all_that_moves_the_scale(policy: Any) -> None:
    optimizer, other = walked(policy), fresh(policy)
    saved = json.loads(json.dumps(state_dict(optimizer)))
    load_state_dict(other, saved)
    assert state_of(other) == state_of(optimizer)
    assert state_dict(other) == state_dict(optimizer)
    assert saved["gradscale"]["counters"] == {"bad_losses": 1, "steps": 3}
    assert int(array(other.outcome.skipped_in_a_row)) == 1
    assert load_policy(saved) == policy


def test_torch_reads_what_keras_wrote_and_the_other_way_round() -> None:
    pytest.importorskip("torch")
    from gradscale import torch

    for policy in POLICIES[:2]:
        optimizer, other = walked(policy), fresh(policy)
        scaler = torch.GradScaler("cpu", policy=policy)
        scaler.load_state_dict(json.loads(json.dumps(state_dict(optimizer))))
        assert scaler.get_scale() == scale_of(optimizer)
        load_state_dict(other, json.loads(json.dumps(scaler.state_dict())))
        assert state_of(other) == state_of(optimizer)


def test_jax_reads_what_keras_wrote_and_the_other_way_round() -> None:
    pytest.importorskip("jax")
    from gradscale import jax

    for policy in POLICIES[:2]:
        optimizer, other = walked(policy), fresh(policy)
        state = jax.load_state_dict(policy, jax.init(policy), state_dict(optimizer))
        assert tuple(float(value) for value in state) == tuple(state_of(optimizer))
        load_state_dict(other, jax.state_dict(policy, state))
        assert state_of(other) == state_of(optimizer)


def test_states_of_peers_are_read_and_what_is_none_is_refused() -> None:
    optimizer = fresh(POLICIES[0])
    load_state_dict(optimizer, {"fin_steps": 2, "scale": 64.0})  # Flax'
    assert state_of(optimizer)[:2] == (64.0, 1)
    with pytest.raises(gs.StateError, match="apple"):
        load_state_dict(optimizer, {"apple": 1})
    assert scale_of(optimizer) == 64.0
