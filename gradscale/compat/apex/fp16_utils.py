"""`apex.fp16_utils`: half models and masters by hand, older than `amp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from gradscale.compat.apex import loss_scaler
from gradscale.compat.apex.fp16_optimizer import FP16_Optimizer
from gradscale.compat.apex.functions import CAST, cast_all
from gradscale.errors import SettingError
from gradscale.policy import MAX_SCALE
from gradscale.torch.grads.reference import count_bad
from gradscale.torch.optim.master_bits import flatten, unflatten

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


# Networks.


class tofp16(nn.Module):
    """A layer that makes its input float16."""

    def forward(self, input: Tensor) -> Tensor:
        """`input` in float16."""
        return input.half()


class FP16Model(nn.Module):
    """A network in float16 but for its batch norms, whose inputs are cast.

    Args:
        network: Is cast in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """What the network returns, in its own format."""
        return self.network(*cast_all(inputs, torch.half))


def BN_convert_float(module: nn.Module) -> nn.Module:
    """`module`, with its batch norms that have weights back in float32."""
    for inner in module.modules():
        if isinstance(inner, _BatchNorm) and inner.affine:
            inner.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in float16 but for its batch norms, behind a layer that casts its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the own weights and buffers of `module` in place, not those of modules inside."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.dtype in CAST:
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`network`, cast in place, except batch norms that have weights."""
    for module in network.modules():
        if not (isinstance(module, _BatchNorm) and module.affine):
            convert_module(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    return network


# Masters in lists.


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of `model` that are trained, and float32 masters of them.

    With `flat_master` the second list has one long master for all.
    """
    weights = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return weights, [nn.Parameter(param.detach().clone().float()) for param in weights]
    if len({param.dtype for param in weights}) > 1:
        raise SettingError(
            "flat_master requires parameters of one dtype, got "
            f"{sorted({str(param.dtype) for param in weights})}. Leave it out."
        )
    return weights, [nn.Parameter(flatten([param.detach() for param in weights]).float())]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[Any], master_params: list[Any], flat_master: bool = False
) -> None:
    """Copies the gradients of weights to their masters, as float32."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten(grads).float()
        return
    for param, master in zip(model_params, master_params, strict=True):
        master.grad = None if param.grad is None else param.grad.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[Any], master_params: list[Any], flat_master: bool = False
) -> None:
    """Writes weights from their masters."""
    wholes = unflatten(master_params[0], model_params) if flat_master else master_params
    for param, whole in zip(model_params, wholes, strict=True):
        param.copy_(whole)


def to_python_float(t: Any) -> float:
    """The number in a tensor of one element."""
    return float(t.reshape(-1)[0]) if isinstance(t, Tensor) else float(t[0])


# Scales by hand.


class LossScaler:
    """A scale that never moves.

    Args:
        scale: The scale.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """False: Apex looks for overflows only where the scale can move."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Any], grad_out: Any) -> tuple[Any, ...]:
        """The gradients `grad_in` times the scale, for a backward hook."""
        return tuple(None if grad is None else grad * self.loss_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The backward pass of the scaled loss."""
        torch.autograd.backward(loss.float() * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that is lowered at an overflow, to 1 at least, and raised when there was none.

    Args:
        init_scale: The first scale.
        scale_factor: By what it is multiplied and divided.
        scale_window: After how many finite passes in a row it grows.
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        bounds = min(1.0, init_scale), max(MAX_SCALE, init_scale)
        self._scaler = loss_scaler.LossScaler(
            "dynamic", init_scale, scale_factor, scale_window, *bounds
        )
        super().__init__(self._scaler.loss_scale())

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """Whether a gradient of `params` is not finite.

        **Waits for the device.**
        """
        return bool(count_bad([param for param in params if param.grad is not None])()[0])

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale after a pass with an `overflow`, or without."""
        scaler = self._scaler
        scaler.state = scaler.state._replace(scale=self.cur_scale)
        scaler.update(finite=not overflow)
        self.cur_scale = scaler.loss_scale()
