"""The peers' checkpoints: read to the number, going on where they stopped, or refused whole.

The structures are those that these versions save: Apex before the removal of `apex.amp` (2025),
DeepSpeed 0.19.8, Megatron-LM core (2024), Flax 0.12.8, Keras 3.0 to 3.15.1, tf.keras 2.12, jmp
0.0.4. How a run goes on after that is in `test_peers_rules.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given

from gradscale.checkpoints.format import Saved, read
from gradscale.errors import StateError
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
        ({"loss_scaler": 8}, "DeepSpeed's loss_scaler must be a dict or an object, got 8"),
        ({"loss_scaler": SimpleNamespace(_loss_scale=8.0)}, "lacks cur_scale"),
        ({"loss_scaler0": {"loss_scale": 8.0}}, "Apex's, but lacks unskipped"),
        ({"loss_scaler1": {}}, "Apex's, but lacks loss_scaler0"),
        ({**EXAMPLES["Apex"].checkpoint, "model": {}}, "lacks loss_scaler3"),
        ({"scale": 8.0, "growth_tracker": 1}, "Megatron's, but lacks hysteresis_tracker"),
        ({"grad_scaler": {}}, "Megatron's, but lacks scale, growth_tracker, hysteresis_tracker"),
        ({"grad_scaler": None}, "Megatron's grad_scaler must be a dict or an object, got None"),
        ({"fin_steps": 8}, "Flax's, but lacks scale"),
        ({"a/step_counter": 8}, "Keras's, but lacks dynamic_scale"),
        ({"a/good_steps": 8}, "tf.keras's, but lacks current_loss_scale"),
        ({**of(KERAS, 3, 8.0), "a/step_counter": 4}, "more than one step_counter"),
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
