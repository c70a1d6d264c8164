"""The state of a run in mixed precision: saved, checked, loaded whole or not at all, exported."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import StateError
from gradscale.torch.optim.master_bits import HALF_DTYPES, LOW_BITS, MASTER, master_of, rounded
from gradscale.torch.telemetry.names import bare

if TYPE_CHECKING:
    from gradscale.torch.mixed_precision.masters import Masters
    from gradscale.torch.mixed_precision.mixed import MixedPrecision

VERSION = 1
"""Of the state that is saved."""


def save(mp: MixedPrecision) -> dict[str, Any]:
    """Everything that a run needs to go on. Waits for the device."""
    mp.scaler.flush()
    return {
        "version": VERSION,
        "mode": mp.mode.name,
        "models": [bare(model).state_dict() for model in mp.models],
        "optimizers": [optimizer.state_dict() for optimizer in mp.optimizers],
        "scaler": mp.scaler.state_dict(),
        "followed": [(type(each).__name__, each.state_dict()) for each, _ in mp._followed],
        "retries": mp.retries,
        "recomputation": mp._recomputation.numbers(),
    }


def load(mp: MixedPrecision, state: Mapping[str, Any]) -> None:
    """Takes over a checked `state`; if something raises, everything is as it was before."""
    # Loading replaces the states of optimizers and does not write to them, so they are kept by
    # reference. Weights are written in place; they come last, and their names and shapes were
    # checked.
    followed = [each for each, _ in mp._followed]
    kept = [(each, each.state, each.param_groups) for each in mp.optimizers]
    pairs = [(own, own.store.pairs()) for own in mp._masters if own is not None]
    before = [(each, copy.deepcopy(each.state_dict())) for each in followed]
    scale = mp.scaler.state_dict()
    try:
        for optimizer, saved in zip(mp.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for each, (_, saved) in zip(followed, state["followed"], strict=True):
            each.load_state_dict(saved)
        mp.scaler.load_state_dict(state["scaler"])
        for model, saved in zip(mp.models, state["models"], strict=True):
            bare(model).load_state_dict(saved)
    except BaseException as error:
        for optimizer, states, groups in kept:
            optimizer.__setstate__({"state": states, "param_groups": groups})
        for own, old in pairs:
            own.store.set_pairs(old)
        for each, old in before:
            each.load_state_dict(old)
        mp.scaler.load_state_dict(scale)
        if sys.version_info >= (3, 11):  # before, errors have no notes
            error.add_note("MixedPrecision.load_state_dict(): nothing was loaded.")
        raise
    mp._recomputation.restore({"tries": state["retries"], **state.get("recomputation", {})})


def check(mp: MixedPrecision, state: Any) -> None:
    """Raises a StateError if `state` is not one of `save()` for these models and optimizers."""
    wanted = {"version", "mode", "models", "optimizers", "scaler", "followed", "retries"}
    if not isinstance(state, Mapping) or not wanted <= state.keys():
        found = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"The state is not a state of MixedPrecision: it has {found}.")
    if state["version"] != VERSION:
        raise StateError(
            f"The state has version {state['version']!r}, but this version of gradscale reads "
            f"version {VERSION}. Load it with the version of gradscale that saved it."
        )
    if state["mode"] != mp.mode.name:
        raise StateError(
            f"The state was saved in the mode {state['mode']!r}, but this run uses "
            f"{mp.mode.name!r}. Use the same mode, or load float32_model_state()."
        )
    here: dict[str, list[Any]] = {
        "models": mp.models,
        "optimizers": mp.optimizers,
        "followed": mp._followed,
    }
    for kind, mine in here.items():
        if len(state[kind]) != len(mine):
            what = "followed objects" if kind == "followed" else kind
            raise StateError(
                f"The state has {len(state[kind])} {what}, but this MixedPrecision has {len(mine)}."
            )
    kinds = [type(each).__name__ for each, _ in mp._followed]
    theirs = [name for name, _ in state["followed"]]
    if kinds != theirs:
        raise StateError(
            f"The state was saved with follow() of {theirs}, but this MixedPrecision has {kinds}."
        )
    for model, saved in zip(mp.models, state["models"], strict=True):
        own = bare(model).state_dict()
        for name in {**own, **saved}:
            if name in own and name in saved and _shape(own[name]) == _shape(saved[name]):
                continue
            raise StateError(
                f"The weight {name!r} is missing in the model or in the state, or has another "
                "shape. Load a state that was saved with this model."
            )
    for optimizer, saved in zip(mp.optimizers, state["optimizers"], strict=True):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != saved_sizes:
            raise StateError(
                f"This optimizer has parameter groups of {sizes} parameters, but the state has "
                f"groups of {saved_sizes}."
            )


def _shape(value: Any) -> Any:
    """The shape of a tensor; None of anything else."""
    return value.shape if isinstance(value, Tensor) else None


def float32_state(
    model: nn.Module, optimizers: Sequence[Optimizer], masters: Sequence[Masters | None]
) -> dict[str, Any]:
    """The `state_dict()` of a model in float32, with masters for weights; tied ones are one."""
    values = bare(model).state_dict(keep_vars=True)
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    wide = _in_float32(tensors, optimizers, masters)
    return {name: wide.get(id(value), value) for name, value in values.items()}


@contextmanager
def in_float32(
    model: nn.Module, optimizers: Sequence[Optimizer], masters: Sequence[Masters | None]
) -> Iterator[None]:
    """Within, `model` has float32 parameters in the places of its half ones."""
    # Not by `.data`: DDP's hooks are on the old parameters, and would be lost.
    places = [
        (module._parameters, name, param)
        for module in bare(model).modules()
        for name, param in module._parameters.items()
        if param is not None and param.dtype in HALF_DTYPES
    ]
    wide = _in_float32([param for _, _, param in places], optimizers, masters)
    shown = {
        id(param): nn.Parameter(wide[id(param)], requires_grad=param.requires_grad)
        for _, _, param in places
    }
    try:
        for params, name, param in places:
            params[name] = shown[id(param)]
        yield
    finally:
        for params, name, param in places:
            params[name] = param


def _in_float32(
    values: list[Tensor], optimizers: Sequence[Optimizer], masters: Sequence[Masters | None]
) -> dict[int, Tensor]:
    """Copies of `values` by their ids, with masters for half weights that have one."""
    owners = {
        id(param): (optimizer, own)
        for optimizer, own in zip(optimizers, masters, strict=True)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    wide = {}
    for value in values:
        plain = value.detach()
        if plain.dtype in HALF_DTYPES and id(value) in owners:
            optimizer, own = owners[id(value)]
            found = optimizer.state.get(value, {}) if own is None else own.store.values(value)
            if MASTER in found or LOW_BITS in found:
                master = master_of(plain, found)
                # Somebody may have written to the weight since.
                plain = torch.where(rounded(master, plain.dtype) == plain, master, plain.float())
        wide[id(value)] = plain.float() if plain.dtype in HALF_DTYPES else plain.clone()
    return wide
