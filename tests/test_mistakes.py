"""Mistakes that other systems made, 1 to 22: numerics, control logic, synchronisation.

The numbers are those of the project's survey of 25 systems. A scenario is a function of the
scaler's class that returns what a user would see. Where torch.amp.GradScaler makes the mistake, the
same scenario shows it there; where only others do, a comment says who. Mistakes of the API are in
test_mistakes_api.py. Left to the tests of the distributed part: 23 to 28 (a flag reduced in one
code path only, a reduction derived from the first tensor, a scaler per inner optimizer, flags
summed in narrow integers, a flag read before it is reduced, step counts that differ by rank).
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import Dynamic, GradStats, Off, Static
from gradscale.torch import GradScaler

SINGLE_PROCESS = [*range(1, 23), *range(29, 41)]
# Edge cases of torch.amp.GradScaler that are none of the mistakes (T1 is 1 and 2, T2 is 11,
# T3 is 34, T4 is 31, T11 is 35, T12 is 36).
TORCH_EDGES = ["T5", "T6", "T7", "T8", "T9", "T10", "T13"]
TESTS: dict[int | str, str] = {
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
    11: "test_counter_beyond_the_interval_still_grows_the_scale",
    12: "test_hysteresis_counts_consecutive_overflows",
    13: "test_every_way_to_step_follows_the_same_rule",
    14: "test_every_setting_has_an_effect_and_survives_copying",
    15: "test_scale_grows_on_the_step_that_completes_the_interval",
    16: "test_floor_does_not_end_the_run",
    17: "test_nonfinite_gradients_are_never_accepted",
    18: "test_defaults_waste_no_step_on_an_ordinary_float16_model",
    19: "test_device_is_read_at_most_once_a_step",
    20: "test_no_collective_is_called_for_plain_tensors",
    21: "test_scale_tensor_is_updated_in_place",
    22: "test_fused_step_checks_gradients_without_writing_them",
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
    "T5": "test_optimizers_decide_alone_and_the_scale_falls_once",
    "T6": "test_parameter_of_two_optimizers_is_unscaled_once",
    "T7": "test_nan_made_after_unscale_is_not_applied",
    "T8": "test_forgotten_zero_grad_after_a_skip_does_no_harm",
    "T9": "test_optimizer_without_gradients_steps_with_a_warning",
    "T10": "test_constructor_refuses_unusable_settings",
    "T13": "test_skipped_fused_step_leaves_no_trace",
}

TORCH, OURS = torch.amp.GradScaler, GradScaler
Kind = type[torch.amp.GradScaler]
HUGE = 2.0**120
"""A gradient that overflows float32 at any scale from 2**8 on."""


class Run:
    """Gradient descent with rate 1 on y = weight * x, where the gradient is x; and its scaler."""

    def __init__(self, kind: Kind, weight: float = 1.0, fused: bool = False, **settings: Any):
        self.scaler: Any = kind("cpu", **settings)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, weight)
        self.optimizer = SGD(self.model.parameters(), lr=1.0, fused=fused)

    def loss(self, x: float) -> Tensor:
        return self.model(torch.tensor([x])).sum()

    def train(self, *inputs: float, loss: Callable[[Tensor], Tensor] = torch.sum) -> list[float]:
        """torch's loop; the scale after every step."""
        scales = []
        for x in inputs:
            self.optimizer.zero_grad()
            self.scaler.scale(loss(self.model(torch.tensor([x])))).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales

    @property
    def weight(self) -> float:
        return self.model.weight.item()


def root(outputs: Tensor) -> Tensor:
    """At 0 a finite loss whose gradient is infinite, whatever the scale."""
    return outputs.sqrt().sum()


def test_every_mistake_of_a_single_process_has_its_test() -> None:
    defined = []
    for file in (Path(__file__), Path(__file__).with_name("test_mistakes_api.py")):
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


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


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


# Control logic.


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


