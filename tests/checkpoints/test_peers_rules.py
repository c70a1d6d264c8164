"""Going on where a peer stopped: the next move comes when the peer's own would have.

Each peer's rule is here in plain Python, by its own source (versions: `test_peers.py`). Keras is
installed, so its own optimizer is run as well.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gradscale.checkpoints.format import read
from gradscale.errors import StateError
from gradscale.policy import Dynamic, DynamicState, GradStats

WINDOW, FULL = 5, 3


class Peer:
    """A scaler that moves by factors of two; `late` if it then grows a step after ours."""

    late = False
    patience: int | None = 1  # overflows left before it backs off; None if ours is refilled

    def __init__(self) -> None:
        self.scale, self.good = 2.0**10, 0

    def step(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == WINDOW:
            self.scale, self.good = self.scale * 2, 0


class Apex(Peer):
    def checkpoint(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.good}}


class Keras(Peer):
    def checkpoint(self) -> dict[str, Any]:
        return {"step_counter": self.good, "dynamic_scale": self.scale}


class TfKeras(Peer):
    def checkpoint(self) -> dict[str, Any]:
        names = ("loss_scale/current_loss_scale", "loss_scale/good_steps")
        return dict(zip(names, (self.scale, self.good), strict=True))


class Jmp(Peer):
    def step(self, finite: bool) -> None:
        grow = self.good == WINDOW - 1
        self.scale *= (2 if grow else 1) if finite else 0.5
        self.good = (self.good + 1) % WINDOW * finite

    def checkpoint(self) -> dict[str, Any]:
        return {"loss_scale": self.scale, "counter": self.good, "period": WINDOW, "factor": 2}


class Flax(Peer):
    def step(self, finite: bool) -> None:
        grow = self.good == WINDOW
        self.scale *= (2 if grow else 1) if finite else 0.5
        self.good = 0 if grow or not finite else self.good + 1
        self.late = self.good == 0

    late = True

    def checkpoint(self) -> dict[str, Any]:
        return {"fin_steps": self.good, "scale": self.scale}


class Megatron(Peer):
    left = full = FULL
    patience = FULL

    def step(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        self.left -= not finite
        if self.left <= 0 and not finite:
            self.scale /= 2
        if self.good == WINDOW:
            self.scale, self.good, self.left = self.scale * 2, 0, FULL
        self.patience = max(self.left, 1) if not finite else FULL

    def checkpoint(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self.good,
            "hysteresis_tracker": self.left,
        }


class DeepSpeed(Peer):
    late = True
    full, consecutive = 1, False

    def __init__(self) -> None:
        self.scale, self.iter, self.last, self.left = 2.0**10, 0, -1, self.full
        self.patience = self.full

    def step(self, finite: bool) -> None:
        if finite:
            self.left = self.full if self.consecutive else self.left
            stable = self.iter - self.last - 1
            if stable > 0 and stable % WINDOW == 0:
                self.scale, self.left = self.scale * 2, self.full
        else:
            if self.left == 1:
                self.scale /= 2
            else:
                self.left -= 1
            self.last = self.iter
        self.iter += 1
        self.late = self.iter == self.last + 1
        self.patience = self.left if not finite else self.full

    def checkpoint(self) -> dict[str, Any]:
        return {
            "dynamic_loss_scale": True,
            "cur_scale": self.scale,
            "cur_iter": self.iter,
            "last_overflow_iter": self.last,
            "scale_factor": 2.0,
            "scale_window": WINDOW,
        }


class Zero(DeepSpeed):
    full = FULL

    def checkpoint(self) -> dict[str, Any]:
        flat = super().checkpoint()
        more = {"min_scale": 2.0**-99, "delayed_shift": self.full, "cur_hysteresis": self.left}
        return {"loss_scaler": SimpleNamespace(**flat, **more), "dynamic_loss_scale": True}


class PatientZero(Zero):
    consecutive = True


PEERS = [Apex, Keras, TfKeras, Jmp, Flax, Megatron, DeepSpeed, Zero, PatientZero]
SAME_RULE = [Apex, Keras, TfKeras, Jmp]


def taken_over(peer: Any) -> tuple[Dynamic, DynamicState]:
    """Our policy with the peer's settings, in the peer's state."""
    saved = read(peer.checkpoint())
    given = {"min_scale": 2.0**-99, "max_scale": 2.0**99, "growth_interval": WINDOW}
    patience = {"hysteresis": FULL} if isinstance(peer, Megatron) else {}
    policy = Dynamic(**{**given, **patience, **saved.settings})
    state = policy.init()._replace(**saved.state)
    if saved.patience is not None:
        state = state._replace(bad_steps=max(policy.hysteresis - saved.patience, 0))
    return policy, state


def steps_until_the_scale_moves(scale: Callable[[], float], step: Callable[[], None]) -> int:
    start = scale()
    for i in range(1, 50):
        step()
        if scale() != start:
            return i
    return 0


def steps_until_both_move(peer: Any, finite: bool) -> tuple[int, int]:
    """How many more steps, all finite or none, move the peer's scale, and ours taken over."""
    policy, state = taken_over(peer)
    ours = [state]
    theirs = steps_until_the_scale_moves(lambda: peer.scale, lambda: peer.step(finite))
    return theirs, steps_until_the_scale_moves(
        lambda: ours[-1].scale,
        lambda: ours.append(policy.update(ours[-1], GradStats(finite=finite))),
    )


