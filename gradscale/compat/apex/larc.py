"""`apex.parallel.LARC`: a learning rate for each parameter, by its norm and its gradient's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.compat.apex.options import HALVES
from gradscale.errors import SettingError

__all__ = ["LARC"]

_SETTINGS = ("trust_coefficient", "clip", "eps")


class LARC(Optimizer):
    """An optimizer whose gradients are scaled before each step, one factor for each parameter.

        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        rate = trust_coefficient * norm(param) / (norm(grad) + weight_decay * norm(param) + eps)
        factor = min(rate / lr, 1) if clip else rate
        grad = (grad + weight_decay * param) * factor

    So weight decay is part of the gradient, and the optimizer inside sees none. A parameter that
    is 0 keeps its gradient; one whose gradient is 0 is left alone. Norms are taken in float32.

    The groups, the state and `state_dict()` are those of the optimizer inside. It goes wherever an
    optimizer does: `amp.initialize`, `GradScaler.step`, `FP16_Optimizer`, schedulers. Gradients
    must be unscaled when it steps, which is what these do.

    Args:
        optimizer: Any optimizer of torch.optim or like it; stays `.optim`.
        trust_coefficient: How large an update may be in relation to the parameter.
        clip: Whether the learning rate is at most `lr`; else it is `lr` times the rate.
        eps: Is added to the divisor.
    """

    optim: Optimizer
    trust_coefficient: float
    clip: bool
    eps: float

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise SettingError(
                f"optimizer must be an optimizer of torch.optim, got {type(optimizer).__name__}. "
                "Put LARC around the optimizer itself, and other wrappers around LARC."
            )
        # Not Optimizer.__init__: groups and state are the optimizer's, only hooks are new.
        settings = trust_coefficient, clip, eps
        self.__setstate__({"optim": optimizer, **dict(zip(_SETTINGS, settings, strict=True))})

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, **{name: vars(self)[name] for name in _SETTINGS}}

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={vars(self)[name]!r}" for name in _SETTINGS)
        return f"LARC({self.optim!r}, {settings})"

    # What is the optimizer's.

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optim.defaults

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def param_groups(self) -> Any:
        """Those of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer inside."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, *args: Any, **settings: Any) -> None:
        """Clears the gradients."""
        self.optim.zero_grad(*args, **settings)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads it into the optimizer inside."""
        self.optim.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """A hook of the optimizer inside, as are the next three."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    # A step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the optimizer inside with scaled gradients; what that returns."""
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay:
                    group["weight_decay"] = 0
            if closure is None:
                self._adapt(decays)
                return self.optim.step()
            return self.optim.step(self._adapting(closure, decays))
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay:
                    group["weight_decay"] = decay

    def _adapting(self, closure: Callable[[], Any], decays: list[float]) -> Callable[[], Any]:
        """`closure`, whose gradients are scaled each time."""

        def evaluate() -> Any:
            loss = closure()
            self._adapt(decays)
            return loss

        return evaluate

    @torch.no_grad()
    def _adapt(self, decays: list[float]) -> None:
        """Scales all gradients in place."""
        for group, decay in zip(self.param_groups, decays, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    factor = self._factor(param, group["lr"], decay)
                    if decay:
                        param.grad.add_(param, alpha=decay)
                    param.grad.mul_(factor)

    def _factor(self, param: Tensor, lr: Any, decay: float) -> Tensor:
        """By what the gradient of `param` is multiplied, on its device."""
        size, slope = _norm(param), _norm(param.grad)
        rate = self.trust_coefficient * size / (slope + decay * size + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        return torch.where(slope == 0, 0.0, torch.where(size == 0, 1.0, rate))


def _norm(tensor: Any) -> Tensor:
    """The norm of `tensor`, in float32 at least."""
    values: Tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    norm: Tensor = torch.linalg.vector_norm(values.float() if values.dtype in HALVES else values)
    return norm
