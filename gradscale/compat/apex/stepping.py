"""How `amp` looks after an optimizer, by torch's own hooks: `optimizer.step` stays what it is.

Between two steps the gradients are unscaled: those of each backward pass are set apart from what
was there, divided by the scale of that pass, and added. So a scale may move in between. Gradients
of a pass with `delay_unscale` stay scaled, together with the scale that they have.

Gradients of half weights are moved to their masters. `weight.grad` stays, as Apex has it: scaled,
and, as long as it is there, a sign that nobody called `zero_grad()`, which torch has no hook for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.compat.apex.options import HALVES
from gradscale.compat.apex.scaling import LossScaler, Verdict, unscale_grads
from gradscale.errors import CallOrderError
from gradscale.torch.master import Masters


class _Left(NamedTuple):
    """The gradient that is left at a weight when its master has it."""

    weight: Tensor
    stand: Tensor
    """The master."""
    grad: Tensor
    version: int

    def is_there(self) -> bool:
        """Whether nobody has cleared it."""
        if self.weight.grad is not self.grad:
            return False
        # Who writes to it, but no zeros, has not cleared anything.
        return self.grad._version == self.version or bool(self.grad.any())


class Caretaker:
    """What `amp` keeps of one optimizer.

    Args:
        optimizer: Whose steps are skipped after an overflow.
        master_weights: Whether half weights have masters.
        idle: Whether there is nothing to look after.
    """

    def __init__(self, optimizer: Optimizer, master_weights: bool, idle: bool = False) -> None:
        self.optimizer = optimizer
        self.masters = Masters(optimizer) if master_weights else None
        self.idle = idle
        self.pending: tuple[LossScaler, float] | None = None
        """The scale that gradients still have, and whose it is."""
        self.verdicts: list[Verdict] = []
        """On the passes since the last step, but for those that were seen to be good."""
        self._held: list[tuple[Tensor, Tensor]] = []
        """Tensors and their gradients of earlier passes, during a pass."""
        self._left: list[_Left] = []
        """Those of the weights whose masters have gradients."""
        self._settings: list[dict[str, Any]] = []
        """The groups without their parameters, during a step that is skipped."""
        self._depth = 0
        """How many steps we are inside of: a `step()` that calls `super().step()` is two."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def leave(self) -> None:
        """Looks after the optimizer no more."""
        for hook in self._hooks:
            hook.remove()
        vars(self.optimizer).pop("_amp_stash", None)

    def params(self) -> Iterable[Tensor]:
        """What the optimizer works on: masters where there are some."""
        return self._weights() if self.masters is None else list(self.masters.params())

    def _weights(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    # A backward pass.

    def prepare(self, scaler: LossScaler, scale: float) -> None:
        """Makes room for the gradients of a pass with this `scale`."""
        if self.pending is not None:
            if self.pending == (scaler, scale):
                return
            # They have a scale of their own, so they cannot be added to what comes now.
            finish([self], *self.pending)
        self._depth = 0  # a step that raised has told nobody that it is over
        if self.masters is not None:
            self.masters.take_out()
            self._hear_of_zero_grad()
            for weight in self._weights():
                if weight.dtype in HALVES:
                    weight.grad = None
        for tensor in self._with_grads():
            if tensor.grad is not None:
                self._held.append((tensor, tensor.grad))
                tensor.grad = None

    def conclude(self, scaler: LossScaler, scale: float) -> bool:
        """Whether gradients can stay scaled after a pass; they cannot if some are not."""
        if self._held:
            return False
        self.pending = scaler, scale
        return True

    def give_up(self) -> None:
        """Puts things back after a pass that raised."""
        if self.pending is not None:
            return  # what it has added cannot be told from what was there
        for weight in (*self._with_grads(), *self._weights()):
            weight.grad = None
        for tensor, grad in self._held:
            tensor.grad = grad
        self._held.clear()
        for left in self._left:
            left.weight.grad = left.grad

    def gather(self) -> list[Tensor]:
        """The tensors that have the gradients of this pass, which is over."""
        if self.masters is not None:
            fresh = {id(w): w.grad for w in self._weights() if w.dtype in HALVES}
            self.masters.gather()
            self._left = [left for left in self._left if fresh[id(left.weight)] is None]
            for weight, stand in self.masters.pairs():
                grad = fresh[id(weight)]
                if grad is not None:
                    self._left.append(_Left(weight, stand, grad, grad._version))
            for left in self._left:
                left.weight.grad = left.grad
        return self._with_grads()

    @torch.no_grad()
    def add_up(self, verdict: Verdict) -> None:
        """Adds what was there before the pass to its gradients, which are unscaled now."""
        for tensor, grad in self._held:
            tensor.grad = grad if tensor.grad is None else grad + tensor.grad
        self._held.clear()
        self.pending = None
        self.verdicts = [*(one for one in self.verdicts if not one.passed), verdict]

    def _with_grads(self) -> list[Tensor]:
        """The tensors that have gradients of their own: masters, and weights without one."""
        if self.masters is None:
            return self._weights()
        whole = [weight for weight in self._weights() if weight.dtype not in HALVES]
        return [*(stand for _, stand in self.masters.pairs()), *whole]

    def _hear_of_zero_grad(self) -> None:
        """Clears the gradients of masters whose weights have none any more; drops the others'."""
        left, self._left = self._left, []
        for each in left:
            if each.is_there():
                self._left.append(each)
            else:
                each.stand.grad = None
            each.weight.grad = None

    # A step.

    def _before_step(self, _: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Clears all gradients if a pass was bad, so that the step does nothing."""
        if not self.idle and not self._depth:
            self._refuse(args, kwargs)
            self._decide()
        self._depth += 1

    def _decide(self) -> None:
        """Has the step that follows do something, or nothing."""
        verdicts, self.verdicts = self.verdicts, []
        good = [verdict.good() for verdict in verdicts]  # all of them: each moves a scale
        if not all(good):
            self._skip()
        elif self.masters is not None:
            self._hear_of_zero_grad()
            self._left.clear()
            self.masters.gather()  # of a backward pass without scale_loss()
            self.masters.put_in()

    def _refuse(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises if there can be no step now."""
        if kwargs.get("closure") is not None or any(arg is not None for arg in args[1:]):
            raise CallOrderError(
                "step() was called with a closure, which amp does not support: whether to skip is "
                "known before the step. Call the closure first and step() without it, or use "
                "gradscale.torch.GradScaler, which takes closures."
            )
        if self.pending is not None:
            raise CallOrderError(
                "step() was called while gradients are still scaled: the last scale_loss() had "
                "delay_unscale=True. Leave it out in the last pass before a step."
            )

    def _skip(self) -> None:
        """Has the optimizer find nothing to do."""
        for group in self.optimizer.param_groups:
            # Some optimizers count steps in their groups.
            self._settings.append({k: v for k, v in group.items() if k != "params"})
        self.clear()

    def clear(self) -> None:
        """Clears all gradients."""
        self._left.clear()
        if self.masters is not None:
            self.masters.zero_grad()
        for weight in self._weights():
            weight.grad = None

    def _after_load(self, _: Optimizer) -> None:
        """Forgets masters and gradients: they are of another run."""
        if self.masters is not None:
            self.pending = None
            self.verdicts.clear()
            self.clear()

    def _after_step(self, *_: Any) -> None:
        """Writes the weights from their masters."""
        self._depth -= 1
        if self._depth:
            return
        if self.masters is not None:
            self.masters.take_out()
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update(settings)
        self._settings.clear()


def finish(caretakers: Sequence[Caretaker], scaler: LossScaler, scale: float) -> Verdict:
    """Unscales the gradients of the pass that is over; what they were like."""
    fresh = [tensor for caretaker in caretakers for tensor in caretaker.gather()]
    verdict = unscale_grads(fresh, scaler, scale)
    for caretaker in caretakers:
        caretaker.add_up(verdict)
    return verdict
