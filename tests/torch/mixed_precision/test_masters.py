"""Models that are cast, and masters for any optimizer."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision.casting import NORMS, CastForward, cast, lift, widen_states
from gradscale.torch.mixed_precision.masters import Masters
from gradscale.torch.optim import SGD as OwnSGD
from gradscale.torch.optim import master_bits
from gradscale.torch.telemetry.names import bare
from sharded_names import fully_shard

torch.set_num_threads(1)
HALVES = [torch.float16, torch.bfloat16]


class Tied(nn.Module):
    """Words in, words out, with one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("table", torch.linspace(0, 1, 8) ** 9)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, numbers: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        x = self.inner(self.norm(self.words(numbers) + self.table))
        if bias is not None:
            x = x + bias
        return {"logits": self.head(x), "numbers": numbers}


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


# Casting.


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_cast_and_norms_and_buffers_are_not(dtype: torch.dtype) -> None:
    model = seeded(Tied)
    params = dict(model.named_parameters())
    cast(model, dtype)
    for name, param in model.named_parameters():
        assert param is params[name]  # so an optimizer still has it
        norm = name.startswith("norm") or name == "inner.1.weight"
        assert param.dtype is (torch.float32 if norm else dtype), name
    assert model.head.weight is model.words.weight
    assert (model.table.dtype, model.count.dtype) == (torch.float32, torch.int64)
    out = model(torch.arange(10), bias=torch.ones(8))
    assert (out["logits"].dtype, out["numbers"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cast_model_computes_what_it_did_but_for_rounding(dtype: torch.dtype) -> None:
    model = seeded(Tied)
    before = model(torch.arange(10))["logits"]
    wide = before.detach().abs().max()
    cast(model, dtype)
    after = model(torch.arange(10))["logits"]
    # Each of the six operations rounds once, and the weights once; sums are of eight.
    assert (after - before).abs().max() <= 16 * torch.finfo(dtype).eps * wide
    with torch.autocast("cpu", dtype=dtype):  # within, too, it is the same
        assert torch.equal(model(torch.arange(10))["logits"], after)


def test_inputs_are_cast_where_they_come_in() -> None:
    seen = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(
            self, x: Tensor, more: tuple[Tensor, ...], *, key: Tensor, number: int
        ) -> Tensor:
            seen.extend([x.dtype, more[0].dtype, more[1].dtype, key.dtype])
            return x * self.weight * number

    model = Look()
    cast(model, torch.float16)
    single, double = torch.ones(3), torch.ones(3, dtype=torch.float64)
    out = model(single, (single, torch.ones(3, dtype=torch.int32)), key=double, number=2)
    assert seen == [torch.float16, torch.float16, torch.int32, torch.float64]
    assert out.dtype is torch.float32
    assert torch.equal(out, torch.full((3,), 2.0))


class Told(OrderedDict[str, Any]):
    """What some libraries return."""


@dataclasses.dataclass
class Said:
    logits: Tensor
    state: list[Tensor]
    number: int = 3


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_outputs_of_any_kind_leave_as_float32() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            told = Told(logits=y, n=1)
            return told, Said(y, [y]), Pair(y, y), {"y": [y]}, "text", None

    model = Many()
    cast(model, torch.float16)
    told, said, pair, plain, *rest = model(torch.ones(1, 2))
    assert type(told) is Told
    assert told["n"] == 1
    found = [told["logits"], said.logits, said.state[0], pair.left, pair.right, plain["y"][0]]
    assert {each.dtype for each in found} == {torch.float32}
    assert (type(pair), said.number, rest) == (Pair, 3, ["text", None])


def test_what_is_given_to_be_filled_is_filled() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, cache: dict[str, Tensor], seen: list[Tensor]) -> Tensor:
            cache["y"] = self.layer(x + cache.get("x", 0))
            seen.append(x)
            return cache["y"]

    model = Fills()
    cast(model, torch.float16)
    cache: dict[str, Tensor] = {"x": torch.ones(2)}
    seen: list[Tensor] = []
    model(torch.ones(1, 2), cache, seen=seen)
    assert set(cache) == {"x", "y"}
    assert len(seen) == 1


def test_several_models_are_cast_or_none() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight.grad = torch.zeros(2, 2)
    params = [*one.parameters(), *other.parameters()]
    with pytest.raises(CallOrderError, match="has a gradient"):
        MixedPrecision([one, other], optim.SGD(params), "fp16-master")
    assert {param.dtype for param in params} == {torch.float32}
    other.weight.grad = None
    one.weight = other.weight
    params = [*one.parameters(), other.bias]
    mp = MixedPrecision([one, other], optim.SGD(params), "fp16-master", keep_float32=[one])
    assert one.weight is other.weight
    assert one.weight.dtype is torch.float32
    assert mp.run(lambda: (one(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum()).applied


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16", "fp16-master", "bf16-master"])
@pytest.mark.parametrize("half", HALVES)
def test_models_that_come_in_half(mode: str, half: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(half)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    mp = MixedPrecision(model, optimizer, mode)
    for _ in range(3):
        assert mp.run(lambda: model(torch.randn(8, 4)).float().square().mean()).applied


class Record(nn.Linear):
    """A layer that remembers the formats it ran in."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.formats = x.dtype, self.weight.dtype, out.dtype
        return out


def chain() -> nn.Sequential:
    return nn.Sequential(Record(4, 4), nn.Sequential(Record(4, 4), nn.ReLU()), Record(4, 4))


@pytest.mark.parametrize("keep", ["1", "1*", "module", "class"])
def test_what_is_kept_runs_in_float32(keep: str) -> None:
    model = chain()

    class Kept(nn.Sequential):
        pass

    model[1] = Kept(*model[1])
    kept: Any = {"module": model[1], "class": Kept}.get(keep, keep)
    cast(model, torch.float16, keep_float32=(*NORMS, kept))
    model(torch.ones(2, 4))
    single, half = torch.float32, torch.float16
    assert model[0].formats == (half, half, half)
    assert model[1][0].formats == (single, single, single)
    assert model[2].formats == (single, half, half)  # autocast casts what comes in


def test_what_is_kept_runs_in_float32_under_autocast_alone() -> None:
    model = chain()
    MixedPrecision(model, optim.SGD(model.parameters()), "bf16", keep_float32=["1"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 4))
    assert model[1][0].formats == (torch.float32,) * 3
    assert model[2].formats[2] is torch.bfloat16


def test_what_is_tied_to_a_kept_weight_is_kept() -> None:
    model = seeded(Tied)
    cast(model, torch.float16, keep_float32=(*NORMS, "head"))
    assert model.words.weight.dtype is torch.float32
    assert model.words.weight is model.head.weight
    assert model.inner[0].weight.dtype is torch.float16
    assert model(torch.arange(3))["logits"].dtype is torch.float32


def test_frozen_weights_are_cast_too_and_other_formats_are_not() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    model.double_weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.whole = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    cast(model, torch.bfloat16)
    formats = {name: param.dtype for name, param in model.named_parameters()}
    assert formats["weight"] is formats["bias"] is torch.bfloat16
    assert (formats["double_weight"], formats["whole"]) == (torch.float64, torch.int8)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_before_or_after() -> None:
    numbers = torch.arange(10)
    plain, early, late = (seeded(Tied) for _ in range(3))
    cast(plain, torch.bfloat16)
    compiled = torch.compile(early, backend="eager", fullgraph=True)
    compiled(numbers)
    cast(compiled, torch.bfloat16)
    cast(late, torch.bfloat16)
    after = torch.compile(late, backend="eager", fullgraph=True)
    expected = plain(numbers)["logits"]
    assert torch.equal(compiled(numbers)["logits"], expected)
    assert torch.equal(after(numbers)["logits"], expected)
    assert bare(compiled) is early
    torch._dynamo.reset()


def test_a_copy_and_a_pickle_of_a_cast_model_run_by_themselves() -> None:
    model = seeded(Tied)
    cast(model, torch.float16, keep_float32=(*NORMS, "inner"))
    expected = model(torch.arange(4))["logits"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.forward.module is other
        assert other.inner.forward.module is other.inner
        with torch.no_grad():
            model.words.weight.zero_()
        assert torch.equal(other(torch.arange(4))["logits"], expected)


def test_the_signature_is_that_of_the_model() -> None:
    model = seeded(Tied)
    before = inspect.signature(model.forward)
    cast(model, torch.float16)
    assert inspect.signature(model.forward) == before
    twice = CastForward(model, torch.float32, None)
    assert inspect.signature(twice) == before


@pytest.mark.parametrize(
    ("keep", "message"), [(3, "takes names with wildcards"), (int, "takes names with wildcards")]
)
def test_odd_things_are_not_kept(keep: Any, message: str) -> None:
    model = seeded(Tied)
    with pytest.raises(SettingError, match=message):
        cast(model, torch.float16, keep_float32=[keep])
    assert all(param.dtype is torch.float32 for param in model.parameters())


def test_refusals_change_nothing(one_rank: None) -> None:
    model = seeded(Tied)
    with pytest.raises(SettingError, match=r"torch\.float16 or torch\.bfloat16, got torch\.int8"):
        cast(model, torch.int8)
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    with pytest.raises(CallOrderError, match=r"'words\.weight' has a gradient"):
        cast(model, torch.float16)
    model.zero_grad()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(SettingError, match="wrap it afterwards"):
        MixedPrecision(wrapped, optim.SGD(model.parameters()), "fp16-master")
    assert all(param.dtype is torch.float32 for param in model.parameters())
    cast(model, torch.float16)
    with pytest.raises(SettingError, match="cast already"):
        cast(model, torch.float16)


def test_weights_that_float16_does_not_have_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight[0, 0] = 65519.0  # still rounds to 65504
        cast(copy.deepcopy(model), torch.float16)
        model[1].weight[0, 0] = 65520.0
    message = r"'1\.weight' has weights beyond 65504.*keep_float32=\['1'\]"
    with pytest.raises(SettingError, match=message):
        cast(model, torch.float16)
    assert all(param.dtype is torch.float32 for param in model.parameters())
    cast(copy.deepcopy(model), torch.bfloat16)
    cast(model, torch.float16, keep_float32=["1"])


def test_a_gradient_of_what_is_not_cast_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    lift(model)
    assert model[1].weight.dtype is torch.float32


def test_sharded_weights_are_refused(one_rank: None) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(SettingError, match=r"'weight' is sharded.*MixedPrecisionPolicy"):
        cast(model, torch.float16)


def test_lifting_takes_states_along_and_leaves_the_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    model[0].requires_grad_(False)
    optimizer = optim.SGD(model[1].parameters(), lr=0.5, momentum=0.9)
    for param in model[1].parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    values = [param.detach().float() for param in model.parameters()]
    lift(model)
    widen_states([optimizer])
    assert [param.dtype for param in model.parameters()] == [torch.float16] * 2 + [
        torch.float32
    ] * 2
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert all(s["momentum_buffer"].dtype is torch.float32 for s in optimizer.state.values())
    lift(model, frozen=True)
    assert all(param.dtype is torch.float32 for param in model.parameters())


# Masters.

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "Adadelta": optim.Adadelta,
    **({"Adafactor": optim.Adafactor} if hasattr(optim, "Adafactor") else {}),  # torch 2.5
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "Adam amsgrad": lambda p, lr: optim.Adam(p, lr=lr, amsgrad=True),
    "AdamW foreach": lambda p, lr: optim.AdamW(p, lr=lr, foreach=True),
    "AdamW fused": lambda p, lr: optim.AdamW(p, lr=lr, fused=True),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p, lr: optim.RMSprop(p, lr=lr, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": optim.SGD,
    "SGD momentum": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9, dampening=0.1),
    "SGD fused": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
both_modes = pytest.mark.parametrize("mode", ["float32", "split"])


def weights(dtype: torch.dtype, count: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 5), (7,), ()][:count]
    # Not near 0: there 16 more bits of float16 are fewer than float32 has.
    values = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    return [nn.Parameter(value.to(dtype)) for value in values]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).half()
        param.grad = None if (step + place) % 4 == 3 else grad.to(param.dtype)


def step_masters(masters: Masters, optimizer: optim.Optimizer, factor: float = 1.0) -> None:
    """Steps with the gradients of the weights times `factor`, and clears them."""
    masters.gradients(torch.tensor(factor))
    done = False
    try:
        optimizer.step()
        done = True
    finally:
        masters.write_back(done)
    optimizer.zero_grad()


@both_modes
@every_optimizer
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_move_as_float32_weights_would(
    dtype: torch.dtype, make: Callable[..., optim.Optimizer], mode: str
) -> None:
    mine = weights(dtype)
    theirs = [nn.Parameter(param.detach().float()) for param in mine]
    optimizer, reference = make(mine, lr=0.01), make(theirs, lr=0.01)
    masters = Masters(optimizer, mode)
    for step in range(12):
        give_gradients(mine, step)
        for param, other in zip(mine, theirs, strict=True):
            other.grad = None if param.grad is None else param.grad.float()
        step_masters(masters, optimizer)
        reference.step()
        for param, other in zip(mine, theirs, strict=True):
            assert torch.equal(param, other.to(dtype))
    for whole, other in zip(masters.params(), theirs, strict=True):
        assert torch.equal(whole, other)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(a is b for a, b in zip(held, mine, strict=True))


@both_modes
@every_optimizer
def test_a_checkpoint_goes_on_bit_for_bit(make: Callable[..., optim.Optimizer], mode: str) -> None:
    runs = []
    for cut in (None, 5):
        params = weights(torch.float16)
        optimizer = make(params, lr=0.01)
        masters = Masters(optimizer, mode)
        for step in range(10):
            if step == cut:
                file = io.BytesIO()
                torch.save({"params": params, "state": optimizer.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                params = weights(torch.float16)
                optimizer = make(params, lr=0.01)
                masters = Masters(optimizer, mode)
                with torch.no_grad():
                    for param, value in zip(params, saved["params"], strict=True):
                        param.copy_(value)
                optimizer.load_state_dict(saved["state"])
            give_gradients(params, step)
            step_masters(masters, optimizer)
        runs.append([*masters.params(), *params])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_small_updates_are_not_lost() -> None:
    param = nn.Parameter(torch.ones(1, dtype=torch.float16))
    plain = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer, without = optim.SGD([param], lr=1e-4), optim.SGD([plain], lr=1e-4)
    masters = Masters(optimizer, "split")
    for _ in range(1000):
        param.grad, plain.grad = torch.ones_like(param), torch.ones_like(plain)
        step_masters(masters, optimizer)
        without.step()
    assert plain.item() == 1.0  # 1e-4 is less than half of the distance to the next number
    assert param.item() == torch.tensor(0.9).half().item()


def test_gradients_add_up_in_float32() -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    masters = Masters(optimizer := optim.SGD([param], lr=1.0))
    for value in (2048.0, 1.0, 1.0):
        param.grad = torch.full_like(param, value)
        masters.accumulate(torch.tensor(0.5))
        assert param.grad.item() == value
    masters.enter()
    assert optimizer.param_groups[0]["params"][0].grad.item() == 1025.0
    optimizer.step()
    masters.write_back(True)
    assert masters.params()[0].item() == -1025.0


@both_modes
def test_gradients_are_multiplied_in_float32_and_stay_as_they_were(mode: str) -> None:
    half = nn.Parameter(torch.ones(3, dtype=torch.float16))
    single = nn.Parameter(torch.ones(3))
    masters = Masters(optimizer := optim.SGD([half, single], lr=1.0), mode)
    half.grad, single.grad = torch.full_like(half, 3.0), torch.full_like(single, 3.0)
    kept = half.grad, single.grad
    masters.gradients(torch.tensor(2.0**-26))  # 0 in float16
    master, other = optimizer.param_groups[0]["params"]
    assert other is single
    for param in (master, other):
        assert torch.equal(param.grad, torch.full((3,), 3 * 2.0**-26))
    masters.write_back(False)
    assert (half.grad, single.grad) == kept
    assert all(torch.equal(grad, torch.full_like(grad, 3.0)) for grad in kept)
    assert optimizer.param_groups[0]["params"] == [half, single]
    assert dict(optimizer.state) == {}


@both_modes
def test_a_master_beyond_float16_writes_its_largest_number(mode: str) -> None:
    param = nn.Parameter(torch.full((3,), 60000.0, dtype=torch.float16))
    masters = Masters(optimizer := optim.SGD([param], lr=1.0), mode)
    for expected in (65504.0, 65504.0):
        param.grad = torch.full_like(param, -10000.0)
        step_masters(masters, optimizer)
        assert torch.equal(param, torch.full_like(param, expected))
    for _ in range(3):
        param.grad = torch.full_like(param, 10000.0)
        step_masters(masters, optimizer)
    # A float32 master keeps its value beyond; 16 more bits do not.
    expected = 60000.0 - 10000.0 if mode == "float32" else 65504.0 - 30000.0
    assert torch.equal(masters.params()[0], torch.full((3,), expected))


def test_a_group_that_is_added_later_has_masters_too() -> None:
    first, second = weights(torch.float16, 2)
    masters = Masters(optimizer := optim.SGD([first], lr=0.1, momentum=0.9))
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [second], "lr": 0.2})
        for param in (first, second):
            param.grad = torch.ones_like(param) if step >= 2 or param is first else None
        step_masters(masters, optimizer)
    assert [whole.dtype for whole in masters.params()] == [torch.float32] * 2
    expected = weights(torch.float32, 2)[1].detach().half().float() - 0.2 * (1 + 1.9)
    torch.testing.assert_close(list(masters.params())[1], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("between", [False, True])
def test_who_writes_to_a_weight_writes_to_its_master(between: bool) -> None:
    (param,) = weights(torch.float16, 1)
    masters = Masters(optimizer := optim.SGD([param], lr=1e-4))
    for step in range(2):
        give_gradients([param], step)
        step_masters(masters, optimizer)
    master = masters.master(param).clone()
    assert not torch.equal(master, param.float())
    with torch.no_grad():
        param[0] = 3.0
    if between:
        step_masters(masters, optimizer)  # without a gradient
    param.grad = torch.zeros_like(param)
    step_masters(masters, optimizer)
    now = masters.master(param)
    assert torch.equal(now[0], torch.full((5,), 3.0))
    assert torch.equal(now[1:], master[1:])  # the others keep what rounding has cut off


@both_modes
def test_a_step_that_fails_can_be_tried_again(mode: str) -> None:
    params = weights(torch.float16, 2)
    param = params[0]
    optimizer = optim.Adam(params, lr=0.1)
    masters = Masters(optimizer, mode)
    before = param.detach().clone()
    fails = [False, True]

    def fail(*_: Any) -> None:
        if fails.pop():
            raise RuntimeError("planted")

    optimizer.register_step_pre_hook(fail)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="planted"):
        step_masters(masters, optimizer)
    assert torch.equal(param.grad, torch.ones_like(param))
    assert optimizer.param_groups[0]["params"][0] is param
    assert torch.equal(param, before)
    assert dict(optimizer.state) == {}
    step_masters(masters, optimizer)
    assert not torch.equal(param, before)
    assert set(optimizer.state) == {param}
    fails.append(False)
    step_masters(masters, optimizer)  # nothing is left of the gradient
    assert optimizer.state[param]["step"].item() == 1


def test_weights_that_are_made_float32_go_on_as_their_masters() -> None:
    for mode in ("float32", "split"):
        params = weights(torch.float16)
        masters = Masters(optimizer := optim.Adam(params, lr=0.01), mode)
        for step in range(3):
            give_gradients(params, step)
            step_masters(masters, optimizer)
        expected = [master.clone() for master in masters.params()]
        for param in params:
            param.data = param.data.float()
            param.grad = torch.zeros_like(param)
        optimizer.param_groups[0]["lr"] = 0.0
        step_masters(masters, optimizer)
        assert all(map(torch.equal, params, expected))


def test_sparse_gradients_of_half_tables() -> None:
    table = nn.Embedding(6, 3, sparse=True).half()
    masters = Masters(optimizer := optim.SGD(table.parameters(), lr=1.0))
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1, 4])).float().sum().backward()
    step_masters(masters, optimizer)
    moved = (table.weight.detach() - before).float().sum(1)
    assert moved.round().tolist() == [0.0, -6.0, 0.0, 0.0, -3.0, 0.0]


@pytest.mark.parametrize("saved", ["whole", "in a list"])
def test_lists_in_a_state_are_loaded_unrounded(saved: str) -> None:
    class Listing(optim.SGD):
        """Keeps its gradients in a list."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    grads = self.state[param].setdefault("grads", [])
                    grads.append(param.grad / 3)

    (param,) = weights(torch.float16, 1)
    states = []
    for _ in range(2):
        optimizer = Listing([param], lr=0.1)
        masters = Masters(optimizer)
        if states:
            optimizer.load_state_dict(states[0])
        else:
            param.grad = torch.ones_like(param)
            step_masters(masters, optimizer)
        states.append(optimizer.state_dict())
    first, second = (state["state"][0]["grads"][0] for state in states)
    assert second.dtype is torch.float32
    assert torch.equal(first, second)


def test_bad_mode_is_named() -> None:
    with pytest.raises(SettingError, match="master must be one of float32, split, got 'both'"):
        Masters(optim.SGD(weights(torch.float16)), "both")


@both_modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False])
def test_small_weights_are_stepped_as_one_to_the_bit(
    mode: str, dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for elements in (2**20, -1):  # as one flat tensor, and each on its own
        monkeypatch.setattr(master_bits, "_FEW_ELEMENTS", elements)
        torch.manual_seed(0)
        shapes = [(3,), (2, 2), (), (0,), (5,)]
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        params[0].data[0] = 65504.0  # which the steps make larger
        optimizer: Any = (OwnSGD if own else optim.SGD)(params, lr=8.0, momentum=0.9)
        masters = None if own else Masters(optimizer, mode)
        if own:
            optimizer.keep_masters(mode)
        for step in range(4):
            for param in params:
                param.grad = torch.randn(param.shape).to(dtype)
            params[0].grad[0] = -10.0
            if step == 2:
                params[4].grad[1] = torch.nan
                with torch.no_grad():
                    params[1].mul_(2.0)  # by hand: the master follows
            if masters is None:
                optimizer.step()
            else:
                step_masters(masters, optimizer)
        wholes = [] if masters is None else masters.params()
        states = [value for param in params for value in optimizer.state[param].values()]
        runs.append([value.clone() for value in (*params, *wholes, *states)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.nan_to_num(1e4), other.nan_to_num(1e4))
    assert runs[0][0][0] == (65504.0 if dtype is torch.float16 else runs[0][0][0])
