"""What `amp` adds to an optimizer, by torch's own hooks: `optimizer.step` stays what it is.

Between two steps the gradients are unscaled: those of each backward pass are set apart from what
was there, divided by the scale of that pass, and added. So a scale may move in between. Gradients
of a pass with `delay_unscale` stay scaled, together with the scale that they have.

Gradients of half weights are added up in their masters, in float32. `weight.grad` stays, as in
Apex: scaled, and, as long as it is there, a sign that nobody called `zero_grad()`, which torch has
no hook for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.compat.apex.loss_scaler import LossScaler, PassResult, check_and_unscale
from gradscale.compat.apex.options import HALVES
from gradscale.errors import CallOrderError
from gradscale.torch.grads.scale import constant
from gradscale.torch.mixed_precision.masters import Masters


class _Left(NamedTuple):
    """The gradient that is left at a weight after it was added to that of its master."""

    weight: Tensor
    master: Tensor
    grad: Tensor
    version: int

    def is_there(self) -> bool:
        """Whether nobody has cleared it."""
        if self.weight.grad is not self.grad:
            return False
        # Writing anything but zeros to it does not clear it.
        return self.grad._version == self.version or bool(self.grad.any())


class AmpOptimizer:
    """What `amp` keeps of one optimizer.

    Args:
        optimizer: Whose steps are skipped after an overflow.
        master_weights: Whether half weights have masters.
        idle: Whether there is nothing to do.
    """

    def __init__(self, optimizer: Optimizer, master_weights: bool, idle: bool = False) -> None:
        self.optimizer = optimizer
        self.masters = Masters(optimizer) if master_weights else None
        self.idle = idle
        self.lazy_init_called = True
        """Scripts set it after `optimizer._lazy_init_maybe_master_weights()`; masters are there."""
        self.pending: tuple[LossScaler, float] | None = None
        """The scale that gradients still have, and whose it is."""
        self.results: list[PassResult] = []
        """Of the passes since the last step, but for those that were read and good."""
        self._aside: list[tuple[Tensor, Tensor]] = []
        """Parameters without masters and their gradients of earlier passes, during a pass."""
        self._left: list[_Left] = []
        """Those of the weights whose masters have gradients."""
        self._settings: list[dict[str, Any]] = []
        """The groups without their parameters, during a step that is skipped."""
        self._depth = 0
        """How many steps are running: a `step()` that calls `super().step()` is two."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def detach(self) -> None:
        """Removes all hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        if self.masters is not None:
            self.masters.store.detach()
        for name in ("_amp_stash", "_amp_lazy_init", "_lazy_init_maybe_master_weights"):
            vars(self.optimizer).pop(name, None)

    def params(self) -> Iterable[Tensor]:
        """What the optimizer works on: masters where there are some."""
        return self._params() if self.masters is None else self.masters.params()

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def weights(self) -> list[Tensor]:
        """The parameters that have masters."""
        return [p for p in self._params() if p.dtype in HALVES] if self.masters else []

    def plain(self) -> list[Tensor]:
        """The parameters that have none."""
        return [p for p in self._params() if not self.masters or p.dtype not in HALVES]

    # The names by which scripts reach for masters.

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The parameters that have masters."""
        return self.weights()

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters."""
        return [] if self.masters is None else list(map(self.masters.master, self.weights()))

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that have none."""
        return self.plain()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether the last pass had `delay_unscale`."""
        return self.pending is not None

    # A backward pass.

    def prepare(self, scaler: LossScaler, scale: float) -> None:
        """Sets gradients of earlier passes aside, for a pass with this `scale`."""
        self.idle = False  # a script may set the scale of a run that began without one
        if self.pending is not None:
            if self.pending == (scaler, scale):
                return
            # They have a scale of their own, so they cannot be added to what comes now.
            finish([self], *self.pending)
        self._depth = 0  # no hook runs after a step that raised
        if self.masters is not None:
            self.masters.write_back(True)
            self._drop_cleared()
            for weight in self.weights():
                weight.grad = None
        for param in self.plain():
            if param.grad is not None:
                self._aside.append((param, param.grad))
                param.grad = None

    def conclude(self, scaler: LossScaler, scale: float) -> bool:
        """Whether gradients can stay scaled after a pass; they cannot if some are not."""
        if self._aside or self._left:
            return False
        self.pending = scaler, scale
        return True

    def give_up(self) -> None:
        """Puts things back after a pass that raised."""
        if self.pending is not None:
            return  # what it has added cannot be separated from what was there
        for param in self._params():
            param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside.clear()
        for left in self._left:
            left.weight.grad = left.grad

    @torch.no_grad()
    def add_up(self, result: PassResult, inverse: Tensor) -> None:
        """Adds the gradients of a pass that is over to those of earlier ones.

        Those of weights, times `inverse`, to their masters'; others are unscaled by now.
        """
        if self.masters is not None:
            self.masters.accumulate(inverse)
            fresh = [weight for weight in self.weights() if weight.grad is not None]
            reached = set(map(id, fresh))
            self._left = [left for left in self._left if id(left.weight) not in reached]
            for left in self._left:
                left.weight.grad = left.grad
            for weight in fresh:
                grad: Any = weight.grad
                self._left.append(_Left(weight, self.masters.master(weight), grad, grad._version))
        for param, earlier in self._aside:
            param.grad = earlier if param.grad is None else earlier + param.grad
        self._aside.clear()
        self.pending = None
        self.results = [*(one for one in self.results if not one.passed), result]

    def _drop_cleared(self) -> None:
        """Clears the gradients of masters whose weights have none any more; removes the others'."""
        left, self._left = self._left, []
        for each in left:
            if each.is_there():
                self._left.append(each)
            else:
                each.master.grad = None
            each.weight.grad = None

    # A step.

    def _before_step(self, _: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Clears all gradients if a pass was bad, so that the step does nothing."""
        if not self.idle and not self._depth:
            self._refuse(args, kwargs)
            self._decide()
        self._depth += 1

    def _decide(self) -> None:
        """Prepares the step that follows, or has it do nothing."""
        results, self.results = self.results, []
        good = [result.good() for result in results]  # all of them: each moves a scale
        if not all(good):
            self._skip()
        elif self.masters is not None:
            self._drop_cleared()
            self._left.clear()
            self.masters.accumulate(constant(1.0))  # of a backward pass without scale_loss()
            for weight in self.weights():
                weight.grad = None
            masters = ((weight, self.masters.master(weight)) for weight in self.weights())
            self.masters.enter([weight for weight, master in masters if master.grad is not None])

    def _refuse(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises if there can be no step now."""
        if kwargs.get("closure") is not None or any(arg is not None for arg in args[1:]):
            raise CallOrderError(
                "step() was called with a closure, which amp does not support, because it decides "
                "before the step whether to skip it. Call the closure first and step() without "
                "it, or use gradscale.torch.GradScaler, which supports closures."
            )
        if self.pending is not None:
            raise CallOrderError(
                "step() was called while gradients are still scaled: the last scale_loss() had "
                "delay_unscale=True. Do not pass delay_unscale=True for the last backward pass "
                "before a step."
            )

    def _skip(self) -> None:
        """Leaves the optimizer nothing to do."""
        for group in self.optimizer.param_groups:
            # Some optimizers count steps in their groups.
            self._settings.append({k: v for k, v in group.items() if k != "params"})
        self.clear()

    def clear(self) -> None:
        """Clears all gradients."""
        self._left.clear()
        if self.masters is not None:
            for master in self.masters.params():
                master.grad = None
        for param in self._params():
            param.grad = None

    def _after_load(self, _: Optimizer) -> None:
        """Forgets gradients: they are of another run."""
        if self.masters is not None:
            self.pending = None
            self.results.clear()
            self.clear()

    def _after_step(self, *_: Any) -> None:
        """Writes the weights from their masters."""
        self._depth -= 1
        if self._depth:
            return
        if self.masters is not None:
            self.masters.write_back(True)
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update(settings)
        self._settings.clear()


def amp_optimizer(optimizer: Any, master_weights: bool = False, idle: bool = False) -> AmpOptimizer:
    """What `amp` keeps of `optimizer`, made if there is nothing yet."""
    found: AmpOptimizer | None = getattr(optimizer, "_amp_stash", None)
    if found is None:
        found = optimizer._amp_stash = AmpOptimizer(optimizer, master_weights, idle)
        # Scripts call them before they load masters; ours are made when they are asked for.
        optimizer._amp_lazy_init = optimizer._lazy_init_maybe_master_weights = _do_nothing
    return found


def _do_nothing() -> None:
    """Nothing."""


@contextmanager
def scaled_pass(
    optimizers: Sequence[AmpOptimizer],
    scaler: LossScaler,
    loss: Tensor,
    delay: bool = False,
    check: bool = True,
) -> Iterator[Tensor]:
    """Gives the scaled `loss`; afterwards the gradients of its backward pass are unscaled.

    With `delay` they stay scaled, unless earlier ones are not. Unless `check`, whether they are
    finite is left to the step.
    """
    scale = scaler.loss_scale()
    for one in optimizers:
        one.prepare(scaler, scale)
    try:
        yield scaler.multiply(loss)
    except BaseException:
        for one in optimizers:
            one.give_up()
        raise
    due = [one for one in optimizers if not (delay and one.conclude(scaler, scale))]
    result = finish(due, scaler, scale) if due else None
    if check and result is not None:
        result.good()


def finish(optimizers: Sequence[AmpOptimizer], scaler: LossScaler, scale: float) -> PassResult:
    """Unscales the gradients of the pass that is over; what they were like."""
    weights = [weight for one in optimizers for weight in one.weights()]
    plain = [param for one in optimizers for param in one.plain()]
    result, inverse = check_and_unscale(weights, plain, scaler, scale)
    for one in optimizers:
        one.add_up(result, inverse)
    return result
