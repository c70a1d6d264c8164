"""The state of `amp` between calls: one for the whole process, as in Apex."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.options import Options
from gradscale.errors import CallOrderError


class Session:
    """The options of the last `amp.initialize`, and the scales of its losses."""

    def __init__(self) -> None:
        self.begun = False
        """Whether `amp.initialize` was called."""
        self.opt_properties: Options | None = None
        """None before that, and if it said `enabled=False`."""
        self.loss_scalers: list[LossScaler] = []
        self.disabled = 0
        """How many `disable_casts()` we are inside of."""

    @property
    def casting(self) -> bool:
        """Whether functions of the user cast their arguments now: at O1 alone."""
        options = self.opt_properties
        return options is not None and options.patch_torch_functions and not self.disabled

    def begin(self, options: Options | None, scalers: list[LossScaler]) -> None:
        """Starts anew; without options, `amp` is switched off."""
        self.begun = True
        self.opt_properties = options
        self.loss_scalers = scalers

    def demand(self, name: str) -> None:
        """A CallOrderError if `amp.initialize` was not called yet."""
        if not self.begun:
            raise CallOrderError(
                f"{name} was called before amp.initialize(). Call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...) first."
            )


SESSION = Session()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Runs the block without autocast, and without the casts of registered functions."""
    SESSION.disabled += 1
    try:
        with no_autocast():
            yield
    finally:
        SESSION.disabled -= 1


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switches torch's autocast off, on every device where it is on."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
