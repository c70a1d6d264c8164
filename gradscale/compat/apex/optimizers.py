"""`apex.optimizers`: the fused optimizers that we have an equal of, in Apex' words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradscale.errors import SettingError
from gradscale.torch.optim import SGD
from gradscale.torch.optim.adam import Adam

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


def refuse(cls: str, **settings: tuple[Any, Any]) -> None:
    """A SettingError if one of `settings`, each (given, the only one we have), is another."""
    for name, (value, ours) in settings.items():
        if value != ours:
            raise SettingError(f"{name} of {cls} must be {ours!r} here, got {value!r}.")


def _zero_grad(optimizer: Any, set_to_none: bool | None = None) -> None:
    """Clears the gradients."""
    none = optimizer.set_grad_none if set_to_none is None else set_to_none
    Optimizer.zero_grad(optimizer, none)


class FusedAdam(Adam):
    """Apex' FusedAdam: Adam with decoupled weight decay, unless `adam_w_mode` says otherwise.

    Takes Apex' arguments. `set_grad_none` is whether `zero_grad()` drops gradients.
    """

    set_grad_none = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse("FusedAdam", bias_correction=(bias_correction, True), amsgrad=(amsgrad, False))
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=bool(adam_w_mode),
        )

    zero_grad = _zero_grad


class FusedSGD(SGD):
    """Apex' FusedSGD. Takes Apex' arguments, of which torch's are the ones that do something."""

    set_grad_none = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        refuse("FusedSGD", wd_after_momentum=(wd_after_momentum, False))
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    zero_grad = _zero_grad


def without_equal(name: str, instead: str) -> Callable[..., Any]:
    """A class with the name of Apex' `name` that can be imported, but not made."""

    def construct(*args: Any, **settings: Any) -> Any:
        raise SettingError(f"gradscale has no {name}. {instead}")

    construct.__name__ = construct.__qualname__ = name
    construct.__doc__ = f"Raises: there is no {name} here."
    return construct


_OTHERWISE = "Use FusedAdam or torch.optim.AdamW, and tune the learning rate again."
FusedLAMB = without_equal("FusedLAMB", _OTHERWISE)
FusedMixedPrecisionLamb = without_equal("FusedMixedPrecisionLamb", _OTHERWISE)
FusedNovoGrad = without_equal("FusedNovoGrad", _OTHERWISE)
FusedAdagrad = without_equal(
    "FusedAdagrad", "Use torch.optim.Adagrad, which implements the same rule."
)

multi_tensor_applier: Any = without_equal(
    "multi_tensor_applier",
    "Use torch._foreach_mul_ and similar functions, or gradscale.torch.GradScaler.",
)
multi_tensor_applier.available = False
"""Whether Apex' kernels are there; many scripts import it from `apex.multi_tensor_apply`."""
