"""The peers' checkpoints: read to the number, going on where they stopped, or refused whole.

The structures are those that these versions save: Apex before the removal of `apex.amp` (2025),
DeepSpeed 0.19.8, Megatron-LM core (2024), Flax 0.12.8, Keras 3.0 to 3.15.1, tf.keras 2.12, jmp
0.0.4. Keras is installed, so its own optimizer is run as well.
"""

from __future__ import annotations

import copy
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given

from gradscale.errors import StateError
from gradscale.policy import Dynamic, DynamicState, GradStats
from gradscale.states import Saved, read
from gradscale.torch import GradScaler

Place = tuple[str, ...]


class Example(NamedTuple):
    """A peer's checkpoint, what it says, and where its numbers are."""

    checkpoint: dict[str, Any]
    saved: Saved
    needed: list[Place]
    """What it is damaged without."""
    settings: Sequence[Place] = ()
    """What it may lack, but must not have wrong."""


def dynamic(settings: dict[str, Any], **state: Any) -> Saved:
    return Saved(None, settings, state, {})


ZERO = {
    "cur_scale": 4096.0,
    "cur_iter": 25,
    "last_overflow_iter": 24,
    "scale_factor": 4.0,
    "scale_window": 100,
    "min_scale": 0.5,
    "delayed_shift": 3,
    "cur_hysteresis": 1,
}
ZERO_SETTINGS = {
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 100,
    "min_scale": 0.5,
    "hysteresis": 3,
}
FUSED = {
    "dynamic_loss_scale": True,
    "cur_scale": 2**14,
    "cur_iter": 260,
    "last_overflow_iter": 52,
    "scale_factor": 2.0,
    "scale_window": 100,
}
FUSED_SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100}
OTHER_KEYS: dict[str, Any] = {
    "optimizer_state_dict": {"state": {}, "param_groups": []},
    "fp32_groups_flat": [torch.zeros(3)],
    "clip_grad": 0.0,
}
TF = "/.ATTRIBUTES/VARIABLE_VALUE"
KERAS = ("step_counter", "dynamic_scale")
KERAS_PATHS = ("loss_scale_optimizer/step_counter", "loss_scale_optimizer/dynamic_scale")
JMP = {"loss_scale": 2.0**15, "counter": 1200}


