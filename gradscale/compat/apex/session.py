"""The state of `amp` between calls: one for the whole process, as in Apex."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.options import Options
from gradscale.errors import CallOrderError


class Session:
    """What is in `amp._amp_state`; scripts ask with `hasattr` for what is there from a call on."""

    opt_properties: Options
    """The options of the last `amp.initialize`."""
    loss_scalers: list[LossScaler]
    """The scales of its losses; none if it said `enabled=False`."""
    handle: Any
    """Whose casts are in force: from `amp.init` on, or `amp.initialize` at O1."""

    def __init__(self) -> None:
        self.verbosity = 1
        """As `amp.initialize` was given it. Nothing is printed."""
        self.hard_override = False
        """Whether settings that do not go together are warned of and not refused."""
        self.allow_incoming_model_not_fp32 = False
        """Whether `amp.initialize` takes models that have half weights already."""
        self.suspended = 0
        """How many `disable_casts()` we are inside of."""

    @property
    def casting(self) -> bool:
        """Whether functions of the user cast their arguments now."""
        return hasattr(self, "handle") and self.handle.is_active()

    @property
    def disabled(self) -> bool:
        """Whether models run without autocast now."""
        return self.suspended > 0 or (hasattr(self, "handle") and not self.handle.is_active())

    def begin(self, options: Options, scalers: list[LossScaler]) -> None:
        """Starts anew; no functions are cast until there is another handle."""
        self.opt_properties = options
        self.loss_scalers = scalers
        self.drop_handle()

    def drop_handle(self) -> None:
        """Ends the casts of the handle, if there is one."""
        handle = vars(self).pop("handle", None)
        if handle is not None:
            handle._deactivate()

    def demand(self, name: str) -> None:
        """A CallOrderError if `amp.initialize` was not called yet."""
        if not hasattr(self, "opt_properties"):
            raise CallOrderError(
                f"{name} was called before amp.initialize(). Call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...) first."
            )


SESSION = Session()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Runs the block without autocast, and without the casts of registered functions."""
    SESSION.suspended += 1
    try:
        with no_autocast():
            yield
    finally:
        SESSION.suspended -= 1


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switches torch's autocast off, on every device where it is on."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
