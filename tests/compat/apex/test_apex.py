"""`amp.initialize`: opt levels, what models do then, and functions that cast."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gradscale.compat.apex import amp
from gradscale.compat.apex.functions import cast_all
from gradscale.compat.apex.models import release
from gradscale.compat.apex.options import LEVELS, resolve
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import features

pytestmark = pytest.mark.usefixtures("fresh_amp")
HALF, FLOAT = torch.float16, torch.float32


class Net(nn.Module):
    """A model that tells the format of what comes in and of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.line = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        y = self.line(self.norm(x))
        self.seen = [x.dtype, y.dtype]
        return y


def initialized(opt_level: str, **overrides: Any) -> Net:
    """A model at an opt level."""
    torch.manual_seed(0)
    model: Net = amp.initialize(Net(), opt_level=opt_level, **overrides)
    return model


def dtypes(model: Net) -> tuple[torch.dtype, torch.dtype]:
    """The formats of the weights of the linear layer and of the batch norm."""
    return model.line.weight.dtype, model.norm.weight.dtype


# Options.


@pytest.mark.parametrize(
    ("level", "name", "given", "want"),
    [
        ("O2", "keep_batchnorm_fp32", "False", False),
        ("O3", "keep_batchnorm_fp32", "True", True),
        ("O2", "loss_scale", "128.0", 128.0),
        ("O3", "loss_scale", "dynamic", "dynamic"),
        ("O2", "loss_scale", 1000, 1000.0),
        ("O2", "cast_model_type", torch.bfloat16, torch.bfloat16),
        ("O0", "cast_model_type", False, None),
        ("O3", "master_weights", True, True),
        ("O1", "patch_torch_functions", False, False),
        ("O1", "cast_model_outputs", HALF, HALF),
        ("O1", "cast_model_type", FLOAT, FLOAT),
    ],
)
def test_override_is_taken(level: str, name: str, given: Any, want: Any) -> None:
    options = resolve(level, **{name: given})
    assert getattr(options, name) == want
    others = [field for field in vars(LEVELS[level]) if field != name]
    assert all(getattr(options, field) == getattr(LEVELS[level], field) for field in others)


