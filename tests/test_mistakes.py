"""Mistakes that other systems made, each with its test; and those of numerics, 1 to 10.

The numbers are those of the project's survey of 25 systems. A scenario is a function of the
scaler's class that returns what a user would see. Where torch.amp.GradScaler makes the mistake, the
same scenario shows it there; where only others do, a comment says who. TESTS lists all tests; those
from 11 on are in the files beside this one, a section each: test_mistakes_control.py,
test_mistakes_sync.py, test_mistakes_api.py, and torch's edge cases in test_mistakes_torch.py. Left
to the tests of the distributed part: 23 to 28 (a flag reduced in one code path only, a reduction
derived from the first tensor, a scaler per inner optimizer, flags summed in narrow integers, a flag
read before it is reduced, step counts that differ by rank).
"""

from __future__ import annotations

import ast
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from gradscale import Dynamic, GradStats
from one_weight import HUGE, OURS, TORCH, Kind, Run, root

SINGLE_PROCESS = [*range(1, 23), *range(29, 41)]
# Edge cases of torch.amp.GradScaler that are none of the mistakes (T1 is 1 and 2, T2 is 11,
# T3 is 34, T4 is 31, T11 is 35, T12 is 36).
TORCH_EDGES = ["T5", "T6", "T7", "T8", "T9", "T10", "T13"]
TESTS: dict[int | str, str] = {
    # Numerics.
    1: "test_scale_never_decays_to_zero",
    2: "test_small_scale_never_makes_weights_infinite",
    3: "test_scale_never_grows_to_infinity",
    4: "test_gradient_is_divided_by_the_scale_it_was_made_with",
    5: "test_float16_loss_is_scaled_in_float32",
    6: "test_unscaling_float16_gradients_does_not_round_the_reciprocal",
    7: "test_finite_gradients_with_an_infinite_sum_and_norm_are_applied",
    8: "test_one_bad_sample_leaves_no_trace_in_the_scale",
    9: "test_scale_holds_still_between_growths",
    10: "test_backoff_takes_effect_in_the_next_step",
    # Control logic.
    11: "test_counter_beyond_the_interval_still_grows_the_scale",
    12: "test_hysteresis_counts_consecutive_overflows",
    13: "test_every_way_to_step_follows_the_same_rule",
    14: "test_every_setting_has_an_effect_and_survives_copying",
    15: "test_scale_grows_on_the_step_that_completes_the_interval",
    16: "test_floor_does_not_end_the_run",
    17: "test_nonfinite_gradients_are_never_accepted",
    18: "test_defaults_waste_no_step_on_an_ordinary_float16_model",
    # Synchronisation.
    19: "test_device_is_read_at_most_once_a_step",
    20: "test_no_collective_is_called_for_plain_tensors",
    21: "test_scale_tensor_is_updated_in_place",
    22: "test_fused_step_checks_gradients_without_writing_them",
    # API.
    29: "test_skip_is_reported",
    30: "test_nothing_of_torch_or_the_optimizer_is_patched",
    31: "test_closure_is_right_by_position_and_by_keyword",
    32: "test_optimizer_is_not_known_by_its_address_alone",
    33: "test_update_after_each_optimizer_moves_the_scale_once",
    34: "test_setters_take_any_number_and_refuse_nonsense",
    35: "test_checkpoint_keeps_new_settings_if_asked_and_is_never_half_loaded",
    36: "test_all_gradient_dtypes_work_alike",
    37: "test_scaler_never_disables_itself",
    38: "test_norm_of_a_skipped_step_is_no_number",
    39: "test_library_prints_nothing",
    40: "test_documented_rule_is_the_rule",
    # Edge cases.
    "T5": "test_optimizers_decide_alone_and_the_scale_falls_once",
    "T6": "test_parameter_of_two_optimizers_is_unscaled_once",
    "T7": "test_nan_made_after_unscale_is_not_applied",
    "T8": "test_forgotten_zero_grad_after_a_skip_does_no_harm",
    "T9": "test_optimizer_without_gradients_steps_with_a_warning",
    "T10": "test_constructor_refuses_unusable_settings",
    "T13": "test_skipped_fused_step_leaves_no_trace",
}


