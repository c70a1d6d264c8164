"""Masters of weights in float16 and bfloat16: a float32 beside each weight, or 16 more bits.

The kernels have the same formulas, in grads/triton/fused_step.py, which also says how exact they
are; tests compare both. A float16 weight is never infinite because of its master: a master beyond
65504 writes 65504, with its sign. A float32 master keeps its value; a split one is clamped to
65504 as well, because its 16 bits count parts of the distance between finite weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradscale.errors import SettingError, StateError
from gradscale.torch.grads.dtensor import all_plain, like_shards, local, locals_of

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The formats whose weights have masters."""
MASTER, LOW_BITS = "master", "master_low"
"""The keys of masters in an optimizer's state: float32, and int16 beside the weight."""
KEYS = {"float32": MASTER, "split": LOW_BITS}
"""The key of masters of each mode."""
LARGEST = torch.finfo(torch.float16).max
_DTYPE, _IS_CPU, _VERSION = attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("_version")
_FEW_ELEMENTS = 2**20
"""Up to so many elements of small weights on the CPU are kept as one flat tensor: 4 MiB."""
flatten = torch._C._nn.flatten_dense_tensors
unflatten = torch._C._nn.unflatten_dense_tensors


def check_mode(mode: str) -> str:
    """`mode`; a SettingError if there is none of this name."""
    if mode not in KEYS:
        raise SettingError(f"master must be one of {', '.join(KEYS)}, got {mode!r}.")
    return mode


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 masters that weights and their 16 more bits represent."""
    if high.dtype is torch.bfloat16:
        top = high.view(torch.int16).to(torch.int32)
        # Beside a 0 they are never below 0, unless somebody has set the weight to 0.
        rest = torch.where(top & 0x7FFF == 0, low.clamp(min=0), low)
        return ((top << 16) + rest).view(torch.float32)
    return high.float() + low.float() * _power_of_two(_binade(high) - 25)


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 masters as weights in `dtype` and their 16 more bits."""
    if dtype is torch.bfloat16:
        bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
        high = (bits + 0x8000) >> 16
        return high.to(torch.int16).view(dtype), (bits - (high << 16)).to(torch.int16)
    master = master.clamp(-LARGEST, LARGEST)
    high = master.to(dtype)
    rest = (master - high.float()) * _power_of_two(25 - _binade(high))
    return high, torch.where(high.isnan(), 0.0, rest).round().to(torch.int16)


def _binade(high: Tensor) -> Tensor:
    """The exponent of float16 numbers; that of the smallest normal one for all below it."""
    return ((high.float().view(torch.int32) >> 23 & 0xFF) - 127).clamp(min=-14)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, exactly, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def are_small(tensors: list[Tensor]) -> bool:
    """Whether operations on all of `tensors` at once, as one flat tensor, take less time.

    On the CPU an operation on each of 1,000 takes as long as the optimizer's step itself.
    """
    return (
        len(set(map(id, tensors))) == len(tensors) > 1
        and all_plain(tensors)
        and all(map(_IS_CPU, tensors))
        and len(set(map(_DTYPE, tensors))) == 1
        and 0 < sum(map(Tensor.numel, tensors)) <= _FEW_ELEMENTS
        and all(map(Tensor.is_contiguous, tensors))
    )


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in `dtype` of float32 masters."""
    if dtype is torch.float16:
        master = master.clamp(-LARGEST, LARGEST)
    return master.to(dtype)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor:
    """The float32 master of this rank's part of `param`; that of a split one is a copy."""
    # In parts: shifts of DTensors do nothing (torch 2.13).
    split_in_two = LOW_BITS in state
    return join(local(param), local(state[LOW_BITS])) if split_in_two else local(state[MASTER])


def ensure_master(param: Tensor, state: dict[str, Any], mode: str) -> None:
    """Makes, or converts, the master of `param`, so that its `state` has one of this `mode`."""
    key, other = (MASTER, LOW_BITS) if mode == "float32" else (LOW_BITS, MASTER)
    if key in state and other not in state:
        return
    if MASTER in state:
        adopt_edits([local(param)], [local(state[MASTER])])
    exists = MASTER in state or LOW_BITS in state
    master = master_of(param, state) if exists else local(param).detach().float()
    state.pop(other, None)
    set_master(param, state, master, mode)


def set_master(param: Tensor, state: dict[str, Any], value: Tensor, mode: str) -> None:
    """Makes float32 `value`, the number that `param` was before it was cast, its master."""
    value = local(value)
    if mode == "float32":
        state[MASTER] = like_shards(value, param)
        return
    high, low = split(value, param.dtype)
    local(param).copy_(high)
    if LOW_BITS in state:
        local(state[LOW_BITS]).copy_(low)
    else:
        state[LOW_BITS] = like_shards(low, param)