@pytest.mark.parametrize(
    ("level", "overrides", "message"),
    [
        ("02", {}, r"opt_level must be one of O0, O1, O2, O3 .* got '02'"),
        ("O2", {"loss_scale": "fast"}, r"loss_scale must be 'dynamic' or .* got 'fast'"),
        ("O2", {"loss_scale": 0}, "loss_scale must be"),
        ("O2", {"loss_scale": float("nan")}, "loss_scale must be"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32 must be True or False"),
        ("O2", {"cast_model_type": torch.int8}, r"cast_model_type must be .* got torch.int8"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions must be left out"),
        ("O1", {"cast_model_type": HALF}, "cast_model_type must be left out with opt_level O1"),
        ("O1", {"master_weights": True}, "master_weights must be left out"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 must be left out"),
        ("O1", {"num_losses": 0}, r"num_losses must be a whole number > 0, got 0"),
        ("O1", {"min_loss_scale": 0.0}, r"min_scale must be finite, > 0"),
    ],
)
def test_wrong_setting_is_refused(level: str, overrides: dict[str, Any], message: str) -> None:
    model = Net()
    with pytest.raises(SettingError, match=message):
        amp.initialize(model, opt_level=level, **overrides)
    assert dtypes(model) == (FLOAT, FLOAT)
    assert "forward" not in vars(model)


# Shapes of what goes in and comes out.


def test_models_and_optimizers_come_back_in_their_shapes() -> None:
    model, optimizer = Net(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, opt_level="O1") is model
    assert amp.initialize([model], opt_level="O1") == [model]
    assert amp.initialize(model, optimizer, opt_level="O1") == (model, optimizer)
    assert amp.initialize([model], [optimizer], opt_level="O1") == ([model], [optimizer])
    assert amp.initialize(model, [], opt_level="O1") == (model, [])


def test_disabled_amp_does_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert dtypes(model) == (FLOAT, FLOAT)
    loss = model(torch.randn(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})


def test_call_before_initialize_says_so() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with (
        pytest.raises(CallOrderError, match=r"before amp.initialize\(\)"),
        amp.scale_loss(torch.ones(()), optimizer),
    ):
        pass
    with pytest.raises(CallOrderError, match=r"state_dict\(\) was called before"):
        amp.state_dict()


@pytest.mark.parametrize(
    "wrapped", ["model", nn.DataParallel(nn.Linear(1, 1)), nn.Linear(1, 1).half()]
)
def test_wrong_model_is_refused(wrapped: Any) -> None:
    with pytest.raises(SettingError, match="models must"):
        amp.initialize(wrapped, opt_level="O1")


def test_wrapper_around_an_optimizer_is_refused() -> None:
    with pytest.raises(SettingError, match=r"optimizers must be an optimizer .* got Wrapper"):
        amp.initialize(Net(), type("Wrapper", (), {})(), opt_level="O1")


# Models.


@pytest.mark.parametrize(
    ("level", "overrides", "weights", "norms", "product"),
    [
        ("O0", {}, FLOAT, FLOAT, FLOAT),
        ("O1", {}, FLOAT, FLOAT, HALF),
        ("O1", {"patch_torch_functions": False}, FLOAT, FLOAT, FLOAT),
        ("O2", {}, HALF, FLOAT, HALF),
        ("O2", {"keep_batchnorm_fp32": False}, HALF, HALF, HALF),
        ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16, FLOAT, torch.bfloat16),
        ("O3", {}, HALF, HALF, HALF),
        ("O3", {"keep_batchnorm_fp32": "True"}, HALF, FLOAT, HALF),
    ],
)
def test_level_has_its_formats(
    level: str, overrides: dict[str, Any], weights: Any, norms: Any, product: Any
) -> None:
    model = initialized(level, **overrides)
    assert dtypes(model) == (weights, norms)
    assert model(torch.randn(3, 4)).dtype is FLOAT
    assert model.seen[1] is product
    if level in ("O2", "O3"):
        assert model.seen[0] is weights


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_output_format_can_be_chosen(level: str) -> None:
    model = initialized(level, cast_model_outputs=torch.bfloat16)
    assert model(torch.randn(3, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_float64_inputs_are_cast(level: str) -> None:
    assert initialized(level)(torch.randn(3, 4, dtype=torch.float64)).dtype is FLOAT


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_saved_model_is_float32_and_fits_any_level(level: str) -> None:
    model = initialized(level)
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {FLOAT, torch.int64}
    Net().load_state_dict(saved)
    before = [param.clone() for param in model.parameters()]
    model.load_state_dict(saved)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_of_a_model_are_on_their_own(level: str) -> None:
    model = initialized(level).eval()
    x = torch.randn(3, 4)
    want = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), want)
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        assert torch.equal(model(x), want)
        assert not twin(x).any()
        assert twin.seen == model.seen


def test_forward_keeps_its_signature() -> None:
    model = Net()
    want = inspect.signature(model.forward)
    for level in ("O1", "O2"):
        assert inspect.signature(initialized(level).forward) == want


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_compiled_model_is_cast(level: str) -> None:
    model = initialized(level).eval()
    x = torch.randn(3, 4)
    # The modules of an O1 model are asked for their device, which older compilers cannot trace.
    whole = level != "O1" or features.TRACES_REPLACED_WEIGHTS
    compiled = torch.compile(model, backend="eager", fullgraph=whole)
    assert torch.equal(compiled(x), model(x))


def test_released_model_runs_as_before() -> None:
    model = initialized("O1")
    release(model)
    release(model)
    assert "forward" not in vars(model)
    assert model(torch.randn(3, 4)).dtype is FLOAT
    assert model.seen == [FLOAT, FLOAT]


def test_model_initialized_again_is_wrapped_once() -> None:
    model = initialized("O1")
    amp.initialize(model, opt_level="O0")
    model(torch.randn(3, 4))
    assert model.seen == [FLOAT, FLOAT]


def test_model_cast_twice_is_refused() -> None:
    with pytest.raises(SettingError, match=r"call amp.initialize\(\) only once"):
        amp.initialize(initialized("O2"), opt_level="O2")


# Batches.


class Batch:
    """A batch of the user's own class."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.tensor.to(dtype))


class Pair(NamedTuple):
    """Two things."""

    left: Any
    right: Any


def test_cast_goes_through_containers() -> None:
    tensor, number = torch.ones(2), torch.ones(2, dtype=torch.int64)
    value = {"a": [tensor, number], "b": (Pair(tensor, "text"), Batch(tensor), None, 1.5)}
    value["c"] = OrderedDict(x=tensor)  # type: ignore[assignment]
    cast = cast_all(value, HALF)
    assert cast["a"][0].dtype is HALF
    assert cast["a"][1] is number
    pair, batch, none, float_ = cast["b"]
    assert isinstance(pair, Pair)
    assert (pair.left.dtype, pair.right) == (HALF, "text")
    assert batch.tensor.dtype is HALF
    assert (none, float_) == (None, 1.5)
    assert isinstance(cast["c"], OrderedDict)
    assert cast["c"]["x"].dtype is HALF
    assert tensor.dtype is FLOAT


def test_cast_copies_nothing_that_it_does_not_change() -> None:
    value = {"a": [torch.ones(2, dtype=HALF), nn.Linear(1, 1)], "b": ({}, Pair(1, "text"))}
    assert cast_all(value, HALF) is value


def test_dataclass_is_promoted_with_the_rest() -> None:
    @dataclass
    class Record:
        tensor: Tensor

    def told(record: Record, other: Tensor) -> list[torch.dtype]:
        return [record.tensor.dtype, other.dtype]

    initialized("O1")
    record = Record(torch.ones(1, dtype=torch.float64))
    assert amp.promote_function(told)(record, torch.ones(1)) == [torch.float64] * 2
    assert amp.half_function(told)(record, torch.ones(1)) == [HALF, HALF]
    assert record.tensor.dtype is torch.float64


def test_batch_of_ones_own_class_is_cast() -> None:
    class Unpacking(nn.Linear):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            return super().forward(batch.tensor)

    model = amp.initialize(Unpacking(4, 2), opt_level="O2")
    assert model(Batch(torch.randn(3, 4))).dtype is FLOAT


# Functions of the user's own.


def formats(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    """The formats of the arguments."""
    return [value.dtype for value in (*args, *kwargs.values())]


def test_half_and_float_functions_cast_at_o1_alone() -> None:
    half, single = amp.half_function(formats), amp.float_function(formats)
    args = torch.ones(2), torch.ones(2, dtype=HALF), torch.ones(2, dtype=torch.int32)
    untouched = [FLOAT, HALF, torch.int32]
    assert half(*args) == single(*args) == untouched
    for level in ("O0", "O2", "O3"):
        initialized(level)
        assert half(*args) == single(*args) == untouched
    initialized("O1")
    assert half(*args) == [HALF, HALF, torch.int32]
    assert single(*args) == [FLOAT, FLOAT, torch.int32]
    assert half(x=torch.ones(2)) == [HALF]
    assert half.__name__ == "formats"


def test_promote_function_takes_the_widest_format() -> None:
    initialized("O1")
    promote = amp.promote_function(formats)
    half, bfloat, single = (torch.ones(1, dtype=d) for d in (HALF, torch.bfloat16, FLOAT))
    assert promote(half, half) == [HALF, HALF]
    assert promote(half, single) == [FLOAT, FLOAT]
    assert promote(half, x=bfloat) == [FLOAT, FLOAT]


def test_float_function_computes_in_float32_inside_of_a_model() -> None:
    class Products(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            usual, exact = self.product(x), amp.float_function(self.product)(x)
            self.seen = [usual.dtype, exact.dtype]
            return usual

        def product(self, x: Tensor) -> Tensor:
            return x @ x.T

    model = amp.initialize(Products(4, 2), opt_level="O1")
    model(torch.randn(3, 4))
    assert model.seen == [HALF, FLOAT]


def test_registered_function_is_replaced_from_initialize_on() -> None:
    module: Any = types.SimpleNamespace(half=formats, single=formats, widest=formats)
    amp.register_half_function(module, "half")
    amp.register_float_function(module, "single")
    amp.register_promote_function(module, "widest")
    one, other = torch.ones(1), torch.ones(1, dtype=HALF)
    assert module.half is formats
    initialized("O1")
    assert module.half(one) == [HALF]
    assert module.single(other) == [FLOAT]
    assert module.widest(one, other) == [FLOAT, FLOAT]
    initialized("O2")
    assert module.half is module.single is module.widest is formats
    initialized("O1")
    assert module.half is not formats


def test_unknown_function_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"name must be the name of a function of 'math', got 'sine'"
    ):
        amp.register_half_function(__import__("math"), "sine")


def test_disable_casts_switches_everything_off() -> None:
    model = initialized("O1")
    half = amp.half_function(formats)
    with torch.autocast("cpu", HALF), amp.disable_casts():
        assert half(torch.ones(1)) == [FLOAT]
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is FLOAT
        model(torch.randn(3, 4))
        assert model.seen == [FLOAT, FLOAT]
        with amp.disable_casts():
            pass
        assert half(torch.ones(1)) == [FLOAT]
    assert half(torch.ones(1)) == [HALF]
    model(torch.randn(3, 4))
    assert model.seen == [FLOAT, HALF]


def test_casts_come_back_after_an_error() -> None:
    initialized("O1")
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        raise ZeroDivisionError
    assert amp.half_function(formats)(torch.ones(1)) == [HALF]


def test_torch_itself_is_left_alone() -> None:
    functions = torch.mm, nn.functional.linear, Tensor.__matmul__, torch.optim.SGD.step
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    amp.initialize(Net(), optimizer, opt_level="O1")
    assert functions == (torch.mm, nn.functional.linear, Tensor.__matmul__, torch.optim.SGD.step)
    assert "step" not in vars(optimizer)
    assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is FLOAT
