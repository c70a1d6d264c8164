"""What a cast model may return and take: any class that holds tensors."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_has
from gradscale.errors import SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision.containers import mapped
from gradscale.torch.optim import AdamW
from output_classes import (
    KINDS,
    Frozen,
    Listed,
    Named,
    Net,
    Ordered,
    Plain,
    Slots,
    every_kind,
    tensors,
)

torch.set_num_threads(1)


class Opaque:
    """Like a cache of keys and values: an object of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Sealed(Mapping[str, Any]):
    """Cannot be made with other tensors."""

    def __init__(self, *, x: Any) -> None:
        self._x = x

    def __getitem__(self, key: str) -> Any:
        return {"x": self._x}[key]

    def __iter__(self) -> Any:
        return iter(("x",))

    def __len__(self) -> int:
        return 1


@every_kind
def test_outputs_leave_as_float32(make: Any) -> None:
    net = Net(make)
    mp = MixedPrecision(net, AdamW(net.parameters()), "fp16-master")
    output = net(torch.ones(2, 4))
    wanted = make(torch.ones(2, 4))
    assert type(output).__name__ == type(wanted).__name__
    found = tensors(output)
    assert len(found) == len(tensors(wanted))
    assert {each.dtype for each in found if each.is_floating_point()} == {torch.float32}
    mp.backward(sum(each.sum() for each in found if each.is_floating_point()))
    assert mp.step().applied


def test_a_rebuilt_object_has_all_that_the_old_one_had() -> None:
    def wide(value: Any) -> Any:
        return mapped(value, Tensor.double, deep=True)

    old = Frozen(torch.ones(1), 3)
    new = wide(old)
    assert (new.x.dtype, new.late.dtype, new.late.item()) == (torch.float64, torch.float64, 4)
    assert new.more is old.more
    assert not hasattr(new, "unset")
    plain = Plain(torch.ones(1))
    plain.extra = "kept"  # type: ignore[attr-defined]
    assert vars(wide(plain))["extra"] == "kept"
    assert wide(Listed(torch.ones(1), 7)).count == 7
    ordered = wide(Ordered(torch.ones(1)))
    assert list(ordered) == ["x"]
    assert ordered["x"] is ordered.x
    assert ordered.hidden is None
    assert wide(defaultdict(list, x=torch.ones(1)))["new"] == []


class OneSlot:
    __slots__ = "tag"


class PrivateSlot(OneSlot):
    __slots__ = ("__hidden",)

    def hide(self, value: int) -> None:
        self.__hidden = value

    def hidden(self) -> int:
        return self.__hidden


@dataclass
class InSlots(PrivateSlot):
    x: Tensor


def test_slots_of_base_classes_are_kept() -> None:
    old = InSlots(torch.ones(1))
    old.hide(7)
    assert not hasattr(mapped(old, Tensor.double, deep=True), "tag")
    old.tag = "kept"
    new = mapped(old, Tensor.double, deep=True)
    assert (new.x.dtype, new.tag, new.hidden()) == (torch.float64, "kept", 7)


@every_kind
def test_what_is_not_changed_is_the_same_object(make: Any) -> None:
    value = make(torch.ones(2, 4))
    assert mapped(value, lambda tensor: tensor, deep=True) is value


def test_an_object_that_we_cannot_look_into_passes_through() -> None:
    net = Net(Opaque)
    MixedPrecision(net, AdamW(net.parameters()), "fp16-master")
    output = net(torch.ones(2, 4))
    assert output.x.dtype is torch.float16


def test_an_output_that_cannot_be_rebuilt_is_named() -> None:
    net = Net(lambda x: {"inner": Sealed(x=x)})
    MixedPrecision(net, AdamW(net.parameters()), "fp16-master")
    with pytest.raises(SettingError, match=r"test_containers\.Sealed .* \(TypeError: .*dataclass"):
        net(torch.ones(2, 4))


@pytest.mark.parametrize(
    "make", [Plain, Frozen, Slots, Named, Ordered], ids=lambda kind: kind.__name__
)
def test_inputs(make: Any) -> None:
    net = Net(lambda x: x)
    mp = MixedPrecision(net, AdamW(net.parameters()), "fp16-master")
    given = make(torch.ones(2, 4))
    mp.backward(net(given).sum())
    assert mp.step().applied
    # A tuple cannot be filled by the model, so it is cast; anything else goes in as it is.
    assert net.given.x.dtype is (torch.float16 if make is Named else torch.float32)
    assert (net.given is given) == (make is not Named)


def test_the_lowest_number_stays_the_lowest() -> None:
    net = Net(lambda x: x)
    lows = [torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16)]
    for mode in ("fp16-master", "bf16-master"):
        MixedPrecision(net := Net(lambda x: x), AdamW(net.parameters()), mode)
        half = net.layer.weight.dtype
        net(torch.tensor([lows[0], -torch.inf, 1.0, torch.inf]))
        assert net.given.tolist() == [torch.finfo(half).min, -torch.inf, 1.0, torch.inf]
        net(torch.tensor([lows[1], 1, 2, 3], dtype=torch.bfloat16))
        assert net.given[0] == torch.finfo(half).min
        net(torch.full((4,), torch.finfo(torch.float16).min, dtype=torch.float16))
        assert net.given[0] == torch.tensor(-65504.0, dtype=half)


ONE = torch.ones(1)


def new_object(x: Tensor) -> Tensor:
    """Makes an object, and looks at its class, as where outputs are rebuilt."""
    new = object.__new__(Plain)
    names = [kind.__name__.lstrip("_") for kind in type(new).__mro__]
    return x * len(names) * (1 + hasattr(type(new), "x"))


def attributes(value: Any) -> dict[str, Any]:
    """Reads an object as outputs are read, which torch 2.11 traces with a graph break only."""
    return {**getattr(value, "__dict__", {})}


@pytest.mark.parametrize(
    "kind",
    [
        "dataclass",
        "frozen dataclass",
        "frozen slots",
        "NamedTuple",
        "list of its own",
        "dict",
        "fields and keys",
        "pytree",
        "features",
    ],
)
def test_outputs_of_a_compiled_model(kind: str) -> None:
    if kind not in ("dict", "pytree", "features") and not torch_has.full_graph(new_object, ONE):
        pytest.skip("needs torch.compile to trace object.__new__, __mro__ and __name__")
    net = Net(KINDS[kind])
    MixedPrecision(net, AdamW(net.parameters()), "fp16-master")
    wanted = tensors(net(torch.ones(2, 4)))
    torch._dynamo.reset()
    whole = torch_has.full_graph(attributes, types.SimpleNamespace(x=1))
    compiled = torch.compile(net, backend="eager", fullgraph=whole)
    found = tensors(compiled(torch.ones(2, 4)))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
