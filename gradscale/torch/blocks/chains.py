"""Which modules are the blocks of a model.

Scales are right for any choice (see scales.py), so this is only a matter of what helps: blocks that
follow each other, with nothing in between, keep the gradient scaled from the first to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gradscale.errors import SettingError


class Block(NamedTuple):
    """Modules that are called one after the other, the first with the inputs of the block."""

    name: str
    modules: tuple[nn.Module, ...]


def find(model: nn.Module, blocks: Iterable[nn.Module | Sequence[nn.Module]] | None) -> list[Block]:
    """The blocks of `model`: those given, or those of its chains, in order.

    Raises:
        SettingError: There are none, or they overlap.
    """
    names = {module: name for name, module in model.named_modules()}
    if blocks is None:
        found = list(_search(model, ""))
        if len(found) < 2:
            raise SettingError(
                f"{type(model).__name__} has no nn.Sequential or nn.ModuleList of two or more "
                "modules with weights. Name its blocks: BlockScales(model, blocks=[...])."
            )
    else:
        several = [(each,) if isinstance(each, nn.Module) else tuple(each) for each in blocks]
        for module in (module for modules in several for module in modules):
            if module not in names:
                kind = f"a {type(module).__name__} that is not"
                got = kind if isinstance(module, nn.Module) else repr(module)
                raise SettingError(
                    f"blocks must be modules of the model, or sequences of them, got {got}."
                )
        found = [Block(names[modules[0]], modules) for modules in several if modules]
        if not found:
            raise SettingError("blocks must name at least one module, got none.")
    taken: dict[nn.Module, str] = {}
    members = {member for block in found for member in block.modules}
    for block in found:
        for member in block.modules:
            for module in member.modules():
                if module in taken and (module in members or _has_weights(module)):
                    raise SettingError(
                        f"blocks must not overlap: {names.get(module, '')!r} is in both "
                        f"{taken[module]!r} and {block.name!r}. Leave one of them out."
                    )
            taken.update(dict.fromkeys(member.modules(), block.name))
    return found


def device_of(blocks: Sequence[Block]) -> torch.device:
    """The device of all weights of `blocks`."""
    members = (module for block in blocks for module in block.modules)
    devices = {param.device for module in members for param in module.parameters()}
    if len(devices) != 1:
        raise SettingError(
            "blocks must have weights on one device, got "
            f"{', '.join(sorted(map(str, devices))) or 'no weights'}. Create a separate "
            "BlockScales for the blocks of each device."
        )
    return devices.pop()


def _search(model: nn.Module, prefix: str) -> Iterator[Block]:
    """The blocks of the outermost chains below `model`."""
    in_order = _is_sequence(model)
    chain: list[tuple[str, nn.Module]] = []
    if in_order:
        chain = list(_chain(model, prefix))
    elif isinstance(model, nn.ModuleList):
        chain = [(prefix + name, child) for name, child in model.named_children()]
    if sum(_has_weights(module) for _, module in chain) > 1:
        yield from _group(chain, in_order)
        return
    for name, child in model.named_children():
        yield from _search(child, prefix + name + ".")


def _chain(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that `model` calls one after the other, sequences in it taken apart."""
    for name, child in model._modules.items():
        if child is not None and _is_sequence(child):
            yield from _chain(child, prefix + name + ".")
        elif child is not None:
            yield prefix + name, child


def _is_sequence(module: nn.Module) -> bool:
    """Whether it calls its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _group(chain: list[tuple[str, nn.Module]], called_in_order: bool) -> Iterator[Block]:
    """A block for every module with weights, together with those without that follow it."""
    names: dict[nn.Module, str] = {}
    for name, module in chain:
        names.setdefault(module, name)
    if not called_in_order or len(names) < len(chain):
        yield from (Block(name, (each,)) for each, name in names.items() if _has_weights(each))
        return
    members: tuple[nn.Module, ...] = ()
    for module in names:
        if _has_weights(module) and any(map(_has_weights, members)):
            yield Block(names[members[0]], members)
            members = ()
        members += (module,)
    yield Block(names[members[0]], members)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
