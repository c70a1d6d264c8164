"""Classes that a model may return, and a model that returns one."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.utils import _pytree


@dataclasses.dataclass
class Plain:
    x: Any
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    shift: dataclasses.InitVar[int] = 0
    more: list[Any] = dataclasses.field(default_factory=list)
    late: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self, shift: int) -> None:
        object.__setattr__(self, "late", self.x + shift)


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    count: int = 1


class Named(NamedTuple):
    x: Any
    count: int = 1


class Pair(tuple[Any, ...]):
    """Takes two arguments, and has an attribute besides."""

    def __new__(cls, x: Any, count: int) -> Pair:
        new = super().__new__(cls, (x, count))
        new.x = x  # type: ignore[attr-defined]
        return new


class Listed(list[Any]):
    def __init__(self, x: Any, count: int) -> None:
        super().__init__((x, count))
        self.count = count


@dataclasses.dataclass
class Ordered(OrderedDict[str, Any]):
    """Like a ModelOutput of transformers or diffusers: fields, keys, and no update()."""

    x: Any
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("not to be updated")

    def __reduce__(self) -> Any:
        made, _, *rest = super().__reduce__()
        return made, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest


class Registered:
    def __init__(self, x: Any) -> None:
        self.x = x


_pytree.register_pytree_node(
    Registered, lambda each: ([each.x], None), lambda parts, _: Registered(*parts)
)


def attrs_class(**settings: Any) -> Callable[[Any], Any]:
    attr = pytest.importorskip("attr")
    return attr.make_class("Attrs", {"x": attr.ib(), "count": attr.ib(default=1)}, **settings)


KINDS: dict[str, Callable[[Any], Any]] = {
    "dataclass": Plain,
    "frozen dataclass": lambda x: Frozen(x, 1, [x]),
    "slots": Slots,
    "frozen slots": FrozenSlots,
    "attrs": lambda x: attrs_class()(x),
    "frozen attrs with slots": lambda x: attrs_class(frozen=True, slots=True)(x),
    "NamedTuple": Named,
    "tuple of its own": lambda x: Pair(x, 1),
    "list of its own": lambda x: Listed(x, 1),
    "torch.return_types": lambda x: x.sort(),
    "dict": lambda x: {"x": x, "count": 1},
    "defaultdict": lambda x: defaultdict(list, x=x),
    "UserDict": lambda x: UserDict(x=x),
    "MappingProxyType": lambda x: MappingProxyType({"x": x}),
    "fields and keys": lambda x: Ordered(x, hidden=(x, [x])),
    "pytree": Registered,
    # What models of timm return: features of every stage, and (output, features).
    "stages": lambda x: [x, x * 2],
    "features": lambda x: (x, [x, {"x": x}]),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class Net(nn.Module):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make
        self.given: Any = None

    def forward(self, x: Any) -> Any:
        self.given = x
        return self.make(self.layer(x if isinstance(x, Tensor) else x.x))


def tensors(value: Any) -> list[Tensor]:
    """All tensors in `value`, wherever they are."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [each for item in value.values() for each in tensors(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in tensors(item)]
    names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]
    return [each for name in names if name[:2] != "__" for each in tensors(getattr(value, name))]
