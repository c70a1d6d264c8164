"""The scaler that Megatron-LM's mixed-precision optimizers call, with our rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradscale.compat.host_scale import HostScale
from gradscale.policy import Dynamic, DynamicState, Off, Static
from gradscale.policy.settings import as_count


class MegatronGradScaler:
    """A scale with Megatron-LM's interface, which a policy of gradscale moves.

    >>> scaler = MegatronGradScaler(Dynamic(init_scale=8.0, growth_interval=1), device="cpu")
    >>> scaler.update(found_inf=False)
    >>> scaler.scale, scaler.inv_scale
    (tensor([16.]), tensor([0.0625]))

    Args:
        policy: `Dynamic`, or `Static` in place of Megatron's `ConstantGradScaler`.
        device: Where the scale is; the current CUDA device unless it is given.
        optimizers: How many optimizers have this scaler, which then moves its scale once per step:
            when all of them have called `update()`, and as after an overflow if one had one.
        on_stuck: "warn", "raise" (a StuckError) or "ignore" after `stuck_after` skipped steps.
    """

    def __init__(
        self,
        policy: Dynamic | Static | Off,
        device: torch.device | str = "cuda",
        *,
        optimizers: int = 1,
        on_stuck: str = "warn",
        stuck_after: int = 50,
    ) -> None:
        self._held = HostScale(policy, on_stuck, stuck_after)
        self._optimizers = as_count("optimizers", optimizers)
        self._reports: list[bool] = []
        self._scale = torch.tensor([self._held.value], dtype=torch.float32, device=device)

    @property
    def policy(self) -> Any:
        """The rule that moves the scale."""
        return self._held.policy

    @property
    def scale(self) -> Tensor:
        """The scale: a float32 tensor of one element, always the same one, filled in place."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale, rounded once: a float32 tensor of one element."""
        return self._scale.double().reciprocal().float()

    def update(self, found_inf: Any) -> None:
        """Moves the scale after a step; `found_inf` is a bool, or a tensor that is read.

        Raises:
            StuckError: `stuck_after` steps in a row were skipped, and `on_stuck` is "raise".
        """
        self._reports.append(bool(found_inf))
        if len(self._reports) < self._optimizers:
            return  # The next optimizer has yet to divide its gradients by this scale.
        overflow, self._reports = any(self._reports), []
        before = self._held.value
        try:
            self._held.update(finite=not overflow)
        finally:
            self._fill(before)

    def _fill(self, before: float) -> None:
        # In place: a CUDA graph may have captured the tensor.
        if self._held.value != before:
            self._scale.fill_(self._held.value)

    def state_dict(self) -> dict[str, Any]:
        """The state with Megatron-LM's keys, which its own class can load; none if it is static."""
        state = self._held.state
        if not isinstance(state, DynamicState):
            return {}
        return {
            "scale": self._scale.clone(),
            "growth_tracker": state.good_steps,
            "hysteresis_tracker": self.policy.hysteresis - state.bad_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state of Megatron-LM or gradscale; settings stay those of the policy.

        A static scale loads nothing, as Megatron's `ConstantGradScaler`.
        """
        if not isinstance(self._held.state, DynamicState):
            return
        before = self._held.value
        self._held.load_state_dict(state_dict, settings=False)
        self._reports = []
        self._fill(before)
