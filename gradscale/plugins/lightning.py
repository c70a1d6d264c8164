"""Lightning: a precision plugin for `Trainer` and `Fabric`.

    trainer = Trainer(plugins=GradscalePrecision("16-mixed"))
    fabric = Fabric(plugins=GradscalePrecision("fp16-master"))

Where nobody looks at gradients between the backward pass and the step, unscaling, clipping and the
step are one `apply()`; where a hook does, torch's calls on our scaler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

try:
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    message = "gradscale.plugins.lightning needs Lightning: pip install lightning."
    raise ImportError(message) from error

from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.plugins.scheduler import FollowingScheduler
from gradscale.policy import Policy
from gradscale.torch.mixed_precision.casting import CastForward, Keep, cast_tensors, device_of
from gradscale.torch.mixed_precision.conversion import (
    convert_models,
    exact_values,
    give_masters,
    refuse_shared,
)
from gradscale.torch.mixed_precision.masters import Masters
from gradscale.torch.mixed_precision.modes import mode_named, policy_for
from gradscale.torch.mixed_precision.state import float32_state
from gradscale.torch.optim.master_bits import HALF_DTYPES, LOW_BITS, MASTER, rounded
from gradscale.torch.scaler import GradScaler
from gradscale.torch.telemetry.names import bare

_MODES = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Lightning's names of some modes."""
_NAMES = {mode: name for name, mode in _MODES.items()} | {
    "bf16-master": "bf16-true",
    "fp16-master": "16-true",
    "fp16-pure": "16-true",
}
"""What `trainer.precision` says in each mode."""
_KEYS = {MASTER, LOW_BITS}


