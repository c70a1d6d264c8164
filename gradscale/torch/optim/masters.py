"""Masters of weights in float16 and bfloat16: a float32 beside each, or 16 more bits.

The kernels have the same formulas, in gradscale/torch/_triton/pieces.py, which also says how exact
they are; tests walk both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradscale.errors import SettingError, StateError
from gradscale.torch.shards import like_shards, local

HALVES = (torch.float16, torch.bfloat16)
"""The formats whose weights have masters."""
MODES = ("float32", "split")
WHOLE, LOW = "master", "master_low"
"""The keys of masters in an optimizer's state: float32, and int16 beside the weight."""


def mode_named(mode: str) -> str:
    """`mode`; a SettingError if there is none of this name."""
    if mode not in MODES:
        raise SettingError(f"master must be one of {', '.join(MODES)}, got {mode!r}.")
    return mode


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers that weights and their 16 more bits are."""
    if high.dtype is torch.bfloat16:
        top = high.view(torch.int16).to(torch.int32)
        # Beside a 0 they are never below 0, unless somebody has set the weight to 0.
        rest = torch.where(top & 0x7FFF == 0, low.clamp(min=0), low)
        return ((top << 16) + rest).view(torch.float32)
    return high.float() + low.float() * _power_of_two(_binade(high) - 25)


def part(whole: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 numbers as weights in `dtype` and their 16 more bits."""
    if dtype is torch.bfloat16:
        bits = torch.where(whole.isnan(), 0x7FC00000, whole.view(torch.int32))
        high = (bits + 0x8000) >> 16
        return high.to(torch.int16).view(dtype), (bits - (high << 16)).to(torch.int16)
    high = whole.to(dtype)
    rest = (whole - high.float()) * _power_of_two(25 - _binade(high))
    low = torch.where(high.isfinite(), rest, torch.zeros_like(rest)).round()
    return high, low.to(torch.int16)


def _binade(high: Tensor) -> Tensor:
    """The exponent of float16 numbers; that of the smallest normal one for all below it."""
    return ((high.float().view(torch.int32) >> 23 & 0xFF) - 127).clamp(min=-14)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, exactly, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor:
    """The float32 master of `param`, as far as it is here; that of a split one is a copy."""
    # In parts: shifts of DTensors do nothing (torch 2.13).
    return join(local(param), local(state[LOW])) if LOW in state else local(state[WHOLE])


def settle(param: Tensor, state: dict[str, Any], mode: str) -> None:
    """Sees to it that `param` has a master of this `mode` in its `state`, and no other."""
    key, other = (WHOLE, LOW) if mode == "float32" else (LOW, WHOLE)
    if key in state and other not in state:
        return
    if WHOLE in state:
        follow(param, state)
    known = WHOLE in state or LOW in state
    whole = master_of(param, state) if known else local(param).detach().float()
    state.pop(other, None)
    begin(param, state, whole, mode)


def begin(param: Tensor, state: dict[str, Any], whole: Tensor, mode: str) -> None:
    """Gives `param`, which was `whole` before it was cast, that very number for a master."""
    whole = local(whole)
    if mode == "float32":
        state[WHOLE] = like_shards(whole, param)
    else:
        put(param, state, whole, mode)


def like(param: Tensor, value: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """`value`, a state of `param`, as kernels take it: in `dtype`, where and as the parameter lies.

    Itself if it is so already. Kernels go by addresses, so they must not be told of anything else.
    """
    if value.shape != param.shape:
        raise StateError(
            f"The state {name!r} of a parameter of shape {tuple(param.shape)} has shape "
            f"{tuple(value.shape)}. Load a state that was saved with these parameters."
        )
    if value.dtype is dtype and value.device == param.device and _lies_as(value, param):
        return value
    return torch.empty_like(param, dtype=dtype).copy_(value)


def _lies_as(value: Tensor, param: Tensor) -> bool:
    """Whether both have their elements in the same order."""
    flat = value.is_contiguous() and param.is_contiguous()
    return flat or value.stride() == param.stride()


def put(param: Tensor, state: dict[str, Any], whole: Tensor, mode: str) -> None:
    """Writes `param` and its master, as far as it is here, anew; in place where there is one."""
    if mode == "float32":
        local(param).copy_(local(state[WHOLE]).copy_(whole))
        return
    high, low = part(whole, param.dtype)
    local(param).copy_(high)
    if LOW in state:
        local(state[LOW]).copy_(low)
    else:
        state[LOW] = like_shards(low, param)


def follow(param: Tensor, state: dict[str, Any]) -> None:
    """Takes over what somebody else has written to `param` into its float32 master."""
    whole, weight = local(state[WHOLE]), local(param)
    whole.copy_(torch.where(whole.to(weight.dtype) == weight, whole, weight.float()))


def take_unrounded(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Takes the states of half parameters as they were `saved`.

    torch rounds every state that is loaded to the format of its parameter.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if param.dtype in HALVES and name != "step":
                optimizer.state[param][name] = _copied(value, param.device)


def _copied(value: Any, device: torch.device) -> Any:
    """`value`, a state, with all tensors in it copied to `device`."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, device) for item in value)
    return value
