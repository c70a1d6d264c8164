"""Attributes of transformers models: what they keep in float32, and their embeddings.

They are read from every module of a model, also inside of PEFT. Nothing is imported, and any module
may have the same attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.telemetry.names import bare


def modules_in_float32(model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """The modules that `model` keeps in float32 where others are cast to `dtype`."""
    found = {
        module
        for outer, pattern in _float32_patterns(model, dtype)
        for name, module in outer.named_modules()
        if re.search(rf"(^|\.)({pattern})$", name)
    }
    return [module for module in model.modules() if module in found]


def params_in_float32(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """The parameters that `model` keeps in float32 where others are cast to `dtype`."""
    return [
        param
        for outer, pattern in _float32_patterns(model, dtype)
        for name, param in outer.named_parameters()
        if re.search(rf"(^|\.)({pattern})(\.|$)", name)
    ]


def _float32_patterns(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str]]:
    """Modules that keep parts of themselves in float32, and a regular expression of their names.

    The first list is for float16 alone, whose range is too small for these parts.
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
    """The input and output embeddings of models, which `resize_token_embeddings()` replaces.

    An optimizer does not see that: it would step the old ones for ever. Models that are sharded
    are left out: those have other parameters in a pass than after it.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        bares = [bare(model) for model in models]
        self._models = [model for model in bares if all(map(_is_whole, _embeddings(model)))]
        self.shapes = {
            weight: weight.shape for model in self._models for weight in _embeddings(model)
        }
        """What they were like; empty where no model has any."""

    def refuse_replaced(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises a CallOrderError if a model has embeddings that no optimizer has as they are."""
        for model in self._models:
            for weight in _embeddings(model):
                if not weight.requires_grad or self.shapes.get(weight) == weight.shape:
                    continue
                if weight not in self.shapes and id(weight) in _trained(optimizers):
                    continue  # embeddings of another adapter, for one
                raise CallOrderError(
                    f"The embeddings of {type(model).__name__} have been replaced since "
                    f"MixedPrecision was created, and now have shape {tuple(weight.shape)}: "
                    "resize_token_embeddings() replaces them. Call it first, then create the "
                    "optimizer and MixedPrecision."
                )

    def refuse_stale(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises a SettingError if an optimizer has embeddings that a model had before."""
        trained = _trained(optimizers)
        own = {id(param) for model in self._models for param in model.parameters()}
        others = {param.shape[1:] for key, param in trained.items() if key not in own}
        for model in self._models:
            for weight in _embeddings(model):
                missing = weight.requires_grad and id(weight) not in trained
                if missing and weight.shape[1:] in others:
                    raise SettingError(
                        f"The optimizer has embeddings that {type(model).__name__} no longer has, "
                        f"and not the present ones of shape {tuple(weight.shape)}. Create the "
                        "optimizer after resize_token_embeddings()."
                    )


def _trained(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """The parameters of `optimizers` by their ids."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(param): param for group in groups for param in group["params"]}


def _embeddings(model: Any) -> list[Tensor]:
    """The weights of the input and output embeddings of `model`, if it has such methods."""
    found: list[Tensor] = []
    for which in ("get_input_embeddings", "get_output_embeddings"):
        try:
            weight = getattr(model, which)().weight
        except (AttributeError, NotImplementedError):
            continue  # it has none, or no such method
        if isinstance(weight, nn.Parameter):  # and not one that is computed
            found.append(weight)
    return found


def _is_whole(weight: Tensor) -> bool:
    """Whether `weight` is no shard: neither a DTensor nor flat."""
    return weight.dim() > 1 and not hasattr(weight, "device_mesh")