class GradscalePrecision(Precision):
    """Mixed precision with gradscale's scaler, for `Trainer` and `Fabric`, on every device.

        trainer = Trainer(plugins=GradscalePrecision("16-mixed", policy=gs.Headroom()))

    `scaler` is the `GradScaler`: its events, outcomes and settings are to be had there.

    Args:
        mode: Lightning's "16-mixed", "bf16-mixed" and "32-true", or a mode of `MixedPrecision`:
            "fp16", "bf16", "fp32", "fp16-master", "bf16-master", "fp16-pure".
        policy: What moves the scale, a policy or a name such as "dynamic": `Headroom()` in float16,
            else `Static()` at 1.
        keep_float32: Modules that stay in float32, besides norms: names with wildcards, modules,
            classes.
        settings: Those of `GradScaler` that are no torch's, such as `on_stuck`.
    """

    def __init__(
        self,
        mode: str = "16-mixed",
        *,
        policy: Policy | str | None = None,
        keep_float32: Iterable[Keep] = (),
        **settings: Any,
    ) -> None:
        self.mode = mode_named(_MODES.get(mode, mode))
        name: Any = _NAMES[self.mode.name]
        self.precision = name
        policy = policy_for(self.mode, policy)
        self.scaler = GradScaler(policy=policy, format=self.mode.passes, **settings)
        self._keep = list(keep_float32)
        self._by_trainer = False
        """Whether a Trainer calls, and not Fabric."""
        # Weakly: a model has its trainer, and that the optimizers of its run.
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The models that were converted."""
        self._last_model: Callable[[], nn.Module | None] = lambda: None
        """The last one of these, weakly."""
        self._unnamed: list[nn.Module] = []
        """Those of Fabric, and their wrappers, until the first step."""
        self._hooks: list[RemovableHandle] = []
        """What finds the wrappers."""
        self._exact: list[tuple[Tensor, Tensor]] = []
        """Weights that were cast and have no master yet, with what they were before."""
        self._known: list[tuple[Optimizer, Masters | None]] = []
        """The optimizers, and what keeps the masters of each."""
        self._schedulers: list[FollowingScheduler] = []
        self._limits: dict[str, Any] | None = None
        """What the next `apply()` is to clip by; None where gradients are clipped at once."""

    # Models and optimizers.

    def convert_module(self, module: nn.Module) -> nn.Module:
        """`module`, in the formats of the mode."""
        forward = vars(bare(module)).get("forward")
        if self.mode.casts and isinstance(forward, CastForward):
            self._take_over(module, forward)
        elif module not in self._models:
            params = [param for param in module.parameters() if param.requires_grad]
            exact = exact_values(params) if self.mode.casts else []
            convert_models([module], self.mode, self._keep)
            self._exact += exact
        self._models.add(module)
        self._last_model = weakref.ref(module)
        self._unnamed.append(module)
        if dist.is_available() and dist.is_initialized():
            self._hooks.append(module.register_forward_pre_hook(self._find_wrapper))
        return module

    def _take_over(self, module: nn.Module, forward: CastForward) -> None:
        """Goes on with a model that was cast, with the masters that it has."""
        if forward.autocast is not self.mode.dtype:
            raise SettingError(
                f"The model was already cast to {forward.autocast}, but the mode is "
                f"{self.mode.name!r}. Use a mode with the same format, or create a new model."
            )
        wide = self.float32_model_state(module)
        known = {id(param) for param, _ in self._exact}
        for name, param in bare(module).named_parameters():
            if param.requires_grad and param.dtype in HALF_DTYPES and id(param) not in known:
                self._exact.append((param, wide[name]))

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """What a Trainer gives, with schedulers that follow applied steps."""
        self._by_trainer = True
        if self.mode.casts:
            refuse_shared(optimizers, self.mode)
        here = set(map(id, optimizers))
        for optimizer, _ in self._known:
            if id(optimizer) not in here:
                self.scaler._pipeline.entries.release(optimizer)
        self._known = [each for each in self._known if id(each[0]) in here]
        for optimizer in optimizers:
            self.watch(optimizer)
        self._unnamed = [model]
        self._name_models()
        for config in lr_schedulers:
            if type(config.scheduler) is not FollowingScheduler:
                config.scheduler = FollowingScheduler(config.scheduler, self.scaler)
        self._schedulers = [config.scheduler for config in lr_schedulers]
        return model, optimizers, lr_schedulers

    def watch(self, optimizer: Any) -> None:
        """Makes `optimizer` known before its first step, and gives its weights masters.

        A Trainer does so by itself. With Fabric, call it before a checkpoint is loaded, in modes
        that cast weights.
        """
        optimizer = _inner(optimizer)
        if any(optimizer is known for known, _ in self._known):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        have = {id(p) for p in params if not optimizer.state.get(p, {}).keys().isdisjoint(_KEYS)}
        if have and not hasattr(optimizer, "keep_masters"):
            raise StateError(
                f"The state of this {type(optimizer).__name__} was loaded before its masters were "
                "created, so the masters were rounded. Call precision.watch(optimizer) before "
                "fabric.load()."
            )
        mine = {id(param) for param in params}
        exact = [
            (param, _up_to_date(value, param))
            for param, value in self._exact
            if id(param) in mine - have
        ]
        (masters,) = give_masters([optimizer], self.mode, exact)
        self._exact = [pair for pair in self._exact if id(pair[0]) not in mine]
        self._known.append((optimizer, masters))
        self.scaler._pipeline.entries.watch(optimizer, masters)

    def _find_wrapper(self, *_: Any) -> None:
        """A hook of models: remembers the DistributedDataParallel whose forward this is part of."""
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and all(wrapper is not each for each in self._unnamed):
            self._unnamed.append(wrapper)

    def _name_models(self) -> None:
        """Takes over names and process groups of models that were not named yet."""
        for hook in self._hooks:
            hook.remove()
        for model in self._unnamed:
            self.scaler.name(model)
        self._hooks, self._unnamed = [], []

    # Passes.

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which operations run in the format of the mode."""
        model = self._last_model()
        if model is None:
            raise CallOrderError("There is no model yet. Call fabric.setup(model) first.")
        kind = device_of(model).type
        wide = self.mode.passes == "float32"
        # A whole training_step runs in it, which may step an optimizer and then go on: casts of
        # weights from before must not be used again.
        cache = not self._by_trainer
        dtype = None if wide else self.mode.dtype
        return torch.autocast(kind, dtype=dtype, enabled=not wide, cache_enabled=cache)

    def convert_output(self, data: Any) -> Any:
        """What a model of Fabric returned, with tensors in float32."""
        return cast_tensors(data, torch.get_default_dtype(), True)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """`tensor`, the loss as it is; calls a Trainer's hooks."""
        return super().pre_backward(tensor, module) if self._by_trainer else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scales the loss and runs its backward pass."""
        scaled = self.scaler.scale(tensor)
        if self._by_trainer:
            super().backward(scaled, model, *args, **kwargs)
        else:
            scaled.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """`tensor`, without its graph; calls a Trainer's hooks."""
        return super().post_backward(tensor, module) if self._by_trainer else tensor

    # Steps.

    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the closure returned, after it has run and the optimizer has stepped or skipped."""
        if model is None or closure is None:
            self._name_models()
            self.watch(optimizer)
            return self._step(optimizer, closure, kwargs, {})
        if not optimizer.param_groups:  # configure_optimizers() returned None
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise SettingError(
                "LBFGS evaluates the loss many times in a step, but GradscalePrecision supports "
                "one backward pass per step. Use another optimizer, or Fabric, or "
                "MixedPrecision.step(closure=)."
            )
        result = closure()
        if result is None and model.automatic_optimization:
            # training_step returned None: there was no backward pass, and there is no step.
            self._run_hooks(model, optimizer)
            return None
        if kwargs or _looks_at_gradients(model):
            self.unscale_gradients(optimizer)
            self._after_closure(model, optimizer)
            self._step(optimizer, None, kwargs, {})
        else:
            self._step(optimizer, None, {}, self._run_hooks(model, optimizer))
        for scheduler in self._schedulers:
            if scheduler.followed is optimizer:
                scheduler.count_step()
        return result

    def _run_hooks(self, model: LightningModule, optimizer: Any) -> dict[str, Any]:
        """What to clip by, after the hooks between a backward pass and a step have run."""
        limits = self._limits = {}
        try:
            self._after_closure(model, optimizer)
        finally:
            self._limits = None
        return limits

    def _step(
        self,
        optimizer: Any,
        closure: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        limits: dict[str, Any],
    ) -> Any:
        """What a step with a closure returned, else None, after stepping or skipping."""
        unscaled = self.scaler._pipeline.entries.is_unscaled(optimizer)
        if closure is None and not kwargs and not unscaled:
            self.scaler.apply(optimizer, zero_grad=False, **limits)
            return None
        result = self.scaler.step(optimizer, closure, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips the unscaled gradients: at once, or in the step that is about to be taken."""
        if clip_val <= 0:
            return
        by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if self._limits is not None:
            self._limits["clip_norm" if by_norm else "clip_value"] = clip_val
        elif by_norm:
            self.scaler.clip_grad_norm_(_inner(optimizer), clip_val)
        else:
            self.unscale_gradients(optimizer)
            nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divides the gradients of `optimizer` by their scale, once."""
        self._name_models()
        self.watch(optimizer)
        inner = _inner(optimizer)
        if not self.scaler._pipeline.entries.is_unscaled(inner):
            self.scaler.unscale_(inner)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The mode and the state of the scaler; masters are in the states of optimizers."""
        return {"mode": self.mode.name, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with what `state_dict()` gave.

        Raises:
            StateError: It is of another mode, or no such state; nothing was loaded.
        """
        if not {"mode", "scaler"} <= state_dict.keys():
            raise StateError(
                f"The state is not a state of GradscalePrecision: its keys are {list(state_dict)}."
            )
        if state_dict["mode"] != self.mode.name:
            raise StateError(
                f"The state was saved in the mode {state_dict['mode']!r}, but this run uses "
                f"{self.mode.name!r}. Use the same mode, or load only the weights."
            )
        self.scaler.load_state_dict(state_dict["scaler"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the scale from a checkpoint of Lightning's own MixedPrecision."""
        theirs = checkpoint.get("MixedPrecision")
        if theirs and type(self).__qualname__ not in checkpoint:
            self.scaler.load_state_dict(theirs, settings=False)

    def float32_model_state(self, model: nn.Module) -> dict[str, Any]:
        """The `state_dict()` of `model` in float32, with masters for weights: for export."""
        optimizers, masters = [each[0] for each in self._known], [each[1] for each in self._known]
        return float32_state(model, optimizers, masters)

    def teardown(self) -> None:
        """Delivers events, steps schedulers that are due, and moves masters to their weights."""
        self.scaler.flush()
        for _, masters in self._known:
            if masters is not None:
                masters.store.follow_weights()


def _inner(optimizer: Any) -> Any:
    """The optimizer inside a wrapper of Lightning's."""
    wrapped = isinstance(optimizer, LightningOptimizer | _FabricOptimizer)
    return optimizer.optimizer if wrapped else optimizer


def _looks_at_gradients(model: LightningModule) -> bool:
    """Whether a hook may look at gradients before a step, which must be unscaled then."""
    trainer: Any = model.trainer
    return is_overridden("configure_gradient_clipping", model) or any(
        is_overridden("on_before_optimizer_step", each) for each in (model, *trainer.callbacks)
    )


@torch.no_grad()
def _up_to_date(value: Tensor, weight: Tensor) -> Tensor:
    """What `weight` was before it was cast, where nobody has written to it since."""
    value = value.to(weight.device)
    return torch.where(rounded(value, weight.dtype) == weight, value, weight.float())