def scales_with_a_counter_beyond_the_interval(kind: Kind, load: bool) -> list[float]:
    """Five finite steps at interval 100, then ten at interval 4, set or loaded."""
    run = Run(kind, init_scale=1.0, growth_interval=100)
    run.train(*[1.0] * 5)
    if load:
        run.scaler.load_state_dict({**run.scaler.state_dict(), "growth_interval": 4})
    else:
        run.scaler.set_growth_interval(4)
    return run.train(*[1.0] * 10)


@pytest.mark.parametrize("load", [False, True])
def test_counter_beyond_the_interval_still_grows_the_scale(load: bool) -> None:
    assert scales_with_a_counter_beyond_the_interval(TORCH, load) == [1.0] * 10
    grown = [*[2.0] * 4, *[4.0] * 4, *[8.0] * 2]
    assert scales_with_a_counter_beyond_the_interval(OURS, load) == grown


def test_hysteresis_counts_consecutive_overflows() -> None:
    # Megatron documents that and counts all since the last growth; so do DeepSpeed and ColossalAI.
    run = Run(OURS, hysteresis=2)
    assert run.train(*[HUGE, 1.0] * 5) == [2.0**16] * 10
    assert run.train(HUGE, HUGE, HUGE) == [2.0**16, 2.0**15, 2.0**14]
    assert run.train(1.0, HUGE, HUGE) == [2.0**14, 2.0**14, 2.0**13]


def step_plainly(run: Run, x: float) -> None:
    run.scaler.scale(run.loss(x)).backward()
    run.scaler.step(run.optimizer)


def step_unscaled(run: Run, x: float) -> None:
    run.scaler.backward(run.loss(x))
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)


def step_clipped(run: Run, x: float) -> None:
    run.scaler.backward(run.loss(x))
    run.scaler.clip_grad_norm_(run.optimizer, 1e9)
    run.scaler.step(run.optimizer)


def step_by_closure(run: Run, x: float) -> None:
    def closure() -> Tensor:
        loss = run.loss(x)
        run.scaler.backward(loss)
        return loss

    run.scaler.step(run.optimizer, closure)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [step_plainly, step_unscaled, step_clipped, step_by_closure])
def test_every_way_to_step_follows_the_same_rule(
    step: Callable[[Run, float], None], fused: bool
) -> None:
    # DeepSpeed's two optimizers, Paddle's two kernels and MindSpore's three classes disagree.
    dice = random.Random(0)
    policy = Dynamic(init_scale=2.0**30, growth_interval=3, hysteresis=2)
    run, state, weight = Run(OURS, 0.0, fused, policy=policy), policy.init(), 0.0
    scales = set()
    for x in dice.choices([0.5, 1.0, 2.0, HUGE], k=100):
        run.optimizer.zero_grad()
        step(run, x)
        run.scaler.update()
        state = policy.update(state, GradStats(finite=x < HUGE))
        weight -= x if x < HUGE else 0.0
        assert (run.scaler.get_scale(), run.weight) == (state.scale, weight)
        scales.add(state.scale)
    assert len(scales) > 3


def reloaded(scaler: GradScaler) -> GradScaler:
    """A scaler of other settings that has loaded the checkpoint of `scaler`."""
    other = GradScaler("cpu", 2.0, 8.0, 0.125, 1, enabled=scaler.is_enabled(), hysteresis=3)
    other.load_state_dict(scaler.state_dict())
    return other


BASE = {"init_scale": 16.0, "growth_interval": 3}
SETTINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "none": (BASE, [16, 16, 32, 16, 8, 8, 8]),
    "init_scale": (BASE | {"init_scale": 64}, [64, 64, 128, 64, 32, 32, 32]),
    "growth_factor": (BASE | {"growth_factor": 4}, [16, 16, 64, 32, 16, 16, 16]),
    "backoff_factor": (BASE | {"backoff_factor": 0.25}, [16, 16, 32, 8, 2, 2, 2]),
    "growth_interval": (BASE | {"growth_interval": 2}, [16, 32, 32, 16, 8, 8, 16]),
    "enabled": (BASE | {"enabled": False}, [1, 1, 1, 1, 1, 1, 1]),
    "policy": ({"policy": Static(init_scale=4)}, [4, 4, 4, 4, 4, 4, 4]),
    "min_scale": (BASE | {"min_scale": 16}, [16, 16, 32, 16, 16, 16, 16]),
    "max_scale": (BASE | {"max_scale": 16}, [16, 16, 16, 8, 4, 4, 4]),
    "hysteresis": (BASE | {"hysteresis": 2}, [16, 16, 32, 32, 16, 16, 16]),
}


