"""What every new `GradScaler` goes through: a policy where it chooses none, and calls with it.

For programs that run other people's code, which makes its scalers itself (`replace()`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from gradscale.errors import SettingError
from gradscale.policy import NAMES, Dynamic, Policy, as_policy
from gradscale.policy.registry import policy_or_settings
from gradscale.policy.settings import given

_policies: list[str] = []
"""Names of policies; the last one counts."""
_listeners: list[Callable[[Any], object]] = []


@contextmanager
def observed(policy: str | None, on_new: Callable[[Any], object] | None) -> Iterator[None]:
    """Gives scalers that choose no policy this one, and calls `on_new` with every new scaler."""
    if policy is not None:
        as_policy(policy)
        _policies.append(policy)
    if on_new is not None:
        _listeners.append(on_new)
    try:
        yield
    finally:
        if policy is not None:
            _policies.remove(policy)
        if on_new is not None:
            _listeners.remove(on_new)


def as_device(device: Any) -> Any:
    """Returns `device`; a SettingError if it is plainly another argument at the first position."""
    name = None
    if isinstance(device, float):  # the first argument of torch.cuda.amp.GradScaler
        name = "init_scale"
    elif isinstance(device, Policy) or (isinstance(device, str) and device in NAMES):
        name = "policy"
    if name is not None:
        raise SettingError(
            "device, the first argument, must be the type of a device such as 'cuda', got "
            f"{device!r}. Use {name}={device!r}."
        )
    return device


def policy_of(policy: Any, settings: Dynamic, format: str) -> Policy:
    """The policy of a new scaler: what it was given, else that of the block around it."""
    if policy is not None or not _policies:
        return policy_or_settings(policy, settings, format)
    chosen = as_policy(_policies[-1])
    if isinstance(chosen, Dynamic):
        return settings
    # Code that was written for torch's rule may set what another rule does not have.
    own = {field.name for field in fields(chosen)} - {"exact"}
    kept = {name: value for name, value in given(settings).items() if name in own}
    return as_policy(_policies[-1], **kept, **({"format": format} if "format" in own else {}))


def announce(scaler: Any) -> None:
    """Calls everybody who waits for new scalers."""
    for listener in tuple(_listeners):
        listener(scaler)


def measure_more(scaler: Any, underflow_every: int = 100) -> None:
    """Has `scaler` measure the headroom of every step, and underflow in every so many.

    torch's loop measures neither, because its rule goes by flags alone. An `underflow_every` that
    the scaler was given stays.
    """
    pipeline = scaler._pipeline
    pipeline.always_amax = True
    pipeline.underflow_every = pipeline.underflow_every or underflow_every
