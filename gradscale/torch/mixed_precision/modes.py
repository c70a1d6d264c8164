"""The modes of mixed precision: in which format weights, passes and masters are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from gradscale.errors import SettingError
from gradscale.policy import Dynamic, Headroom, Off, Policy, Static, as_policy


class Mode(NamedTuple):
    """In which format things are."""

    name: str
    passes: str
    """The format of the forward and the backward pass: "float32", "bfloat16" or "float16"."""
    weights: str = "float32"
    """The format of the weights that the model has."""
    master: str | None = None
    """How masters of such weights are kept: "float32", or "split": in 16 more bits."""

    @property
    def dtype(self) -> torch.dtype:
        """The format of the passes."""
        dtype: torch.dtype = getattr(torch, self.passes)
        return dtype

    @property
    def casts(self) -> bool:
        """Whether the weights of the model are cast."""
        return self.weights != "float32"


MODES = {
    mode.name: mode
    for mode in (
        Mode("fp32", "float32"),
        Mode("bf16", "bfloat16"),
        Mode("fp16", "float16"),
        Mode("bf16-master", "bfloat16", "bfloat16", "float32"),
        Mode("fp16-master", "float16", "float16", "float32"),
        Mode("fp16-pure", "float16", "float16", "split"),
    )
}
"""The modes by name."""
LEVELS = {"O0": "fp32", "O1": "fp16", "O2": "fp16-master", "O3": "fp16-pure"}
"""The names of some modes in Apex."""


def mode_named(name: str) -> Mode:
    """The mode of this name, or of Apex' name; a SettingError if there is none."""
    mode = MODES.get(LEVELS.get(name, name)) if isinstance(name, str) else None
    if mode is None:
        known = ", ".join((*MODES, *LEVELS))
        raise SettingError(f"mode must be one of {known}, got {name!r}.")
    return mode


def policy_for(mode: Mode, policy: Policy | str | None) -> Policy:
    """`policy` with the format of the mode; without one, what suits the mode."""
    if policy is None:
        policy = Headroom() if mode.passes == "float16" else Static(init_scale=1.0)
    policy = as_policy(policy)
    if isinstance(policy, Static | Off | Dynamic):  # all others have a format
        return policy
    return replace(policy, format=mode.passes)
