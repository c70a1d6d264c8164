"""Whether every path of the gradient into a block and out of it leads over its border."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradscale.errors import SettingError
from gradscale.torch.blocks.edges import OUTSIDE
from gradscale.torch.blocks.hooks import BlockHooks
from gradscale.torch.blocks.references import extra, is_held

_REENTRANT = "CheckpointFunctionBackward"


def check(outputs: Iterable[Tensor], hooks: BlockHooks, params: Mapping[int, str]) -> None:
    """Raises if the gradient of `outputs` gets into or out of a block other than over its border.

    What compiled functions and reentrant checkpoints do inside is not seen. `params` has the names
    of parameters by id.

    Raises:
        SettingError: It names the block and what is wrong.
    """
    blocks = [block.name for block in hooks.blocks]
    waiting: list[tuple[Any, int, int]] = [
        (out.grad_fn, 0, OUTSIDE) for out in outputs if out.grad_fn is not None
    ]
    seen: dict[Any, int] = {}
    meters = hooks.meters.ids()
    while waiting:
        node, nr, place = waiting.pop()
        leaf = None if node.next_functions else _leaf(node)
        if id(leaf) in meters:
            continue
        if leaf is not None and place != OUTSIDE:
            name = params.get(id(leaf), f"a leaf of shape {tuple(leaf.shape)}")
            is_param, leaf = id(leaf) in params, None
            if not is_param and _is_lost(node):
                continue
            _refuse_argument(blocks[place], repr(name))
        written = isinstance(node, BackwardCFunction)  # in Python, as ours are
        weights = written and getattr(node, "mark", None) == hooks.mark
        route: Any = getattr(node, "route", None) if written else None
        ours = route is not None and route[0] == hooks.mark
        expected = route[1] if ours else seen.get(node, place)
        expected = node.places[nr] if weights else expected
        if place != expected:
            if place != OUTSIDE and expected == OUTSIDE:
                _refuse_argument(blocks[place], "something that is computed outside of it")
            _refuse_output(blocks[place if expected == OUTSIDE else expected])
        if place != OUTSIDE and written and node.name() == _REENTRANT:
            raise SettingError(
                f"Block {blocks[place]!r} checkpoints a part of itself with use_reentrant=True, "
                "which computes that part with unscaled weights. Use use_reentrant=False, or "
                "checkpoint whole blocks."
            )
        if weights:  # their gradients are unscaled
            continue
        seen[node] = place
        place = route[2] if ours else place
        for near, which in node.next_functions:
            if near is not None and seen.get(near) != place:
                waiting.append((near, which, place))


def _leaf(node: Any) -> Tensor | None:
    """The tensor in whose `.grad` the node accumulates, if it has no next functions."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _is_lost(node: Any) -> bool:
    """Whether nothing but the graph refers to the leaf of `node`, so its gradient is never read.

    Checkpointed blocks of T5 make such leaves: zeros that are added to the scores of attention.
    """
    return extra() is not None and not is_held([node.variable])


def _refuse_output(block: str) -> NoReturn:
    raise SettingError(
        f"A tensor that block {block!r} computes is used outside of the block but is not one of "
        "its outputs, so its gradient would not have the scale of the block. Return it from the "
        "block (a tensor, or tensors in tuples, lists and dicts), or leave the block out of "
        "blocks=."
    )


def _refuse_argument(block: str, what: str) -> NoReturn:
    raise SettingError(
        f"Block {block!r} uses {what}, which is neither one of its weights nor one of its "
        "arguments, so its gradient would keep the scale of the block. Pass it to the block as an "
        "argument, or leave the block out of blocks=."
    )
