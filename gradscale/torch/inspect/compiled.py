"""Compiled models: sampled iterations run eagerly, because hooks do not run inside of graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradscale.errors import SettingError


class Eager:
    """Switches the compiler off while a sample is open, if the model is compiled.

    The compiled code stays, and is used again in the next iteration.
    """

    def __init__(self, model: nn.Module) -> None:
        self._needed = any(
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
            for module in model.modules()
        )
        if self._needed and not hasattr(torch.compiler, "set_stance"):
            raise SettingError(
                f"Inspector of a compiled model needs torch 2.6 or later, got {torch.__version__}. "
                "Pass a model that is not compiled."
            )
        self._stance: Any = None

    def enter(self) -> None:
        """Runs compiled functions as they are written."""
        if self._needed and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def leave(self) -> None:
        """Runs compiled code again."""
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)