def test_every_setting_has_an_effect_and_survives_copying() -> None:
    # Dead are apex' scale_factor and DeepSpeed's hysteresis; a copy in jmp loses min_loss_scale.
    settings = set(inspect.signature(GradScaler.__init__).parameters) - {"self", "device"}
    assert settings | {"none"} == set(SETTINGS)
    copies = [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), reloaded]
    for name, (given, scales) in SETTINGS.items():
        for duplicate in copies:
            run = Run(OURS, **given)
            run.optimizer.param_groups[0]["lr"] = 0.0
            run.scaler = duplicate(run.scaler)
            assert (name, run.train(*[0.0] * 3, *[2.0**126] * 2, *[0.0] * 2)) == (name, scales)


def test_scale_grows_on_the_step_that_completes_the_interval() -> None:
    # Flax and DeepSpeed grow one step later.
    assert Run(OURS, growth_interval=3).train(*[1.0] * 4) == [2.0**16, 2.0**16, 2.0**17, 2.0**17]


def test_floor_does_not_end_the_run() -> None:
    # DeepSpeed raises an Exception there, fairseq a FloatingPointError.
    run = Run(OURS, weight=0.0, init_scale=4.0, min_scale=1.0, growth_interval=2)
    assert run.train(*[1.0] * 60, loss=root)[-58:] == [1.0] * 58
    nn.init.constant_(run.model.weight, 3.0)
    assert run.train(1.0, 1.0) == [1.0, 2.0]
    assert run.weight == 1.0


@pytest.mark.parametrize("loss", [root, lambda outputs: outputs.sum() * math.nan])
@pytest.mark.parametrize("fused", [False, True])
def test_nonfinite_gradients_are_never_accepted(
    fused: bool, loss: Callable[[Tensor], Tensor]
) -> None:
    # optax' apply_if_finite lets the NaN through after max_consecutive_errors of them.
    for policy in (Dynamic(), Static(init_scale=1.0), Off()):
        run = Run(OURS, weight=0.0, fused=fused, policy=policy)
        run.train(*[1.0] * 100, loss=loss)
        assert run.weight == 0.0


def skipped_steps_of_a_float16_model(**settings: Any) -> int:
    """Of 20 steps of a small classifier under float16 autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    scaler, optimizer = GradScaler("cpu", **settings), SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 8), torch.randint(10, (32,))
    skipped = 0
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        assert outputs.dtype is torch.float16
        scaler.scale(nn.functional.cross_entropy(outputs.float(), targets)).backward()
        before = model[0].weight.clone()
        scaler.step(optimizer)
        scaler.update()
        skipped += torch.equal(model[0].weight, before)
    return skipped


def test_defaults_waste_no_step_on_an_ordinary_float16_model() -> None:
    # Megatron, DeepSpeed and fp16_utils start at 2**32, MindSpore at 2**24.
    assert skipped_steps_of_a_float16_model(init_scale=2.0**32) > 10
    assert skipped_steps_of_a_float16_model() == 0


# Synchronisation.


class Recorder(TorchDispatchMode):
    """Notes every operation; a number that is read from a device without data is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((op, args))
        read = op is torch.ops.aten._local_scalar_dense.default
        return 0 if read and args[0].is_meta else op(*args, **(kwargs or {}))

    def reads(self) -> int:
        """How often the host would have waited for the device "meta"."""
        read = torch.ops.aten._local_scalar_dense.default
        return sum(op is read and args[0].is_meta for op, args in self.calls)


