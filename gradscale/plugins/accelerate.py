"""Accelerate with our scaler inside, by one call.

    accelerator = Accelerator(mixed_precision="fp16")
    use_gradscale(accelerator, policy=gs.Headroom())

Accelerate calls `scale`, `unscale_`, `step` and `update` of `accelerator.scaler`, saves it and
loads it. What it has no place for is put on the objects, never on its classes: see `_Attachment`.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import SCALER_NAME, DistributedType, convert_outputs_to_fp32
except ImportError as error:
    message = "gradscale.plugins.accelerate needs Accelerate: pip install accelerate."
    raise ImportError(message) from error

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import Policy
from gradscale.torch import GradScaler

OWN_SCALES = {
    DistributedType.DEEPSPEED: "DeepSpeed scales losses itself: set fp16 in its own configuration",
    DistributedType.MEGATRON_LM: "Megatron-LM scales losses itself: set its own options",
    DistributedType.XLA: "torch_xla steps optimizers itself: use bf16 there",
}
"""Where Accelerate leaves the loss and the step to others, and what to do there."""


def use_gradscale(
    accelerator: Accelerator, policy: Policy | str | None = None, **settings: Any
) -> GradScaler:
    """The scaler that `accelerator` has from here on; it is also `accelerator.scaler`.

    Call it before or after `prepare()`, and before `load_state()`. With `mixed_precision="fp16"`
    models run in float16 on a CPU as well, where Accelerate leaves them in float32; with "no" the
    loss is scaled, and autocast is up to you.

    Args:
        accelerator: Its `optimizer_step_was_skipped` **waits for the device**, as does a prepared
            scheduler, which reads it.
        policy: The rule that moves the scale, or its name; without it torch's.
        settings: Those of `GradScaler`. They win over a `GradScalerKwargs` handler's.

    Raises:
        SettingError: It is no Accelerator, or one whose losses are scaled by DeepSpeed,
            Megatron-LM or torch_xla.
    """
    if not isinstance(accelerator, Accelerator):
        raise SettingError(
            f"use_gradscale() takes an Accelerator, got {type(accelerator).__name__}. For a "
            "Trainer, use gradscale.plugins.transformers.use_gradscale()."
        )
    if accelerator.distributed_type in OWN_SCALES:
        raise SettingError(f"{OWN_SCALES[accelerator.distributed_type]}. Nothing was changed.")
    _refuse_waiting(accelerator)
    handler = accelerator.scaler_handler
    given = {} if handler is None else handler.to_kwargs()
    if accelerator.mixed_precision == "bf16":
        given["format"] = "bfloat16"
    scaler = GradScaler(accelerator.device.type, policy=policy, **{**given, **settings})
    accelerator.scaler = scaler
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        accelerator.native_amp = True  # what prepare() and autocast() go by
        for model in accelerator._models:
            _autocast_forward(accelerator, model)
    _Attachment(accelerator, scaler).attach_prepared()
    return scaler


def _refuse_waiting(accelerator: Any) -> None:
    """Raises a CallOrderError if gradients have a scale that a new scaler would not divide by."""
    if isinstance(accelerator.scaler, GradScaler):
        iteration = accelerator.scaler._pipeline.passes.iteration
        groups = [group for each in accelerator._optimizers for group in each.param_groups]
        left = any(param.grad is not None for group in groups for param in group["params"])
        if iteration is not None and iteration.passes and left:
            raise CallOrderError(
                "use_gradscale() was called while gradients of the previous scaler have not been "
                "used in a step. Call optimizer.step() or optimizer.zero_grad() first."
            )


class GradscaleOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that reads the scaler's outcome instead of guessing it.

    Accelerate takes a step for applied if `optimizer.step()` was called, and replaces that method
    to see it. Fused optimizers skip inside of the call, and schedulers warn of the replacement.
    """

    _accelerate_step_called = False
    _optimizer_original_step_method = property(lambda self: self.optimizer.step)
    _optimizer_patched_step_method = _optimizer_original_step_method
    """What Accelerate sets `optimizer.step` to: what it is."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; **waits for the device**."""
        try:
            outcome = self.scaler.outcome(_bare(self))
        except CallOrderError:  # before its first step
            return False
        return not outcome.applied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class _Attachment:
    """Puts a scaler to work in an accelerator.

    Two methods of the accelerator are replaced, on this object alone. `backward()`, because it is
    the one call that comes after every `prepare()` and before the first step: there, models are
    named and optimizers become `GradscaleOptimizer`s. `unscale_gradients()`, because Accelerate's
    does nothing unless `mixed_precision` is "fp16", and raises if parameters are clipped in parts.
    """

    def __init__(self, accelerator: Any, scaler: GradScaler) -> None:
        self._accelerator = accelerator
        self._scaler = scaler
        self._named: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        accelerator.backward = self.backward
        accelerator.unscale_gradients = self.unscale_gradients
        accelerator.register_load_state_pre_hook(self._load_again)

    def attach_prepared(self) -> None:
        """Names the models and takes over the optimizers that were prepared since the last call."""
        models = [each for each in self._accelerator._models if each not in self._named]
        if models:
            self._named.update(models)
            for model in _wrapped(models):
                self._scaler.name(model)
        for optimizer in self._accelerator._optimizers:
            if type(optimizer) is AcceleratedOptimizer:
                inner, theirs = optimizer.optimizer, vars(optimizer)
                # In a step with a closure, whose pass is the first of all, it is replaced now.
                if inner.step is theirs.get("_optimizer_patched_step_method"):
                    inner.step = theirs["_optimizer_original_step_method"]
                optimizer.__class__ = GradscaleOptimizer
            elif optimizer.scaler is self._scaler:
                continue
            optimizer.scaler = self._scaler
            self._scaler.watch(_bare(optimizer))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """`Accelerator.backward`."""
        self.attach_prepared()
        type(self._accelerator).backward(self._accelerator, loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """`Accelerator.unscale_gradients`, also for gradients that are unscaled already."""
        several = self._accelerator._optimizers if optimizer is None else optimizer
        for each in several if isinstance(several, list | tuple) else [several]:
            bare = _bare(each)
            if not self._scaler._pipeline.entries.is_unscaled(bare):
                self._scaler.unscale_(bare)

    def _load_again(self, _: Any, folder: str) -> None:
        """Loads the scaler after the optimizers.

        With FSDP2 it was loaded before: and torch makes the state of an optimizer by a step with
        gradients of zero, which counted.
        """
        sharded = getattr(self._accelerator, "is_fsdp2", False)
        if sharded and self._accelerator.scaler is self._scaler:
            saved = torch.load(os.path.join(folder, SCALER_NAME), weights_only=True)
            self._scaler.load_state_dict(saved)


def _autocast_forward(accelerator: Any, model: Any) -> None:
    """Does for a model that is prepared what `prepare()` does where `native_amp` is true."""
    model._original_forward = forward = model.forward
    plain = getattr(forward, "__func__", forward)
    wrapped = convert_outputs_to_fp32(accelerator.autocast()(plain))
    model.forward = wrapped if plain is forward else MethodType(wrapped, model)


def _bare(optimizer: Any) -> Any:
    """The optimizer inside a prepared one."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _wrapped(models: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """`models`, and the DDP modules around them, which know the ranks.

    Accelerate keeps the modules that it was given, not the DDP modules that it made of them.
    """
    inner = {id(model) for model in models}
    yield from models
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        kind = torch.nn.parallel.DistributedDataParallel
        # Not isinstance(), which runs code of the objects.
        ddp = [each for each in gc.get_objects() if issubclass(type(each), kind)]
        yield from (each for each in ddp if id(each.module) in inner)
