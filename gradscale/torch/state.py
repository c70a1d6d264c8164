"""The scale and what moves it: a policy, its state on the device, own losses, counters.

On the CPU the live state is plain numbers, which the rules of the policies take as they are.
Elsewhere it is 0-dim tensors that are only ever written in place, because a CUDA graph may have
captured them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.checkpoints import format as checkpoints
from gradscale.errors import CallOrderError, SettingError
from gradscale.formats import Format
from gradscale.policy import (
    MAX_SCALE,
    MIN_SCALE,
    Dynamic,
    GradStats,
    Policy,
    State,
)
from gradscale.policy.arrays import float32
from gradscale.torch.grads import dispatch
from gradscale.torch.grads.packed import (
    LOSS_PERIOD,
    PATIENT_LOSSES,
    pack,
    pack_settings,
    rule_of,
    views,
)
from gradscale.torch.grads.scale import Scale, constant, move
from gradscale.torch.grads.upload import Pool
from gradscale.torch.saved_state import patient, policy_of, settings_of, state_of

HALF_LOSS_SCALE = 2.0**15
"""A float16 loss seeds its backward pass in float16, where 2**16 is infinite."""
LossId = int | str


class Counters(NamedTuple):
    """What is counted besides the policy's state: numbers on the CPU, int32 tensors elsewhere."""

    bad_losses: Any = 0
    """Iterations in a row with a loss that was not finite."""
    steps: Any = 0
    """Calls of `update()`."""

    def numbers(self) -> dict[str, int]:
        """The counts in plain numbers. Waits for the device."""
        return {"bad_losses": int(self.bad_losses), "steps": int(self.steps)}