def of(names: Any, *values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def at(names: Any, *outer: str) -> list[Place]:
    return [(*outer, name) for name in names]


EXAMPLES = {
    "Apex": Example(
        {
            "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1500},
            "loss_scaler1": {"loss_scale": 128.0, "unskipped": 0},
            "loss_scaler2": {"loss_scale": 0.5, "unskipped": 3},
        },
        dynamic({}, scale=65536.0, good_steps=1500)._replace(
            losses=((1, {"scale": 128.0, "good_steps": 0}), (2, {"scale": 0.5, "good_steps": 3}))
        ),
        [(f"loss_scaler{i}",) for i in range(2)]
        + [(f"loss_scaler{i}", key) for i in range(3) for key in ("loss_scale", "unskipped")],
    ),
    "DeepSpeed, fused": Example(
        {**FUSED, **OTHER_KEYS},
        dynamic(FUSED_SETTINGS, scale=2.0**14, good_steps=6),  # 207 finite steps: two windows, 7
        at(FUSED),
    ),
    "DeepSpeed, fused, static": Example(
        {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 7, **OTHER_KEYS},
        Saved("Static", {"init_scale": 128.0, "exact": False}, {"scale": 128.0}, {}),
        at(["dynamic_loss_scale", "cur_scale"]),
    ),
    "DeepSpeed, ZeRO": Example(
        {
            "loss_scaler": SimpleNamespace(**ZERO, consecutive_hysteresis=False, dynamic=True),
            "dynamic_loss_scale": True,
            "overflow": True,
        },
        dynamic(ZERO_SETTINGS, scale=4096.0, good_steps=0, bad_steps=2),
        at(ZERO, "loss_scaler"),
        [("loss_scaler",), ("dynamic_loss_scale",)],
    ),
    "DeepSpeed, ZeRO, old": Example(
        {"loss_scaler": SimpleNamespace(**{**ZERO, "last_overflow_iter": -1})},
        dynamic(ZERO_SETTINGS, scale=4096.0, good_steps=24, bad_steps=0),
        at(ZERO, "loss_scaler"),
    ),
    "DeepSpeed, ZeRO, static": Example(
        {
            "loss_scaler": SimpleNamespace(cur_scale=1.0, dynamic=False),
            "dynamic_loss_scale": False,
        },
        Saved("Static", {"init_scale": 1.0, "exact": False}, {"scale": 1.0}, {}),
        at(["cur_scale"], "loss_scaler"),
    ),
    "Megatron": Example(
        {"scale": torch.tensor([2.0**32]), "growth_tracker": 7, "hysteresis_tracker": 1},
        dynamic({}, scale=2.0**32, good_steps=7),
        at(["scale", "growth_tracker", "hysteresis_tracker"]),
    ),
    "Megatron, overflowing": Example(
        {
            "optimizer": {"state": {}},
            "grad_scaler": {"scale": 8.0, "growth_tracker": 0, "hysteresis_tracker": -1},
        },
        dynamic({}, scale=8.0, good_steps=0)._replace(patience=1),
        at(["scale", "growth_tracker", "hysteresis_tracker"], "grad_scaler"),
    ),
    "Flax": Example(
        {"fin_steps": jnp.int32(1200), "scale": jnp.float32(128.0)},
        dynamic({}, scale=128.0, good_steps=1199),
        at(["fin_steps", "scale"]),
    ),
    "Flax, within a train state": Example(
        {"step": 5, "params": {}, "dynamic_scale": {"fin_steps": 0, "scale": 65536.0}},
        dynamic({}, scale=65536.0, good_steps=0),
        at(["fin_steps", "scale"], "dynamic_scale"),
    ),
    "Keras": Example(
        {**of(KERAS, 3, 2.0**15), "initial_scale": 64.0, "dynamic_growth_steps": 9, "name": "n"},
        dynamic({"growth_interval": 9, "init_scale": 64.0}, scale=2.0**15, good_steps=3),
        at(KERAS),
        at(["initial_scale", "dynamic_growth_steps"]),
    ),
    "Keras, by path": Example(
        {**of(KERAS_PATHS, 3, 2.0**15), "sgd/iteration": 4, "sgd/learning_rate": 0.1},
        dynamic({}, scale=2.0**15, good_steps=3),
        at(KERAS_PATHS),
    ),
    "Keras, tree": Example(
        {"loss_scale_optimizer": of(KERAS, 3, 2.0**15), "sgd": {"iteration": 4}},
        dynamic({}, scale=2.0**15, good_steps=3),
        at(KERAS, "loss_scale_optimizer"),
    ),
    "Keras, numbered": Example(
        of("0123456", 0, 0.0, np.int32(3), np.float32(64.0), 5, 0.01, np.ones((1, 1))),
        dynamic({}, scale=64.0, good_steps=3),
        at("123"),
    ),
    "tf.keras": Example(
        {
            f"optimizer/loss_scale/current_loss_scale{TF}": np.float32(1024.0),
            f"optimizer/loss_scale/good_steps{TF}": np.int64(1999),
            f"optimizer/base_optimizer/iter{TF}": np.int64(5),
        },
        dynamic({}, scale=1024.0, good_steps=1999),
        at(f"optimizer/loss_scale/{name}{TF}" for name in ("current_loss_scale", "good_steps")),
    ),
    "tf.keras, short": Example(
        {"loss_scale/current_loss_scale": 1024.0, "loss_scale/good_steps": 1999},
        dynamic({}, scale=1024.0, good_steps=1999),
        at(["loss_scale/current_loss_scale", "loss_scale/good_steps"]),
    ),
    "jmp": Example(JMP, dynamic({}, scale=2.0**15, good_steps=1200), at(JMP)),
    "jmp, all": Example(
        {**JMP, "period": 2000, "factor": 4, "min_loss_scale": 2.0},
        dynamic(
            {
                "growth_factor": 4.0,
                "backoff_factor": 0.25,
                "growth_interval": 2000,
                "min_scale": 2.0,
            },
            scale=2.0**15,
            good_steps=1200,
        ),
        at(JMP),
        at(["period", "factor", "min_loss_scale"]),
    ),
}
by_peer = pytest.mark.parametrize("name", EXAMPLES)


# What is read.


@by_peer
def test_checkpoint_is_read_to_the_number(name: str) -> None:
    example = EXAMPLES[name]
    before = copy.deepcopy(list(example.checkpoint))
    saved = read(example.checkpoint)
    assert saved == example.saved
    assert list(example.checkpoint) == before
    numbers = (*saved.settings.values(), *saved.state.values())
    assert type(saved.state["scale"]) is float
    assert all(type(v) in {int, float, bool} for v in numbers)


def replaced(value: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """A copy in which the value at `place` is changed, or dropped if that gives DROPPED."""
    if not place:
        return change(value)
    is_dict = isinstance(value, dict)
    inner = dict(value) if is_dict else dict(vars(value))
    inner[place[0]] = replaced(inner[place[0]], place[1:], change)
    if inner[place[0]] is DROPPED:
        del inner[place[0]]
    return inner if is_dict else SimpleNamespace(**inner)


DROPPED = object()
BOXES: dict[str, Callable[[Any], Any]] = {
    "numpy scalar": lambda x: np.asarray(x)[()],
    "numpy 0-d": np.asarray,
    "numpy of one element": lambda x: np.asarray([[x]]),
    "torch": torch.tensor,
    "torch of one element": lambda x: torch.tensor([x]),
    "jax": jnp.asarray,
}


@pytest.mark.parametrize("box", BOXES)
@by_peer
def test_number_may_be_an_array_of_one_element(name: str, box: str) -> None:
    checkpoint = EXAMPLES[name].checkpoint
    for place in (*EXAMPLES[name].needed, *EXAMPLES[name].settings):
        checkpoint = replaced(checkpoint, place, lambda x: boxed(x, BOXES[box]))
    assert read(checkpoint) == EXAMPLES[name].saved


def boxed(value: Any, box: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, dict | SimpleNamespace) else box(unboxed(value))


def unboxed(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


@pytest.mark.parametrize(
    ("checkpoint", "good_steps"),
    [
        *(
            ({**FUSED, "last_overflow_iter": 259 - n}, (n - 1) % 100 if n else 0)
            for n in range(250)
        ),
        *(({"fin_steps": n, "scale": 8.0}, max(n - 1, 0)) for n in range(3)),
    ],
)
def test_counter_that_runs_late_is_put_forward(checkpoint: Any, good_steps: int) -> None:
    assert read(checkpoint).state["good_steps"] == good_steps


@by_peer
def test_our_scaler_takes_it_over_and_keeps_the_settings_that_are_not_in_it(name: str) -> None:
    saved = EXAMPLES[name].saved
    scaler = GradScaler("cpu", growth_interval=77, min_scale=2.0**-20)
    before = {**vars_of(scaler.policy), **saved.settings, "exact": False}
    scaler.load_state_dict(EXAMPLES[name].checkpoint)
    assert scaler.get_scale() == saved.state["scale"]
    assert scaler._get_growth_tracker() == saved.state.get("good_steps", 0)
    if saved.policy is None:
        assert vars_of(scaler.policy) == before
    else:
        assert vars_of(scaler.policy) == saved.settings


def vars_of(policy: Any) -> dict[str, Any]:
    return dict(vars(policy))


# What is refused.

TWO = torch.ones(2)
NO_NUMBER = [
    *(None, "8", b"8", [], [8.0], {}, {"a": 8.0}, 8j, object(), TWO, np.ones(2), np.ones(0)),
    *(True, np.True_, torch.tensor(True), np.array("8"), np.array(None), np.complex64(8)),
    *(torch.empty((), device="meta"), jnp.ones(2), math.nan, math.inf, -math.inf, -8, 10**400),
]
NO_SCALE = [*NO_NUMBER, 0, 0.0, -1.0, np.float32("nan"), torch.tensor(math.inf)]
NO_COUNT = [*NO_NUMBER, 8.0, 8.5, np.float32(8), torch.tensor(8.0), 2**31]
SCALES = {"cur_scale", "scale", "loss_scale", "dynamic_scale", "current_loss_scale", "3"}
FLOATS = {"scale_factor", "min_scale", "factor", "min_loss_scale", "initial_scale"}
# Whole numbers for which even these are fine.
LOW = {"hysteresis_tracker": {-8}}


def junk_for(place: Place) -> list[Any]:
    """What must not be at `place`."""
    name = place[-1].removesuffix(TF).rpartition("/")[2]
    if name == "dynamic_loss_scale":
        return [v for v in NO_COUNT if unboxed_or_none(v) not in (True, False)]
    if name.startswith("loss_scaler"):
        return [None, 8, "8", [], {}, {"loss_scale": 8.0}, TWO]
    if name == "1":  # an unused learning rate
        return [v for v in NO_NUMBER if unboxed_or_none(v) is not True] + [0.1]
    if name in SCALES | FLOATS:
        return NO_SCALE
    return [v for v in NO_COUNT if not (type(v) is int and v in LOW.get(name, ()))]


def unboxed_or_none(value: Any) -> Any:
    try:
        return unboxed(value)
    except (ValueError, RuntimeError, TypeError):
        return None


def objection(checkpoint: Any) -> str:
    """What is wrong with the way in which it is refused; "" if nothing is."""
    try:
        read(checkpoint)
    except StateError:
        return ""
    except Exception as error:
        return f"{type(error).__name__} instead of StateError: {error}"
    return "accepted"


@by_peer
def test_checkpoint_that_lacks_something_or_has_it_wrong_is_refused(name: str) -> None:
    example, found = EXAMPLES[name], {}
    for place in (*example.needed, *example.settings):
        wrong = [DROPPED] if place in example.needed else []
        for value in wrong + junk_for(place):
            said = objection(replaced(example.checkpoint, place, lambda _, value=value: value))
            if said:
                found[f"{place}: {value!r:.40}"] = said
    assert found == {}


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if EXAMPLES[name].settings and "ZeRO" not in name]
)
def test_settings_may_be_missing(name: str) -> None:
    checkpoint = EXAMPLES[name].checkpoint
    for place in EXAMPLES[name].settings:
        checkpoint = replaced(checkpoint, place, lambda _: DROPPED)
    assert read(checkpoint) == EXAMPLES[name].saved._replace(settings={})


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([*NO_SCALE, *NO_COUNT]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.data())
def test_wreck_is_refused_or_read_as_good_numbers(data: st.DataObject) -> None:
    example = EXAMPLES[data.draw(st.sampled_from(list(EXAMPLES)))]
    checkpoint = example.checkpoint
    places = data.draw(st.lists(st.sampled_from([*example.needed, *example.settings]), max_size=3))
    for place in places:
        value = data.draw(st.just(DROPPED) | anything)
        try:
            checkpoint = replaced(checkpoint, place, lambda _, value=value: value)
        except (KeyError, TypeError):
            assume(False)  # what was around it is gone already
    try:
        saved = read(checkpoint)
    except StateError:
        return
    for state in (saved.state, *(fields for _, fields in saved.losses)):
        assert type(state["scale"]) is float
        assert 0 < state["scale"] < math.inf
        assert all(type(v) is int and 0 <= v < 2**31 for k, v in state.items() if k != "scale")
    assert all(type(v) in {int, float, bool} and v >= 0 for v in saved.settings.values())
    assert saved.patience is None or 1 <= saved.patience < 2**31


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (
            {"cur_scale": 8.0, "epoch": 3, 7: 0},
            "DeepSpeed's, but lacks dynamic_loss_scale; the key",
        ),
        ({"cur_scale": 8.0, "epoch": 3, 7: 0}, "['cur_scale', 'epoch']"),
        ({**FUSED, "cur_iter": 52}, "last_overflow_iter must be a whole number from -1 to 51"),
        ({"loss_scaler": 8}, "DeepSpeed's loss_scaler must be its scaler object, got 8"),
        ({"loss_scaler": SimpleNamespace(_loss_scale=8.0)}, "lacks cur_scale"),
        ({"loss_scaler0": {"loss_scale": 8.0}}, "Apex's, but lacks unskipped"),
        ({"loss_scaler1": {}}, "Apex's, but lacks loss_scaler0"),
        ({**EXAMPLES["Apex"].checkpoint, "model": {}}, "lacks loss_scaler3"),
        ({"scale": 8.0, "growth_tracker": 1}, "Megatron's, but lacks hysteresis_tracker"),
        ({"grad_scaler": {}}, "Megatron's, but lacks scale, growth_tracker, hysteresis_tracker"),
        ({"grad_scaler": None}, "Megatron's grad_scaler must be a dict, got None"),
        ({"fin_steps": 8}, "Flax's, but lacks scale"),
        ({"a/step_counter": 8}, "Keras's, but lacks dynamic_scale"),
        ({"a/good_steps": 8}, "tf.keras's, but lacks current_loss_scale"),
        ({**of(KERAS, 3, 8.0), "a/step_counter": 4}, "several step_counter"),
        ({"0": 5, "1": 0.01, "2": np.ones(3), "3": np.ones(3)}, "LossScaleOptimizer"),
        ({"loss_scale": 8.0}, "jmp's, but lacks counter"),
        ({**JMP, "epoch": 3}, "lacks scale, growth_factor"),
        ({**JMP, "factor": 1.0}, "jmp's factor must be > 1, got 1.0"),
        ({**JMP, "loss_scale": 0.0}, "loss_scale must be a finite number > 0, got 0.0"),
        ({**JMP, "counter": 2.5}, "counter must be a whole number from 0 to 2147483647, got 2.5"),
    ],
)
def test_refusal_says_whose_it_looks_like_and_what_is_wrong(checkpoint: Any, said: str) -> None:
    with pytest.raises(StateError) as caught:
        read(checkpoint)
    assert said in str(caught.value)


def test_our_own_damaged_checkpoint_is_never_taken_for_a_peers() -> None:
    with pytest.raises(StateError, match="lacks growth_factor"):
        read({"scale": 8.0, "fin_steps": 3, "gradscale": {}})


# Going on where the peer stopped. Each peer's rule in plain Python, by its own source.

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
        return of(names, self.scale, self.good)


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
        return of(
            ("scale", "growth_tracker", "hysteresis_tracker"), self.scale, self.good, self.left
        )


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
