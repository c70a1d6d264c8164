"""Tenants: objects whose hooks are in a model and that do not go together."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import nn

_kinds: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()
"""How many tenants of each kind every module has."""


class Tenancy:
    """One object in a model, until `end()`. A copy of it is in no model.

    Args:
        model: In all modules of it.
        kind: The name of its class.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        self._kind = kind
        self._modules = weakref.WeakSet(model.modules())
        for module in self._modules:
            _kinds.setdefault(module, Counter())[kind] += 1

    def end(self) -> None:
        """The object is in no model any more."""
        modules, self._modules = self._modules, weakref.WeakSet()
        for module in modules:
            _kinds[module][self._kind] -= 1

    def __getstate__(self) -> dict[str, Any]:
        return {"_kind": self._kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _modules=weakref.WeakSet())


def has_tenant(model: nn.Module, kind: str) -> bool:
    """Whether an object of `kind` is in a module of `model`."""
    return any(_kinds[module][kind] > 0 for module in model.modules() if module in _kinds)
