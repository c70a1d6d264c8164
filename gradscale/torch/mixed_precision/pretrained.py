"""What models of transformers say about themselves.

Read from their attributes, wherever in a model they are, also inside of PEFT: nothing is imported,
and any model may say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.telemetry.names import bare


def modules_in_float32(model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """The modules that `model` wants in float32 where others are cast to `dtype`."""
    found = {
        module
        for outer, wanted in _wishes(model, dtype)
        for name, module in outer.named_modules()
        if re.search(rf"(^|\.)({wanted})$", name)
    }
    return [module for module in model.modules() if module in found]


def params_in_float32(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """The parameters that `model` wants in float32 where others are cast to `dtype`."""
    return [
        param
        for outer, wanted in _wishes(model, dtype)
        for name, param in outer.named_parameters()
        if re.search(rf"(^|\.)({wanted})(\.|$)", name)
    ]


def _wishes(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str]]:
    """The modules that want something in float32, and a regular expression of their names for it.

    Names of the first list are those that float16 is too narrow for.
    """
    for module in model.modules():
        names: list[str] = []
        if dtype is torch.float16:
            names += getattr(module, "_keep_in_fp32_modules", None) or ()
        names += getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if names:
            yield module, "|".join(re.escape(name).replace(r"\*", ".*") for name in names)


def inner_models(model: nn.Module) -> list[nn.Module]:
    """The models inside of `model`, which `generate()` and users also call by themselves."""
    inner = list(model.modules())[1:]
    return [each for each in inner if isinstance(getattr(each, "base_model_prefix", None), str)]


class Embeddings:
    """The input embeddings of models, which `resize_token_embeddings()` replaces.

    An optimizer does not see that: it would step the old ones for ever.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._weights = [(bare(model), _embedding(bare(model))) for model in models]

    def refuse_replaced(self) -> None:
        """Raises a CallOrderError if a model has other embeddings than at first."""
        for model, weight in self._weights:
            if weight is not None and _embedding(model) is not weight:
                raise CallOrderError(
                    f"The input embeddings of {type(model).__name__} were replaced after "
                    "MixedPrecision was made, as resize_token_embeddings() does, so no optimizer "
                    "has them. Resize first, then build the optimizer and MixedPrecision."
                )

    def refuse_forgotten(self, optimizers: Iterable[Optimizer]) -> None:
        """Raises a SettingError if an optimizer has the embeddings that a model had before."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = {id(param): param for group in groups for param in group["params"]}
        for model, weight in self._weights:
            if weight is None or not weight.requires_grad or id(weight) in trained:
                continue
            own = {id(param) for param in model.parameters()}
            others = [param.shape for key, param in trained.items() if key not in own]
            if any(len(shape) == 2 and shape[1:] == weight.shape[1:] for shape in others):
                raise SettingError(
                    f"The optimizer has embeddings that {type(model).__name__} no longer has, and "
                    f"not those of shape {tuple(weight.shape)} that it has. Build the optimizer "
                    "after resize_token_embeddings()."
                )


def _embedding(model: Any) -> Tensor | None:
    """The weight of the input embeddings of `model`; None if it does not say which that is."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    return weight if isinstance(weight, Tensor) else None
