"""Gaps: the operations between the input of a block and the outputs of the blocks before it.

A backward pass is linear in the gradient that enters it, so a gradient can keep the scale of a
block through any operation. But other gradients may pass through the same operations, from another
block or from a loss that uses a tensor between two blocks, and gradients of different scales must
not be added up. So the input of a block does not hand its gradient to the operation that comes
next, for the engine to add up. It calls the operations of the gap itself, with its gradient alone,
and hands the results to the blocks and leaves at the other end. The operations run once more for
the engine, without a gradient or with those of others. That is right for any graph, also for one
that changes from pass to pass.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_MOST = 64
"""The most operations of a gap."""
_MOST_SHARED = 8
"""The most operations of a gap if other blocks use them too: each block calls them once more."""


class End(NamedTuple):
    """Where an edge of the graph leads to."""

    kind: str
    """"node", "block", "leaf", or "" if it leads nowhere."""
    place: int = 0
    nr: int = 0
    """Which of the outputs of a node."""


class Gap:
    """The operations from the node of `x` to `blocks` and `leaves`."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        """Contexts of `edges.Output`."""
        self.leaves: list[Tensor] = []
        """One for every use, so that the engine adds their gradients up, in its order."""
        self.nodes: list[Any] = []
        """In an order in which gradients can pass."""
        self.first = End("")
        self._ends: list[tuple[End, ...]] = []
        """Of every node, where its gradients go to."""

    def is_step(self) -> bool:
        """Whether one operation leads to one block."""
        return len(self.nodes) == 1 == len(self.blocks) and step_from(self.nodes[0]) is not None

    def carry(self, grad: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of `blocks` and `leaves` that come from `grad`, the gradient of `x`."""
        at_blocks: list[Tensor | None] = [None] * len(self.blocks)
        at_leaves: list[Tensor | None] = [None] * len(self.leaves)
        at_nodes: list[list[Tensor | None]] = [
            [None] * len(node._input_metadata) for node in self.nodes
        ]

        def hand(end: End, grad: Tensor | None) -> None:
            if grad is None or not end.kind:
                return
            if end.kind == "node":
                kept, index, like = at_nodes[end.place], end.nr, _metadata(self.nodes, end)
            elif end.kind == "block":
                kept, index, like = at_blocks, end.place, _metadata(self.blocks, end)
            else:
                kept, index, like = at_leaves, end.place, self.leaves[end.place]
            if not grad.is_sparse:  # as the engine does
                shape = tuple(like.shape)
                if tuple(grad.shape) != shape:
                    grad = grad.sum_to_size(shape)
                if grad.dtype is not like.dtype:
                    grad = grad.to(like.dtype)
            before = kept[index]
            kept[index] = grad if before is None else before + grad

        hand(self.first, grad)
        for index, node in enumerate(self.nodes):
            if any(each is not None for each in at_nodes[index]):
                done = node(*at_nodes[index])
                parts = done if isinstance(done, tuple) else (done,)
                for end, part in zip(self._ends[index], parts, strict=True):
                    hand(end, part)
                at_nodes[index] = []
        return at_blocks, at_leaves

    def find(
        self,
        x: Tensor,
        mark: int,
        params: Container[int],
        used: set[Any],
        watched: Container[Any],
        known: set[tuple[str, ...]],
    ) -> str:
        """Finds what lies before `x`; why gradients cannot be carried through, "" if they can.

        Args:
            x: The input of a block.
            mark: Of the blocks.
            params: The ids of parameters whose gradients autograd accumulates.
            used: The operations that gaps of this forward pass have; those of this gap are added.
            watched: The operations that have made tensors whose gradients somebody wants.
            known: The names of the operations of other gaps, in which no saved tensor can be had
                only once; those of this gap are added.
        """
        if not hasattr(x.grad_fn, "_input_metadata"):
            return "this torch does not say which gradients an operation takes"
        order: dict[Any, None] = {}
        ends: dict[Any, End] = {}
        waiting: list[tuple[Any, bool]] = [(x.grad_fn, False)]
        num_nodes = 0
        while waiting:
            node, done = waiting.pop()
            if done:
                order[node] = None
                continue
            if node in ends or node is None:
                continue
            if node in watched:
                return "the gradient of an input is kept, or has a hook"
            route = getattr(node, "route", None)
            if route is not None and route[0] == mark and hasattr(node, "arrived"):
                ends[node] = End("block", len(self.blocks))
                self.blocks.append(node)
                continue
            if isinstance(node, BackwardCFunction):
                return f"{type(node).__name__} is a Python function of autograd"
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and not node.next_functions:
                if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in params:
                    return "a weight there is sharded, or is not a weight of the model"
                ends[node] = End("leaf")
                continue
            ends[node] = End("node")
            num_nodes += 1
            if num_nodes > _MOST:
                return f"there are more than {_MOST} operations"
            waiting.append((node, True))
            waiting.extend((near, False) for near, _ in node.next_functions)
        self.nodes = list(reversed(order))
        if num_nodes > _MOST_SHARED and not used.isdisjoint(self.nodes):
            return f"there are more than {_MOST_SHARED} operations that other blocks use too"
        names = tuple([node.name() for node in self.nodes])
        if names not in known and any(_is_packed(node) for node in self.nodes if node not in used):
            return "its saved tensors are packed, as by a checkpoint"
        known.add(names)
        used.update(self.nodes)
        ends.update((node, End("node", index)) for index, node in enumerate(self.nodes))

        def end_of(node: Any, nr: int) -> End:
            if node is None:
                return End("")
            if ends[node].kind == "leaf":
                self.leaves.append(node.variable)
                return End("leaf", len(self.leaves) - 1)
            return ends[node]._replace(nr=nr)

        self._ends = [tuple(end_of(*edge) for edge in node.next_functions) for node in self.nodes]
        self.first = end_of(x.grad_fn, x.output_nr)
        return ""


def step_from(node: Any) -> Any:
    """The edge from an operation that hands its gradient on to one other; None if it does more."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(edges) != 1 or isinstance(node, BackwardCFunction):
        return None
    return edges[0]


def _metadata(nodes: list[Any], end: End) -> Any:
    """Shape and dtype of the gradient that a node is called with."""
    return nodes[end.place]._input_metadata[end.nr]


def _is_packed(node: Any) -> bool:
    """Whether a saved tensor of `node` has hooks: a checkpoint gives it back only once.

    It has hooks afterwards, ones that do nothing: nothing but setting them shows others.
    """
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for each in saved if isinstance(saved, (list, tuple)) else (saved,):
                try:
                    each.register_hooks(_same, _same)
                except RuntimeError as error:
                    if "already been set" in str(error):
                        return True
    return False


def _same(x: Any) -> Any:
    return x
