"""Additions: weights that are put into a block after BlockScales was made, as adapters are.

Nothing divides their gradients by the scale of the block, so they are refused. torch says when a
module gets another module or a weight, so passes have nothing to look for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from gradscale.errors import CallOrderError
from gradscale.torch.blocks.chains import Block

_every: weakref.WeakSet[Additions] = weakref.WeakSet()


class Additions:
    """Notices weights that are put into blocks.

    Args:
        model: Whose blocks they are.
        blocks: The blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self._model, self._blocks = model, blocks
        self._known = {(module, name) for _, module, name in self._weights()}
        self.pending = False
        """Whether something was put into a module of a block since the last `check()`."""
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watch()

    def _watch(self) -> None:
        """Has torch say when a module of a block gets something."""
        if not _every:
            torch_module.register_module_module_registration_hook(_note)
            torch_module.register_module_parameter_registration_hook(_note)
        _every.add(self)
        for block in self._blocks:
            for member in block.modules:
                self._modules.update(member.modules())

    def _weights(self) -> list[tuple[str, nn.Module, str]]:
        """The weights of blocks: the name of the block, the module, and the name of the weight."""
        return [
            (block.name, module, name)
            for block in self._blocks
            for member in block.modules
            for module in member.modules()
            for name, param in module._parameters.items()
            if param is not None
        ]

    def check(self) -> None:
        """Raises if there is a weight that was not there when BlockScales was made.

        Raises:
            CallOrderError: It names the block and the weights.
        """
        self._watch()  # also what was put in now, without weights
        new = [each for each in self._weights() if each[1:] not in self._known]
        if new:
            names = {module: name for name, module in self._model.named_modules()}
            named = [".".join(filter(None, (names.get(m, "?"), name))) for _, m, name in new]
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            raise CallOrderError(
                f"Block {new[0][0]!r} has the new weight {named[0]!r}{more}, which was added after "
                "BlockScales was created, so its gradient would keep the scale of the block. Call "
                "blocks.remove(), and create BlockScales again after all modules and weights "
                "(adapters, parametrizations) have been added."
            )
        self.pending = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: it looks at its own modules once all of them are there."""
        return {**self.__dict__, "_modules": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _modules=weakref.WeakSet(), pending=True)


def _note(module: nn.Module, name: str, added: Any) -> None:
    """A module has got another module, or a weight: a hook for all modules."""
    for each in _every:
        if module in each._modules:
            each.pending = True