histories = st.lists(st.booleans() | st.just(True), max_size=40)


def after(kind: Any, history: list[bool]) -> Any:
    peer = kind()
    for finite in history:
        peer.step(finite)
    return peer


@pytest.mark.parametrize("kind", PEERS)
@given(history=histories)
def test_next_growth_comes_when_the_peers_would_have(kind: Any, history: list[bool]) -> None:
    peer = after(kind, history)
    late = peer.late
    theirs, ours = steps_until_both_move(peer, finite=True)
    assert theirs == ours + late
    assert late in (False, theirs == WINDOW + 1)


@pytest.mark.parametrize("kind", PEERS)
@given(history=histories)
def test_next_backoff_comes_when_the_peers_would_have(kind: Any, history: list[bool]) -> None:
    peer = after(kind, history)
    expected = peer.patience
    theirs, ours = steps_until_both_move(peer, finite=False)
    assert ours == expected
    # Where the last step was finite ours is refilled, and theirs perhaps not.
    assert theirs <= ours if history[-1:] == [True] else theirs == ours


@pytest.mark.parametrize("kind", SAME_RULE)
@given(history=histories, further=histories)
def test_peer_of_the_same_rule_goes_on_alike_for_ever(
    kind: Any, history: list[bool], further: list[bool]
) -> None:
    peer = after(kind, history)
    policy, state = taken_over(peer)
    for finite in further:
        peer.step(finite)
        state = policy.update(state, GradStats(finite=finite))
        assert (state.scale, state.good_steps) == (peer.scale, peer.good)


# Keras itself.


# Keras 3.15's own `numpy()` meets a deprecation of NumPy's.
keras_itself = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def keras_model() -> Any:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=64.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    return model


def forms(optimizer: Any) -> dict[str, dict[str, Any]]:
    """The ways in which one can get at the variables of a Keras optimizer."""
    numbered: dict[str, Any] = {}
    optimizer.save_own_variables(numbered)
    return {
        "numbered": numbered,
        "by path": {variable.path: variable for variable in optimizer.variables},
        "by name, with the config": {
            **optimizer.get_config(),
            "step_counter": optimizer.step_counter,
            "dynamic_scale": optimizer.dynamic_scale.numpy(),
        },
    }


@keras_itself
def test_optimizer_of_keras_is_read_at_every_step(keras_model: Any) -> None:
    optimizer, policy = keras_model.optimizer, Dynamic(init_scale=64.0, growth_interval=3)
    state = policy.init()
    for finite in (True, True, True, True, False, False, True, True):
        grads = [np.full(v.shape, 1.0 if finite else math.inf) for v in keras_model.variables]
        weights = [v.value for v in keras_model.trainable_variables]
        _, values = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], grads, weights
        )
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value)
        state = policy.update(state, GradStats(finite=finite))
        expected = {"scale": state.scale, "good_steps": state.good_steps}
        read_as = {form: read(saved) for form, saved in forms(optimizer).items()}
        assert {form: saved.state for form, saved in read_as.items()} == dict.fromkeys(
            read_as, expected
        )
        config = read_as["by name, with the config"].settings
        assert config == {"init_scale": 64.0, "growth_interval": 3}
    assert state.good_steps == 2


@keras_itself
def test_file_of_keras_is_read(keras_model: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    keras_model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    with h5py.File(tmp_path / "model.weights.h5") as file:
        saved = read(file["optimizer/vars"])
        with pytest.raises(StateError, match="LossScaleOptimizer"):
            read(file["optimizer/inner_optimizer/vars"])
    assert saved.state["scale"] == float(keras_model.optimizer.dynamic_scale.numpy())
    assert saved.state["good_steps"] == int(keras_model.optimizer.step_counter.numpy())
