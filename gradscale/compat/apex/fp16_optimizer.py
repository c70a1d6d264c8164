"""`FP16_Optimizer`: an optimizer with masters and a scale of its own, older than `amp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gradscale.compat.apex.amp_optimizer import AmpOptimizer, finish, scaled_pass
from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.options import HALVES
from gradscale.errors import CallOrderError, SettingError, StateError


class FP16_Optimizer:
    """An optimizer whose half weights have float32 masters, and whose loss is scaled.

        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    Args:
        init_optimizer: An optimizer of half and float32 weights; it stays `.optimizer`.
        static_loss_scale: The scale, if it does not move.
        dynamic_loss_scale: Whether it moves.
        dynamic_loss_args: `init_scale`, `scale_factor` and `scale_window` of one that moves.
        verbose: Not used: nothing is printed.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise SettingError(
                "init_optimizer must be an optimizer of torch.optim, got "
                f"{type(init_optimizer).__name__}."
            )
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **dict(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.overflow = False
        """Whether the last gradients were not finite, so that `step()` will do nothing."""
        self._amp = AmpOptimizer(init_optimizer, master_weights=True)

    def __getstate__(self) -> Any:
        raise CallOrderError("FP16_Optimizer cannot be pickled. Save its state_dict() instead.")

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside: they hold the weights, not their masters."""
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass; can be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """The backward pass of the scaled loss.

        With `update_master_grads=False` gradients stay scaled, for other passes to add to; call
        `update_master_grads()` then.
        """
        with scaled_pass([self._amp], self.loss_scaler, loss, not update_master_grads) as scaled:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
        if self._amp.pending is None:
            self._note_overflow()

    def update_master_grads(self) -> None:
        """Moves gradients to the masters, unscales them, and looks whether they are finite.

        **Waits for the device.**
        """
        if self._amp.pending is not None:
            finish([self._amp], *self._amp.pending)
            self._note_overflow()

    def _note_overflow(self) -> None:
        good = [result.good() for result in self._amp.results]  # all: each moves the scale
        self.overflow = not all(good)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The unscaled gradients, by group; None after an overflow."""
        if self.overflow:
            return None
        masters = iter(self._amp.params())
        return [[next(masters).grad for _ in group["params"]] for group in self.param_groups]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the unscaled gradients, which are clipped to `max_norm`; -1 if not finite."""
        if self.overflow:
            return -1
        return clip_grad_norm_(self._amp.params(), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Steps, unless the gradients were not finite. Takes no closure, unlike Apex'."""
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)  # which says why it cannot be

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clears all gradients."""
        self._amp.clear()
        self._amp.pending = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run goes on from; the masters are in the optimizer's state too."""
        masters = iter(list(self._amp.params()))
        wholes = [[(p, next(masters)) for p in group["params"]] for group in self.param_groups]
        return {
            "loss_scaler": self.loss_scaler.saved(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m for p, m in pairs if p.dtype in HALVES] for pairs in wholes],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`. Load the model first."""
        lacking = {"loss_scaler", "dynamic_loss_scale", "optimizer_state_dict"} - set(state_dict)
        saved = state_dict.get("loss_scaler")
        if lacking or not isinstance(saved, Mapping) or {"loss_scale", "unskipped"} - set(saved):
            raise StateError(
                "The state must be what state_dict() of an FP16_Optimizer of gradscale returned, "
                f"got the keys {sorted(map(str, state_dict))}. Nothing was loaded."
            )
        if bool(state_dict["dynamic_loss_scale"]) is not self.dynamic_loss_scale:
            raise StateError(
                f"The state has dynamic_loss_scale={state_dict['dynamic_loss_scale']}, but this "
                f"FP16_Optimizer has {self.dynamic_loss_scale}. Nothing was loaded."
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler.load(float(saved["loss_scale"]), int(saved["unskipped"]))
        self.overflow = bool(state_dict.get("overflow", False))