class ScaleState:
    """A policy and its state: places it on a device, advances, sets, saves and loads it."""

    def __init__(self, policy: Policy, format: Format) -> None:
        self.policy = policy
        self.format = format
        """The narrowest format of the backward pass."""
        self.initial: State = policy.init()
        """The state in plain numbers, while it is on no device yet."""
        self.live: Any = None
        """The state: numbers on the CPU, tensors elsewhere; None before the first loss."""
        self.device: torch.device | None = None
        self.on_host = True
        """Whether the live state is plain numbers."""
        self.packed: Tensor | None = None
        """The counters and the state as one int32 vector, of which the tensors are views."""
        self._kernel: Any = None
        self.copy: Tensor | None = None
        """float32: a copy of the scale that the kernel which moved it has left; else None."""
        self._copies = Pool((), torch.float32)
        self.replayed = False
        """Whether a CUDA graph moves the scale, so that a copy may be out of date."""
        self.counters = Counters()
        self.losses: dict[LossId, Any] = {}
        """The states of losses with a scale of their own, as `live` is."""

    def place(self, device: torch.device) -> None:
        """Puts the state on `device`."""
        numbers = self.counters.numbers()
        self.device, self.live, self.copy = device, self.initial, None
        self.on_host = device.type == "cpu" and not dispatch.uses_triton(device)
        if self.on_host:
            return
        with torch.inference_mode(False):  # the first loss may be that of an evaluation
            self.packed = pack(self.initial, device=device, **numbers)
            self.live = views(self.packed, type(self.initial))
            self.counters = Counters(*self.packed[: len(numbers)].unbind())
        self.losses = {key: self.on_device(state) for key, state in self.losses.items()}

    def on_device(self, state: Any) -> Any:
        """The state of a loss with its own scale, as tensors."""
        with torch.inference_mode(False):
            return views(pack(state, device=self.device), type(state))  # type: ignore[arg-type]

    def placed(self, call: str) -> None:
        """Raises a CallOrderError if no tensor has shown the device yet."""
        if self.live is None:
            raise CallOrderError(
                f"{call} was called before scale(): no loss has been scaled yet. "
                "Call scaler.backward(loss) or scaler.scale(loss).backward() first in every "
                "iteration."
            )

    def current(self, half: bool = False) -> Scale:
        """A copy of the scale of now; with `half`, at most what a float16 loss can bear."""
        if half:
            self.copy = None
        elif self.copy is not None and not self.replayed:
            return Scale(self.copy, None)
        scale, self.live = self._copied(self.live, half)
        return scale

    def _copied(self, state: Any, half: bool) -> tuple[Scale, Any]:
        """A copy of the scale of `state`, limited for a float16 loss, and what `state` is then.

        A float16 loss also limits the scale of `state`, which would else grow on and on out of use,
        but not below a floor, nor where the policy has none.
        """
        kept = max(HALF_LOSS_SCALE, self.floor) if half and self.floor else torch.inf
        if self.on_host:
            number = state.scale
            if half:
                state = state._replace(scale=min(number, kept))
                number = min(number, HALF_LOSS_SCALE)
            return Scale(constant(number), number, constant(1.0 / number)), state
        with torch.inference_mode(False):
            scale = state.scale.clone()
            if half:
                scale.clamp_(max=HALF_LOSS_SCALE)
                state.scale.clamp_(max=kept)
        return Scale(scale, None), state

    def next_copy(self, captured: bool) -> Tensor:
        """float32: where the kernel that moves the scale next leaves a copy of it."""
        place = self._copies.take(self.device, captured)  # type: ignore[arg-type]
        self.copy = None if captured else place
        self.replayed = self.replayed or captured
        return place

    def loss_scale(self, loss_id: LossId, half: bool) -> Scale:
        """A copy of the scale of the loss called `loss_id`, which may be new."""
        if loss_id not in self.losses:
            first = self.policy.init()
            self.losses[loss_id] = first if self.on_host else self.on_device(first)
        scale, self.losses[loss_id] = self._copied(self.losses[loss_id], half)
        return scale

    # Moving.

    def kernel(self) -> tuple[int, Tensor] | None:
        """The rule in kernels that the policy is, and its settings on the device; None without."""
        known = self._kernel
        if known is None or known[0] is not self.policy:
            rule = rule_of(self.policy)
            settings = None
            if rule is not None:
                settings = pack_settings(self.policy, device=self.device)  # type: ignore[arg-type]
            known = self._kernel = (self.policy, rule, settings)
        return None if known[1] is None else (known[1], known[2])

    def advance(self, stats: GradStats, counts: Any = None, loss_id: LossId = 0) -> tuple[Any, Any]:
        """Moves a scale by the policy; its values before and after.

        Args:
            stats: What the gradients were like.
            counts: bool: whether to move it at all; None moves it.
            loss_id: Whose scale.
        """
        state = self.live if loss_id == 0 else self.losses[loss_id]
        stats = self._sized(stats)
        if self.on_host:
            moved = state if counts is False else self.policy.update(state, stats)
            if loss_id == 0:
                self.live = moved
            else:
                self.losses[loss_id] = moved
            return state.scale, moved.scale
        self.copy = None
        before = state.scale.clone()
        moved = self.policy.update(state, stats, torch)
        for value, new in zip(state, moved, strict=True):
            value.copy_(new if counts is None else torch.where(counts, new, value))
        return before, state.scale.clone()

    def _sized(self, stats: GradStats) -> GradStats:
        """`stats` with what the policy goes by besides flags; the amax is of this scale."""
        if not self.policy.goes_by:
            return stats._replace(amax=None)
        amax = stats.amax
        if amax is None:
            amax = 0.0 if self.on_host else torch.zeros_like(self.live.scale)
        stats = stats._replace(amax=amax, upper=None)
        if "exponent" not in self.policy.goes_by:
            return stats
        if self.on_host:
            return stats._replace(exponent=math.frexp(amax)[1] if math.isfinite(amax) else 0)
        return stats._replace(exponent=torch.frexp(amax).exponent.to(torch.int32))

    def losses_finite(self, finite: Any, penalty_finite: Any) -> Any:
        """bool: whether the losses of an iteration were finite, for the policy.

        Counts iterations in a row in which they were not. `finite` is None where the rule is off.
        """
        if finite is None:
            return True
        counters = self.counters
        if penalty_finite is not None:
            finite = finite | (penalty_finite ^ True)  # non-finite through the scale
        if self.on_host:
            count = 0 if finite else counters.bad_losses + 1
            if count != counters.bad_losses:
                self.counters = counters._replace(bad_losses=count)
            elif not count:
                return True
        else:
            count = counters.bad_losses
            count.copy_(torch.where(finite, torch.zeros_like(count), count + 1))
        over = count - PATIENT_LOSSES
        return finite | ((over > 0) & (over % LOSS_PERIOD == 0))

    def count_step(self, counts: Any = None) -> Any:
        """The number of this `update()`; one that does not count (bool) has that of the last."""
        counters = self.counters
        if self.on_host:
            steps = counters.steps + (1 if counts is None else int(counts))
            self.counters = Counters(counters.bad_losses, steps)
            return steps
        counters.steps.add_(1 if counts is None else counts)
        return counters.steps

    def lower(self, used: float) -> bool:
        """Whether the scale is below the one that was `used`, in a step that overflowed.

        A policy that waits, for more of them or because of `spikes`, gets this overflow until it
        lowers the scale.
        """
        skips = getattr(self.policy, "spikes", None) == "skip"
        for _ in range(1 if skips else getattr(self.policy, "hysteresis", 1) - 1):
            if float(self.live.scale) < used:
                break
            self.overflow()
        return float(self.live.scale) < used

    def overflow(self) -> None:
        """Moves the scale as an overflow does."""
        flags: Any = (False, True)
        if not self.on_host:
            flags = tuple(torch.full_like(self.live.scale, f, dtype=torch.bool) for f in flags)
        self.advance(GradStats(finite=flags[0], fits=flags[1]))

    # Reading and setting.

    def number(self, loss_id: LossId = 0) -> float:
        """The scale as a number. Waits for the device."""
        if loss_id == 0:
            return float((self.initial if self.live is None else self.live).scale)
        if loss_id not in self.losses:
            known = ", ".join(map(repr, [0, *self.losses]))
            raise SettingError(
                f"loss_id must be one that was passed to backward() ({known}), got {loss_id!r}."
            )
        return float(self.losses[loss_id].scale)

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest scale."""
        return self.floor or MIN_SCALE, getattr(self.policy, "max_scale", MAX_SCALE)

    @property
    def floor(self) -> float:
        """The smallest scale; 0 where the policy has none."""
        return getattr(self.policy, "min_scale", 0.0)

    def change(self, name: str, value: Any) -> None:
        """Changes a setting of `Dynamic`, to any number that torch would take."""
        if not isinstance(self.policy, Dynamic):
            raise SettingError(
                f"{name} is a setting of Dynamic, and this scaler's policy is {self.policy}."
            )
        self.policy = dataclasses.replace(self.policy, exact=False, **{name: value})

    def set_scale(self, new_scale: float | Tensor) -> None:
        """Sets the scale by the rules of `init_scale`; default bounds give way to it."""
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise SettingError(
                    "new_scale must be a number or a tensor of one element with "
                    f"requires_grad=False, got shape {tuple(new_scale.shape)}, "
                    f"requires_grad={new_scale.requires_grad}."
                )
            if not new_scale.is_cpu and not self.on_host:
                # Reading it would wait for the device, so a bad one leaves the scale as it is
                # instead of raising.
                self.copy = None
                scale = self.live.scale
                wanted = move(new_scale.detach().reshape(()), scale.device).to(torch.float32)
                usable = torch.isfinite(wanted) & (wanted > 0)
                scale.copy_(torch.where(usable, wanted.clamp(*self.bounds()), scale))
                return
            new_scale = new_scale.item()
        # The constructor has the rules: a default bound moves here as it does there.
        policy = self.policy
        low, high = self.bounds()
        try:
            if isinstance(policy, Dynamic):
                checked = dataclasses.replace(policy, init_scale=new_scale, exact=False)
            else:
                checked = Dynamic(init_scale=new_scale, min_scale=low, max_scale=high, exact=False)
        except SettingError as error:
            raise SettingError(f"update({new_scale!r}): {error}") from None
        if isinstance(policy, Dynamic):
            self.policy = dataclasses.replace(checked, init_scale=policy.init_scale)
        self.write(scale=float32(checked.init_scale))

    def write(self, **fields: float) -> None:
        """Writes these fields of the live state, in place on a device."""
        self.copy = None
        if self.on_host:
            self.live = self.live._replace(**fields)
        else:
            for name, value in fields.items():
                getattr(self.live, name).fill_(value)

    def field(self, name: str) -> Tensor | None:
        """A field of the live state as a tensor: torch's names `_scale` and `_growth_tracker`."""
        value = getattr(self.live, name, None)
        return None if value is None else _as_tensor(value)

    def put(self, name: str, value: Any) -> None:
        """Sets a field of the live state to what others assign to torch's private names."""
        self.copy = None
        if self.on_host:
            self.live = self.live._replace(**{name: value.item()})
        else:
            getattr(self.live, name).copy_(value)

    def guarded(self) -> list[Tensor]:
        """All that ranks must have the same of: scales, and what is counted for them."""
        states = [self.live, *(self.losses[key] for key in sorted(self.losses, key=repr))]
        values = [*(value for state in states for value in state), self.counters.bad_losses]
        return list(map(_as_tensor, values))

    def restore(self, values: Sequence[Tensor]) -> None:
        """Takes over what `guarded()` of another rank gave."""
        self.copy = None
        if not self.on_host:
            return  # they were written in place
        numbers = iter([value.item() for value in values])
        self.live = type(self.live)(*(next(numbers) for _ in self.live))
        for key in sorted(self.losses, key=repr):
            state = self.losses[key]
            self.losses[key] = type(state)(*(next(numbers) for _ in state))
        self.counters = self.counters._replace(bad_losses=next(numbers))

    # Checkpoints.

    def numbers(self) -> tuple[State, dict[str, int], dict[LossId, State]]:
        """The state, the counters and the states of own losses in plain numbers."""
        state = self.initial if self.live is None else plain(self.live)
        losses = {key: plain(one) for key, one in self.losses.items()}
        return state, self.counters.numbers(), losses

    def save(self, rows: Sequence[int]) -> dict[str, Any]:
        """The checkpoint: torch's five keys and a block "gradscale". Waits for the device.

        `rows` are the skipped steps in a row of every optimizer.
        """
        state, counters, losses = self.numbers()
        settings, name = settings_of(self.policy), type(self.policy).__name__
        named = [(key, one._asdict()) for key, one in losses.items()]
        if not any(rows):
            rows = ()
        saved = checkpoints.Saved(
            name, settings, state._asdict(), counters, named, skipped_in_a_row=rows
        )
        return checkpoints.write(saved)

    def load(self, state_dict: Mapping[str, Any], settings: bool) -> list[int]:
        """Takes over a checkpoint; the skipped steps in a row of every optimizer.

        A StateError, with nothing loaded, if it cannot be read.
        """
        saved = checkpoints.read(state_dict)
        policy = policy_of(saved, self.policy) if settings else self.policy
        strict = settings and saved.policy is not None
        state = patient(state_of(saved.state, policy, strict), saved, policy)
        losses = {key: state_of(fields, policy, strict) for key, fields in saved.losses}
        counters = {name: saved.counters.get(name, 0) for name in Counters._fields}
        self.policy, self.initial, self.copy = policy, state, None
        if self.device is None or self.on_host or type(self.live) is not type(state):
            self.losses, self.counters = dict(losses), Counters(**counters)
            if self.device is not None:
                self.place(self.device)
            return list(saved.skipped_in_a_row)
        # In place: a CUDA graph may have captured these very tensors.
        old, self.losses = self.losses, {k: self.on_device(v) for k, v in losses.items()}
        for key in old.keys() & losses.keys():
            self.losses[key] = old[key]
        for live, numbers in [(self.live, state), *((self.losses[k], losses[k]) for k in losses)]:
            for value, number in zip(live, numbers, strict=True):
                value.fill_(number)
        for name, count in counters.items():
            getattr(self.counters, name).fill_(count)
        return list(saved.skipped_in_a_row)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of a copy that is on no device. Waits for the device."""
        copy = ScaleState(self.policy, self.format)
        copy.initial, counters, copy.losses = self.numbers()
        copy.counters = Counters(**counters)
        return copy.__dict__


def plain(state: Any) -> Any:
    """`state` in plain numbers. Waits for the device."""
    return type(state)(*(v.item() if isinstance(v, Tensor) else v for v in state))


def _as_tensor(value: Any) -> Tensor:
    """A field of a state as a tensor: itself, or a number in float32 or int32 on the CPU."""
    if isinstance(value, Tensor):
        return value
    dtype = torch.float32 if isinstance(value, float) else torch.int32
    return torch.full((), value, dtype=dtype, device="cpu")