def as_state(param: Tensor, value: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """`value`, a state of `param`, in `dtype`, on its device and in its memory layout.

    Itself if it is so already. Kernels, and torch's fused steps on the CPU, go by addresses alone.
    """
    if value.shape != param.shape:
        raise StateError(
            f"The state {name!r} of a parameter of shape {tuple(param.shape)} has shape "
            f"{tuple(value.shape)}. Load a state that was saved with these parameters."
        )
    flat = value.is_contiguous() and param.is_contiguous()
    same_layout = flat or value.stride() == param.stride()
    if value.dtype is dtype and value.device == param.device and same_layout:
        return value
    return torch.empty_like(param, dtype=dtype).copy_(value)


def write_weights(weights: list[Tensor], masters: list[Tensor]) -> None:
    """Rounds float32 `masters` to their `weights`, in place; plain tensors."""
    torch._foreach_copy_(weights, masters)
    narrow = [weight for weight in weights if weight.dtype is torch.float16]
    if narrow:
        # What became infinite by rounding; NaN stays.
        torch._foreach_clamp_max_(narrow, LARGEST)
        torch._foreach_clamp_min_(narrow, -LARGEST)


class FlatWeights:
    """Small weights on the CPU, whose masters and gradients are treated as one flat tensor.

    Args:
        weights: For which `are_small` holds.
        stored: Their masters, or their low bits in the mode "split".
        mode: "float32" or "split".
    """

    def __init__(self, weights: list[Tensor], stored: list[Tensor], mode: str) -> None:
        self.wide, self.wides = _parts(weights, torch.float32)
        """For gradients in float32: to allocate them would take half of the step."""
        self._stored = stored
        self.views = [each.view(-1) for each in stored] if mode == "float32" else []
        """Float32 masters with one dimension."""
        if mode == "split":
            self._high, self._highs = _parts(weights, weights[0].dtype)
            self._low, self._lows = _parts(weights, torch.int16)
            self._master, self._masters = _parts(weights, torch.float32)

    def join(self, weights: list[Tensor]) -> list[Tensor]:
        """The masters of `weights` with their low bits, in memory that is used again."""
        self._master.copy_(join(flatten(weights), flatten(self._stored)))
        return self._masters

    def write(self, weights: list[Tensor]) -> None:
        """Writes the masters to weights and low bits."""
        if self.views and torch.cat(self.views).abs().amax() <= LARGEST:
            torch._foreach_copy_(weights, self._stored)  # none becomes infinite
        elif self.views:
            write_weights(weights, self._stored)
        else:
            high, low = split(self._master, weights[0].dtype)
            self._high.copy_(high)
            self._low.copy_(low)
            torch._foreach_copy_(weights, self._highs)
            torch._foreach_copy_(self._stored, self._lows)


def _parts(weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """New memory for all of `weights`, and the part of it for each."""
    flat = torch.empty(sum(map(Tensor.numel, weights)), dtype=dtype, device="cpu")
    return flat, list(unflatten(flat, weights))


def join_all(weights: list[Tensor], lows: list[Tensor], flat: FlatWeights | None) -> list[Tensor]:
    """The float32 masters of `weights` with these low bits; plain tensors."""
    if flat is not None:
        return flat.join(weights)
    joined = {id(high): join(high, low) for high, low in zip(weights, lows, strict=True)}
    return [joined[id(weight)] for weight in weights]  # one may come twice


def write_all(
    weights: list[Tensor], lows: list[Tensor], masters: list[Tensor], flat: FlatWeights | None
) -> None:
    """Writes float32 `masters` to weights and to low bits, if there are any; plain tensors."""
    if flat is not None:
        flat.write(weights)
    elif not lows:
        write_weights(weights, masters)
    else:
        for weight, low, master in zip(weights, lows, masters, strict=True):
            high, rest = split(master, weight.dtype)
            weight.copy_(high)
            low.copy_(rest)


def adopt_edits(weights: list[Tensor], masters: list[Tensor]) -> None:
    """Writes weights that somebody else has changed to their float32 masters; plain tensors."""
    for weight, master in zip(weights, masters, strict=True):
        kept = rounded(master, weight.dtype) == weight
        master.copy_(torch.where(kept, master, weight.float()))


class HalfStep:
    """The float32 numbers that torch operations step in place of a list of half weights.

    Args:
        params: The weights, plain or DTensors.
        stored: Their masters, or their low bits in the mode "split", plain tensors.
        mode: "float32" or "split".
    """

    def __init__(self, params: list[Tensor], stored: list[Tensor], mode: str) -> None:
        self._params = params
        self._stored = stored
        self._lows = stored if mode == "split" else []
        self._weights = locals_of(params)
        small = are_small(self._weights)
        self._flat = FlatWeights(self._weights, stored, mode) if small else None
        self._marks: Any = None
        """Of the weights, as they were written last."""

    def begin(self, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The masters and `grads`, both in float32."""
        weights, masters = locals_of(self._params), self._stored
        self._weights = weights
        if self._flat is None:
            wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        else:
            wide = self._flat.wides
        torch._foreach_copy_(wide, grads)
        if self._lows:
            masters = join_all(weights, self._lows, self._flat)
        elif self._marks not in (None, _marks(weights)):
            adopt_edits(weights, masters)
        return masters, wide

    def end(self, masters: list[Tensor]) -> None:
        """Writes the weights, and the low bits of split masters."""
        write_all(self._weights, self._lows, masters, self._flat)
        self._marks = None if self._lows else _marks(self._weights)


def _marks(weights: list[Tensor]) -> tuple[list[int], list[int]]:
    """What changes when somebody writes to one of `weights`, or replaces its memory."""
    return list(map(_VERSION, weights)), list(map(Tensor.data_ptr, weights))


@contextmanager
def exact_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While `load_state_dict()` runs: loads the states of half parameters without rounding them."""
    seen: list[dict[str, Any]] = []
    # After the user's hooks that come before, and before those that come after.
    hooks = [
        optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append(given)),
        optimizer.register_load_state_dict_post_hook(
            lambda _: restore_exact(optimizer, seen[0]), prepend=True
        ),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def restore_exact(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Puts the states of half parameters back as they were `saved`.

    torch rounds every state that is loaded to the format of its parameter.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        copied = functools.partial(Tensor.to, device=param.device, copy=True)
        for name, value in saved["state"].get(number, {}).items():
            if param.dtype in HALF_DTYPES and name != "step":
                optimizer.state[param][name] = tree_map_only(Tensor, copied, value)
