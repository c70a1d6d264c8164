"""The masters of an optimizer's half weights between steps, saved and loaded with its state.

Not in the optimizer's state, because torch takes a state that is not empty for one that an
optimizer has made. `optimizer.state_dict()` has them all the same, beside the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.grads.dtensor import local
from gradscale.torch.optim import master_bits
from gradscale.torch.optim.master_bits import HALF_DTYPES, LOW_BITS, MASTER


class KeptMaster:
    """The master of one weight between steps."""

    __slots__ = ("dtype", "values", "version", "weight")

    def __init__(self, weight: Tensor, values: dict[str, Any] | None = None) -> None:
        self.weight = weight
        self.dtype = weight.dtype
        self.values: dict[str, Any] = {} if values is None else values
        """`MASTER` or `LOW_BITS`, as an optimizer's state would have them."""
        self.version = -1
        """Of the weight, when it was last compared with its master or written from it."""


class MasterStore:
    """The masters by the weight that each belongs to.

    Args:
        optimizer: Whose state is saved and loaded with them.
        mode: "float32" or "split".
        weights: Returns the parameters of the optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, mode: str, weights: Callable[[], list[Tensor]]
    ) -> None:
        self.mode = master_bits.check_mode(mode)
        self.kept: dict[int, KeptMaster] = {}
        """By the id of the weight; another dictionary after loading."""
        self._weights = weights
        self._saved: dict[str, Any] = {}
        self._noted = False
        """Whether `_saved` is what is being loaded, masters included."""
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            vars(optimizer)["load_state_dict"] = self._loading(optimizer.load_state_dict)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_saved),
            optimizer.register_load_state_dict_pre_hook(self._note_saved),
            optimizer.register_load_state_dict_post_hook(self._take_saved, prepend=True),
        ]

    def detach(self) -> None:
        """Removes the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def keep(self, weight: Tensor) -> KeptMaster:
        """The master of `weight` as it is kept, made if there is none."""
        kept = self.kept.get(id(weight))
        if kept is None or kept.weight is not weight or kept.dtype is not weight.dtype:
            kept = self.kept[id(weight)] = KeptMaster(weight)
        values = kept.values
        known = MASTER in values
        if known:
            values[MASTER] = master_bits.as_state(weight, values[MASTER], MASTER, torch.float32)
        master_bits.ensure_master(weight, values, self.mode)
        version = local(weight)._version
        if known and MASTER in values and kept.version != version:
            # Somebody may have written to the weight, by loading it or by hand.
            master_bits.adopt_edits([local(weight)], [local(values[MASTER])])
        kept.version = version
        return kept

    def set_master(self, weight: Tensor, value: Tensor) -> None:
        """Makes float32 `value`, the number that `weight` was before it was cast, its master."""
        kept = self.kept[id(weight)] = KeptMaster(weight)
        master_bits.set_master(weight, kept.values, value, self.mode)
        kept.version = local(weight)._version

    def values(self, weight: Tensor) -> dict[str, Any]:
        """The master of `weight` as an optimizer's state would have it; empty if there is none."""
        kept = self.kept.get(id(weight))
        return kept.values if kept is not None and kept.weight is weight else {}

    def pairs(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """All weights that have a master, with what `values` returns, for a copy."""
        return [(kept.weight, kept.values) for kept in self.kept.values()]

    def set_pairs(self, pairs: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        """Takes over what `pairs()` returned, of this one or of another, and nothing else."""
        self.kept = {id(weight): KeptMaster(weight, values) for weight, values in pairs}

    def follow_weights(self) -> None:
        """Moves masters to the devices of their weights."""
        for kept in self.kept.values():
            device = local(kept.weight).device
            kept.values.update({name: v.to(device) for name, v in kept.values.items()})

    def drop_others(self) -> None:
        """Forgets the masters of weights that are no longer the optimizer's."""
        here = set(map(id, self._weights()))
        self.kept = {key: kept for key, kept in self.kept.items() if key in here}

    @torch.no_grad()
    def make_whole(self, param: Tensor) -> None:
        """Writes a master to its weight, if that was made float32 by `model.float()`."""
        kept = self.kept.pop(id(param), None)
        if kept is None:
            return
        weight = local(kept.weight)
        half = weight.to(kept.dtype)
        master = master_bits.master_of(half, kept.values).to(weight.device)
        same = (half.to(weight.dtype) == weight) & (master_bits.rounded(master, kept.dtype) == half)
        weight.copy_(torch.where(same, master.to(weight.dtype), weight))

    def _add_to_saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Adds the masters to what `optimizer.state_dict()` returns."""
        states = dict(saved["state"])
        for number, weight in _numbered(saved, self._weights()):
            values = self.values(weight)
            if values:
                states[number] = {**states.get(number, {}), **values}
        return {**saved, "state": states}

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load`, an optimizer's own `load_state_dict()`, that is given no masters.

        It may look for what it is given in the states that torch has loaded for it.
        """

        def load_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if not self._hooks:  # detached
                return load(state_dict, *args, **kwargs)
            self._saved, self._noted = state_dict, True
            try:
                return load(_without_masters(state_dict), *args, **kwargs)
            finally:
                self._noted = False

        return load_state_dict

    def _note_saved(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """What torch loads of `saved`: all but the masters, which it would round."""
        if not self._noted:
            self._saved = saved
        return _without_masters(saved)

    def _take_saved(self, optimizer: Optimizer) -> None:
        """Takes states as they were saved, and the masters."""
        saved, self._saved = self._saved, {}
        exact = {}
        self.kept = {}
        for number, weight in _numbered(saved, self._weights()):
            state = saved["state"].get(number, {})
            found = {k: state[k] for k in (MASTER, LOW_BITS) if k in state}
            exact[number] = {k: v for k, v in state.items() if k not in found}
            if found and weight.dtype in HALF_DTYPES:
                device = local(weight).device
                values = {k: v.to(device, copy=True) for k, v in found.items()}
                self.kept[id(weight)] = KeptMaster(weight, values)
        master_bits.restore_exact(optimizer, {**saved, "state": exact})


def _without_masters(saved: dict[str, Any]) -> dict[str, Any]:
    """`saved`, as the optimizer would have saved it by itself."""
    states = {}
    for number, state in saved["state"].items():
        rest = state
        if isinstance(state, dict):
            rest = {k: v for k, v in state.items() if k not in (MASTER, LOW_BITS)}
        if rest or not state:
            states[number] = rest
    return {**saved, "state": states}


def _numbered(saved: dict[str, Any], params: list[Tensor]) -> list[tuple[Any, Tensor]]:
    """The parameters of an optimizer with the numbers that they have in `saved`."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return list(zip(numbers, params, strict=True))
