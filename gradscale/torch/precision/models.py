"""What is in which format, what keeps the masters, and how all of it is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.policy import Dynamic, Headroom, Off, Policy, Static
from gradscale.torch.contract import as_optimizers
from gradscale.torch.master.casting import (
    NORMS,
    Keep,
    bare,
    cast_all,
    device_of,
    find,
    lift,
    refuse_wrapped,
    run_in_float32,
    widen_states,
)
from gradscale.torch.master.masters import Masters
from gradscale.torch.optim.masters import HALVES, LOW, WHOLE, begin, master_of
from gradscale.torch.optim.onepass import OnePass
from gradscale.torch.precision.modes import mode_named
from gradscale.torch.scaler import GradScaler

VERSION = 1
"""Of the state that is saved."""


class Models:
    """Models and optimizers in the formats of a mode."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        mode: str = "fp16",
        *,
        policy: Policy | None = None,
        keep_float32: Iterable[Keep] = (),
        **settings: Any,
    ) -> None:
        self.mode = mode_named(mode)
        self._followed: list[Any] = []
        """What `follow()` was given that can be saved."""
        several = isinstance(model, Iterable) and not isinstance(model, nn.Module)
        self.models: list[nn.Module] = list(model) if several else [model]  # type: ignore[arg-type,list-item]
        self.optimizers = as_optimizers(optimizer, "MixedPrecision")
        if not self.models or not all(isinstance(each, nn.Module) for each in self.models):
            raise SettingError("MixedPrecision takes one or more models, got none or another.")
        if policy is None:
            half = self.mode.passes == "float16"
            policy = Headroom() if half else Static(init_scale=1.0)
        if not isinstance(policy, Static | Off | Dynamic):  # all others know the format
            policy = replace(policy, format=self.mode.passes)
        self._device = device_of(self.models[0]).type
        self.scaler = GradScaler(self._device, policy=policy, format=self.mode.passes, **settings)
        for optimizer in self.optimizers:  # gradients may be left for one before its first step
            self.scaler._watch(optimizer)
        exact = [(o, p, p.data) for o, p in self._trained() if p.dtype is torch.float32]
        self._cast(list(keep_float32))
        self._masters = {id(each): self._masters_of(each) for each in self.optimizers}
        with torch.no_grad():
            for owner, param, whole in exact:
                if self.mode.master is not None and param.dtype in HALVES:
                    begin(param, owner.state[param], whole, self.mode.master)
        for each in self.models:
            self.scaler.name(each)
        self.retries = 0
        """How many times a step was computed again by `run()`."""

    def _trained(self) -> Iterator[tuple[Optimizer, Any]]:
        """The parameters that are trained, with their optimizers."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from ((optimizer, param) for param in group["params"] if param.requires_grad)

    def _cast(self, keep: list[Keep]) -> None:
        """Brings the models into the formats of the mode."""
        if self.mode.casts:
            for model in self.models:
                refuse_wrapped(model)
            owners = Counter(id(param) for _, param in self._trained())
            if any(count > 1 for count in owners.values()):
                raise SettingError(
                    f"A parameter is in two optimizers, which goes with no masters. Use the mode "
                    f'"{self.mode.passes.replace("float", "fp")}", or give it to one of them.'
                )
        for each in keep:
            if not any(find(bare(model), each) for model in self.models):
                what = repr(each) if isinstance(each, str) else f"this {type(each).__name__}"
                raise SettingError(f"keep_float32 has {what}, which is no module of the model.")
        kept = [
            (model, [each for each in keep if find(bare(model), each)]) for model in self.models
        ]
        wide = self.mode.passes == "float32"
        if self.mode.casts:
            cast_all([(model, [*NORMS, *mine]) for model, mine in kept], self.mode.dtype)
        for model, mine in () if self.mode.casts else kept:
            lift(model, frozen=wide)
            if not wide:
                run_in_float32(model, (*NORMS, *mine))
        widen_states(self.optimizers)

    def _masters_of(self, optimizer: Optimizer) -> Masters | None:
        """What keeps the masters of `optimizer`; None if it does so itself."""
        if isinstance(optimizer, OnePass):
            if self.mode.master is not None:
                optimizer.keep_masters(self.mode.master)
            return None
        # Without masters, too, a half weight may come: one that is unfrozen, or added to a group.
        masters = Masters(optimizer, self.mode.master or "float32")
        if self.mode.master is not None:
            optimizer.register_step_pre_hook(_guard(masters))
        return masters

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on: weights, masters, averages, scale, schedulers.

        Of what `follow()` was given, that is what has a state: no plain functions. Not the random
        state and the place in the data: see gradscale.torch.checkpoint.
        """
        self.scaler.flush()
        return {
            "version": VERSION,
            "mode": self.mode.name,
            "models": [bare(model).state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "followed": [(type(each).__name__, each.state_dict()) for each in self._followed],
            "retries": self.retries,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict()` gave.

        Raises:
            StateError: It is of another mode or of other models; nothing was loaded.
        """
        self._check(state)
        self.scaler.load_state_dict(state["scaler"])
        for model, saved in zip(self.models, state["models"], strict=True):
            bare(model).load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for each, (_, saved) in zip(self._followed, state["followed"], strict=True):
            each.load_state_dict(saved)
        self.retries = state["retries"]

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises if `state` is not one of ours for these models and optimizers."""
        wanted = {"version", "mode", "models", "optimizers", "scaler", "followed", "retries"}
        if not isinstance(state, Mapping) or not wanted <= state.keys():
            found = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"This is no state of MixedPrecision: it has {found}.")
        if state["version"] != VERSION:
            raise StateError(
                f"This state has version {state['version']!r}, and this gradscale reads "
                f"{VERSION}. Load it with the gradscale that saved it."
            )
        if state["mode"] != self.mode.name:
            raise StateError(
                f"This state is of the mode {state['mode']!r}, and this run is "
                f"{self.mode.name!r}. Go on in the same mode, or load float32_model_state()."
            )
        here: dict[str, list[Any]] = {
            "models": self.models,
            "optimizers": self.optimizers,
            "followed": self._followed,
        }
        for kind, mine in here.items():
            if len(state[kind]) != len(mine):
                raise StateError(f"This state has {len(state[kind])} {kind}, here are {len(mine)}.")
        follows = [type(each).__name__ for each in self._followed]
        followed = [name for name, _ in state["followed"]]
        if follows != followed:
            raise StateError(f"This state is followed by {followed}, and this run by {follows}.")
        for model, saved in zip(self.models, state["models"], strict=True):
            own = bare(model).state_dict()
            odd = [
                name
                for name in {**own, **saved}
                if name not in own or name not in saved or _shape(own[name]) != _shape(saved[name])
            ]
            if odd:
                raise StateError(
                    f"The weight {odd[0]!r} is missing here or there, or has another shape. Load "
                    "a state that was saved with this model."
                )
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            theirs = [len(group["params"]) for group in saved["param_groups"]]
            if sizes != theirs:
                raise StateError(f"This optimizer has groups of {sizes}, and the state {theirs}.")

    def float32_model_state(self, model: nn.Module | None = None) -> dict[str, Any]:
        """The `state_dict()` of a model in float32, with masters for weights: for export.

        Args:
            model: Which of several; without it the only one.
        """
        if model is None and len(self.models) > 1:
            raise SettingError(f"Say which of the {len(self.models)} models you mean: model=...")
        if model is not None and all(model is not each for each in self.models):
            raise SettingError("model must be one that MixedPrecision was made with.")
        chosen = bare(self.models[0] if model is None else model)
        owners = {id(p): o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        wide: dict[str, Any] = {}
        for name, value in chosen.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                wide[name] = value
                continue
            owner = owners.get(id(value))
            state = {} if owner is None else owner.state.get(value, {})
            plain = value.detach()
            if plain.dtype in HALVES and (WHOLE in state or LOW in state):
                whole = master_of(plain, state)
                # Somebody may have written to the weight since.
                plain = torch.where(whole.to(plain.dtype) == plain, whole, plain.float())
            wide[name] = plain.float() if plain.dtype in HALVES else plain.clone()
        return wide


def _guard(masters: Masters) -> Callable[..., None]:
    """A hook that refuses steps which would move weights and not their masters."""

    def refuse(*_: Any) -> None:
        if not masters.are_in:
            raise CallOrderError(
                "optimizer.step() was called, which would move weights and not their masters. Call "
                "mp.step() instead."
            )

    return refuse


def _shape(value: Any) -> Any:
    """The shape of a tensor; None of anything else."""
    return value.shape if isinstance(value, Tensor) else None