class DeviceSGD(SGD):
    """Skips on the device, by torch's contract."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            unscaled = param.grad if self.grad_scale is None else param.grad / self.grad_scale
            param.sub_(torch.where(self.found_inf > 0, torch.zeros_like(unscaled), unscaled))


def reads_of_a_step(kind: Kind, optimizer_class: type[Optimizer], clip: bool) -> list[int]:
    """In each of three steps of 50 parameters on a device where reading is the only way to wait."""
    model = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(25)))
    scaler: Any = kind("meta", growth_interval=1)
    optimizer = optimizer_class(model.parameters(), lr=1.0)
    reads = []
    for _ in range(3):
        with Recorder() as recorder:
            scaler.scale(model(torch.ones(2, 2, device="meta")).sum()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reads.append(recorder.reads())
    return reads


@pytest.mark.parametrize("clip", [False, True])
def test_device_is_read_at_most_once_a_step(clip: bool) -> None:
    # apex, DeepSpeed, ColossalAI and fairscale wait once per parameter.
    assert reads_of_a_step(OURS, SGD, clip) == [1, 1, 1]
    assert reads_of_a_step(OURS, AdamW, clip) == [1, 1, 1]
    assert reads_of_a_step(OURS, DeviceSGD, clip) == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
def test_fused_step_never_waits_for_the_gpu(clip: bool) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8, device="cuda") for _ in range(25))
    optimizer = AdamW(layers.parameters(), fused=True)
    scaler = GradScaler(growth_factor=4.0, growth_interval=3)
    inputs = torch.tensor([1.0, HUGE, 1.0, 1.0, 1.0, math.nan], device="cuda").expand(8, 6).T
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            inputs.sum().item()
        for x in inputs:
            scaler.scale(sum(layer(x).mean() for layer in layers)).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**17  # halved once, grown once, and the NaN did not count
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}


@pytest.mark.usefixtures("one_rank")
def test_no_collective_is_called_for_plain_tensors() -> None:
    # Composer gathers pickled objects in every closure.
    def collectives(recorder: Recorder) -> int:
        return sum(op.namespace == "c10d" for op, _ in recorder.calls)

    with Recorder() as recorder:
        dist.all_gather_object([None], "found")
    assert collectives(recorder) > 0
    run = Run(OURS)
    with Recorder() as recorder:
        run.train(1.0, HUGE)
        run.optimizer.zero_grad()
        step_by_closure(run, 1.0)
    assert len(recorder.calls) > 0
    assert collectives(recorder) == 0


def test_scale_tensor_is_updated_in_place() -> None:
    # Megatron and ColossalAI rebind it, so that a captured CUDA graph goes on with the old one.
    run = Run(OURS, growth_interval=1)
    run.train(1.0)
    tensors = [run.scaler._scale, run.scaler._growth_tracker]
    addresses = [tensor.data_ptr() for tensor in tensors]
    state = run.scaler.state_dict()
    assert run.train(1.0, HUGE) == [2.0**18, 2.0**17]
    run.scaler.update(4.0)
    assert tensors[0].item() == 4.0
    run.scaler.load_state_dict(state)
    assert tensors[0].item() == 2.0**17
    assert run.scaler._scale is tensors[0]
    assert run.scaler._growth_tracker is tensors[1]
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def gradient_writes_before_a_fused_step(kind: Kind) -> list[str]:
    """The operations that wrote to the gradient before the optimizer's kernel did."""
    run = Run(kind, fused=True)
    run.scaler.scale(run.loss(1.0)).backward()
    grad = run.model.weight.grad
    writes = []
    with Recorder() as recorder:
        run.scaler.step(run.optimizer)
    for op, args in recorder.calls:
        for argument, value in zip(op._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = value if isinstance(value, list) else [value]
            if written and any(
                isinstance(t, Tensor) and t.data_ptr() == grad.data_ptr() for t in tensors
            ):
                writes.append(op.name())
    return writes


def test_fused_step_checks_gradients_without_writing_them() -> None:
    kernel = "aten::_fused_sgd_"
    check = "aten::_amp_foreach_non_finite_check_and_unscale_"
    assert gradient_writes_before_a_fused_step(TORCH) == [check, kernel]
    assert gradient_writes_before_a_fused_step(OURS) == [kernel]
