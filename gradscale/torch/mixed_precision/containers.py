"""Values with tensors in them, rebuilt with other tensors.

A model may return anything that holds tensors: tuples, lists, dicts, dataclasses, classes of attrs,
and classes of a library that are several of these at once, such as `ModelOutput` of transformers. A
rebuilt object is of the same class and has all that the old one had besides; no `__init__` runs, so
frozen classes, slots and fields that `__init__` does not take are nothing special.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree

from gradscale.errors import SettingError

Change = Callable[[Any], Any]
Whole = Callable[[Any], bool]


def mapped(
    value: Any,
    change: Change,
    deep: bool = False,
    whole: Whole = torch.is_tensor,
) -> Any:
    """`value` with its tensors changed; itself if none is.

    Looks into tuples; `deep` also into lists, mappings, dataclasses, attrs classes and what is
    registered with `torch.utils._pytree`. An argument should not be looked into so deeply: whoever
    gives a list or a dict may want to find something in it afterwards. `whole` says what is changed
    as one thing, if that is more than tensors. Any other object is returned as it is.

    Raises:
        SettingError: An object has tensors that are changed, and cannot be rebuilt.
    """
    return _mapped(value, change, deep, whole)[0]


def _mapped(value: Any, change: Change, deep: bool, whole: Whole) -> tuple[Any, bool]:
    """What `mapped` returns, and whether it is another: the compiler cannot compare tuples."""
    if whole(value):
        new = change(value)
        return new, new is not value
    parts = _parts(value, deep)
    found = [_mapped(part, change, deep, whole) for part in parts or ()]
    if not any(changed for _, changed in found):
        return value, False
    try:
        return _rebuilt(value, [item for item, _ in found]), True
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise SettingError(
            f"The tensors in {kind} must be cast, but it cannot be rebuilt with the new tensors "
            f"({type(error).__name__}: {error}). Return a tuple, a dict or a dataclass from the "
            "model."
        ) from error


def _parts(value: Any, deep: bool) -> list[Any] | None:
    """What is in `value`, in the order that `_rebuilt` takes; None if it is not looked into."""
    if isinstance(value, tuple):
        return list(value)
    if not deep:
        return None
    if isinstance(value, list):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    names = _fields(value)
    if names:
        return [getattr(value, name) for name in names]
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else list(node.flatten_fn(value)[0])


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """An object like `value`, with `items` for what `_parts` returned."""
    kind: Any = type(value)
    if isinstance(value, tuple):
        if kind is tuple or hasattr(kind, "n_sequence_fields"):  # the second: torch.return_types
            return kind(items)
        return _with_attributes(tuple.__new__(kind, items), _attributes(value))
    if isinstance(value, list):
        if kind is list:
            return items
        copied = copy.copy(value)
        copied[:] = items
        return copied
    if isinstance(value, Mapping):
        pairs = dict(zip(value, items, strict=True))
        if kind is dict or not isinstance(value, MutableMapping):
            return kind(pairs)
        new: Any = copy.copy(value)
        for key, item in pairs.items():  # not update(), which a ModelOutput refuses
            new[key] = item
        return new
    names = _fields(value)
    if names:
        found = dict(zip(names, items, strict=True))
        return _with_attributes(object.__new__(kind), {**_attributes(value), **found})
    node = _pytree.SUPPORTED_NODES[kind]
    return node.unflatten_fn(items, node.flatten_fn(value)[1])


def _fields(value: Any) -> list[str]:
    """The fields that `value` has, if it is a dataclass or of a class of attrs."""
    if isinstance(value, type):
        return []
    fields: Iterable[Any] = getattr(value, "__attrs_attrs__", ())
    if hasattr(value, "__dataclass_fields__"):  # not is_dataclass(), which torch 2.4 cannot trace
        fields = dataclasses.fields(value)
    return [field.name for field in fields if hasattr(value, field.name)]


def _attributes(value: Any) -> dict[str, Any]:
    """All that `value` has in its dictionary and its slots."""
    slots = [name for each in type(value).__mro__ for name in _slots(each)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> list[str]:
    """The attributes that `kind` has slots for. Not `copyreg._slotnames`: it cannot be traced."""
    slots = getattr(kind, "__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    own = f"_{kind.__name__.lstrip('_')}"
    public = [name for name in names if name[:2] != "__"]
    return public + [own + name for name in names if name[:2] == "__" and name[-2:] != "__"]


def _with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    """`value`, which is given these attributes, frozen or not."""
    for name, item in attributes.items():
        object.__setattr__(value, name, item)
    return value
