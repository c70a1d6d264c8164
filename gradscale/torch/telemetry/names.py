"""Names of parameters, and the models inside wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import SettingError


class Names:
    """The names of parameters, as models and optimizers give them."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._found: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """Those that an inspector has found, for parameters that nobody has named."""
        self.aliases: dict[int, Tensor] = {}
        """The weights of masters that are in the groups of optimizers now, by the master's id."""

    def take(self, model: torch.nn.Module) -> None:
        """Adds the names that `model` has for its parameters."""
        if not isinstance(model, nn.Module):
            raise SettingError(
                f"name() takes the model, a torch.nn.Module, got {type(model).__name__}."
            )
        for name, param in model.named_parameters():
            self._given[id(param)] = (weakref.ref(param), name)

    def find(self, params: Mapping[str, Tensor]) -> None:
        """Adds names for messages alone: `params()` has none of these."""
        for name, param in params.items():
            self._found[id(param)] = (weakref.ref(param), name)

    def params(self) -> list[Tensor]:
        """The parameters that models have given names for."""
        return [param for ref, _ in self._given.values() if (param := ref()) is not None]

    def of(self, optimizers: Iterable[Optimizer]) -> dict[int, str]:
        """A name for every parameter of `optimizers`, by its id, in their order."""
        names: dict[int, str] = {}
        for number, group in enumerate(g for o in optimizers for g in o.param_groups):
            own = group.get("param_names", ())
            for place, param in enumerate(group["params"]):
                named = self.aliases.get(id(param), param)
                name = _name_in(self._given, named)
                if name is None and place < len(own):
                    name = own[place]
                if name is None:
                    name = _name_in(self._found, named)
                if name is None:
                    name = f"group {number}, parameter {place}, shape {tuple(param.shape)}"
                names.setdefault(id(param), name)
        return names


def _name_in(names: dict[int, tuple[weakref.ref[Tensor], str]], param: Tensor) -> str | None:
    """The name of a parameter; None if there is none."""
    ref, name = names.get(id(param), (None, ""))
    return name if ref is not None and ref() is param else None


def bare(model: nn.Module) -> nn.Module:
    """The model inside of `torch.compile`, DDP and their like."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, WRAPPERS):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