def test_every_mistake_of_a_single_process_has_its_test() -> None:
    defined = []
    for file in Path(__file__).parent.glob("test_mistakes*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        defined += [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert list(TESTS) == [*SINGLE_PROCESS, *TORCH_EDGES]
    assert len(set(TESTS.values())) == len(TESTS)
    assert [name for name in TESTS.values() if defined.count(name) != 1] == []


# Numerics.


def scale_after_divergence(kind: Kind) -> float:
    return Run(kind, weight=0.0).train(*[1.0] * 200, loss=root)[-1]


def test_scale_never_decays_to_zero() -> None:
    assert scale_after_divergence(TORCH) == 0.0
    assert scale_after_divergence(OURS) == 2.0**-14


def weight_after_divergence(kind: Kind) -> float:
    """200 overflows, then one step from 3 with gradient 1."""
    run = Run(kind, weight=0.0)
    run.train(*[1.0] * 200, loss=root)
    nn.init.constant_(run.model.weight, 3.0)
    run.train(1.0)
    return run.weight


def accumulate_at_a_small_scale(kind: Kind) -> tuple[float, float]:
    """Two gradients of 2**127: times 0.5 their sum is finite, and unscaled it is not."""
    run = Run(kind, init_scale=0.5)
    for _ in range(2):
        run.scaler.scale(run.loss(2.0**127)).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return run.weight, run.scaler.get_scale()


def test_small_scale_never_makes_weights_infinite() -> None:
    assert math.isnan(weight_after_divergence(TORCH))
    assert weight_after_divergence(OURS) == 2.0
    assert accumulate_at_a_small_scale(TORCH) == (-math.inf, 0.5)
    assert accumulate_at_a_small_scale(OURS) == (1.0, 0.5)


def grow_and_overflow(kind: Kind, **settings: Any) -> list[float]:
    """The scale after 200 steps that each may double it, and after one overflow."""
    return Run(kind, growth_interval=1, **settings).train(*[0.0] * 200, HUGE)[-2:]


def test_scale_never_grows_to_infinity(one_rank: Any) -> None:
    # Keras 3, Megatron, Paddle; in torch not GradScaler but FSDP's scaler on the CPU.
    assert grow_and_overflow(ShardedGradScaler, process_group=one_rank) == [math.inf] * 2
    assert grow_and_overflow(OURS) == [2.0**64, 2.0**63]
    assert grow_and_overflow(OURS, max_scale=2.0**127) == [2.0**127, 2.0**126]


def weight_after_early_update(kind: Kind) -> float:
    """The user sets a scale between the backward pass and the step."""
    run = Run(kind)
    run.scaler.scale(run.loss(1.0)).backward()
    run.scaler.update(2.0**17)
    run.scaler.step(run.optimizer)
    return run.weight


def test_gradient_is_divided_by_the_scale_it_was_made_with() -> None:
    assert weight_after_early_update(TORCH) == 0.5
    assert weight_after_early_update(OURS) == 0.0
    # DeepSpeed and ColossalAI halve every gradient that makes the scale grow.
    run = Run(OURS, growth_interval=1)
    assert [(run.train(1.0), run.weight) for _ in range(3)] == [
        ([2.0**17], 0.0),
        ([2.0**18], -1.0),
        ([2.0**19], -2.0),
    ]


def step_with_a_float16_loss(kind: Kind) -> tuple[float, list[float], list[str]]:
    """The weight after it, a float16 vector scaled thereafter, and the warnings."""
    run = Run(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.train(1.0, loss=lambda outputs: outputs.half().sum()) == [2.0**15]
        scaled = run.scaler.scale(torch.tensor([3.0, 0.5], dtype=torch.float16))
    return run.weight, scaled.tolist(), [str(warning.message) for warning in caught]


def test_float16_loss_is_scaled_in_float32() -> None:
    assert step_with_a_float16_loss(TORCH) == (1.0, [math.inf, 2.0**14], [])
    weight, scaled, warned = step_with_a_float16_loss(OURS)
    assert (weight, scaled) == (0.0, [3 * 2.0**15, 2.0**14])
    assert ["loss.float()" in message for message in warned] == [True]


def test_unscaling_float16_gradients_does_not_round_the_reciprocal() -> None:
    # MindSpore: 1 / scale is 0 in float16 from 2**25 on. FSDP's and Paddle's scalers keep float16.
    run = Run(OURS, init_scale=2.0**30)
    run.model.half()

    def loss(gradient: float) -> Tensor:
        return run.model(torch.ones(1, dtype=torch.float16)).float().sum() * gradient

    run.scaler.scale(loss(2.0**-20)).backward()
    run.scaler.unscale_(run.optimizer)
    assert run.model.weight.grad.item() == 2.0**-20
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    # What float16 cannot hold when it is unscaled is handed out in float32.
    run.scaler.scale(loss(2.0**-30)).backward()
    assert run.scaler.clip_grad_norm_(run.optimizer, 1.0).item() == 2.0**-30
    (penalty,) = run.scaler.grad(loss(2.0**-30), [run.model.weight])
    assert penalty.item() == 2.0**-30


@pytest.mark.parametrize("max_norm", [None, 2.0**110])
def test_finite_gradients_with_an_infinite_sum_and_norm_are_applied(max_norm: float | None) -> None:
    # apex, DeepSpeed and fp16_utils test the sum of the gradients, fairseq their norm.
    run = Run(OURS, init_scale=2.0**10)
    run.model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(run.model.weight)
    run.optimizer = SGD(run.model.parameters(), lr=1.0)
    run.scaler.scale(run.model(torch.full((4,), 2.0**117)).sum()).backward()
    assert run.model.weight.grad.tolist() == [[2.0**127] * 4]
    moved = 2.0**117
    if max_norm:
        assert run.scaler.clip_grad_norm_(run.optimizer, max_norm).item() == 2.0**118
        moved = max_norm / 2
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.model.weight.tolist() == [[-moved] * 4]
    assert run.scaler.get_scale() == 2.0**10


def scale_and_counter_after_a_bad_sample(kind: Kind) -> tuple[float, int]:
    run = Run(kind)
    run.train(1.0, 1.0, 1.0, math.nan)
    state = run.scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def test_one_bad_sample_leaves_no_trace_in_the_scale() -> None:
    assert scale_and_counter_after_a_bad_sample(TORCH) == (2.0**15, 0)
    assert scale_and_counter_after_a_bad_sample(OURS) == (2.0**16, 3)
    # OpenSeq2Seq's LogMax needs 12,000 steps to forget an infinite amax, and never forgets a zero.
    policy = Dynamic()
    known = policy.update(policy.init(), GradStats(finite=True))
    for amax in (0.0, math.inf, math.nan):
        assert policy.update(policy.init(), GradStats(finite=True, amax=amax)) == known


def test_scale_holds_still_between_growths() -> None:
    # Graphcore doubles or halves at every step. A gradient of 2**117 fits up to scale 2**10.
    calm, steep = (Run(OURS, weight=0.0, init_scale=2.0**10, growth_interval=10) for _ in range(2))
    assert calm.train(*[1.0] * 20) == [*[2.0**10] * 9, *[2.0**11] * 10, 2.0**12]
    steep.optimizer.param_groups[0]["lr"] = 0.0
    assert steep.train(*[2.0**117] * 33) == [*[2.0**10] * 9, 2.0**11, 2.0**10] * 3


def test_backoff_takes_effect_in_the_next_step() -> None:
    # MXNet applies the lower scale one step late: an overflow costs two steps and two halvings.
    run = Run(OURS, weight=0.0, init_scale=2.0**11)
    assert run.train(2.0**117, 2.0**117) == [2.0**10, 2.0**10]
    assert run.weight == -(2.0**117)
