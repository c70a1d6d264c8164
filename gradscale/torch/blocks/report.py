"""What BlockScales has done to the gradients of every block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscale.torch.blocks.rule import ENTERING, LEAVING, TINY


@dataclass(frozen=True)
class BlockReport:
    """The gradients of one block in the last measured update, at the scale of the block.

    Gradients are given as log2 of the largest element: None if there was no gradient, -inf if all
    of it was zero, inf or NaN if it was not finite.
    """

    name: str
    exponent: int
    """log2 of the scale."""
    entering: float | None
    """The gradient of the outputs."""
    leaving: float | None
    """The gradient of the inputs, or where the operations before the block end."""
    weights: dict[str, float | None]
    """The gradient of every weight, by name."""
    unscaled_because: str
    """Why the gradients of the inputs are unscaled at the border; empty if they are not."""

    @property
    def range(self) -> tuple[float, float] | None:
        """The smallest and the largest of the gradients that are not zero."""
        found = (self.entering, self.leaving, *self.weights.values())
        found_there = [each for each in found if each is not None and each > -math.inf]
        return (min(found_there), max(found_there)) if found_there else None

    @property
    def vanished(self) -> tuple[str, ...]:
        """What was all zero: "outputs", "inputs", and names of weights."""
        found = {"outputs": self.entering, "inputs": self.leaving, **self.weights}
        return tuple(name for name, each in found.items() if each == -math.inf)


@dataclass(frozen=True)
class BlocksReport(Sequence[BlockReport]):
    """The blocks of a model, in order; as text a table."""

    blocks: tuple[BlockReport, ...]
    never: tuple[str, ...]
    """The weights whose gradients were all zero in every measurement."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> BlockReport:  # type: ignore[override]
        return self.blocks[index]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(len("block"), *(len(block.name) for block in self.blocks))
        yield f"{'block':{width}}  exponent  gradients (log2)  notes"
        for block in self.blocks:
            lie = "none"
            if block.range is not None:
                lie = " to ".join(f"{round(each, 0) + 0.0:.0f}" for each in block.range)  # no -0
            notes = []
            if block.vanished:
                notes.append("vanished: " + ", ".join(block.vanished))
            if block.unscaled_because and block.exponent:
                notes.append("inputs are unscaled: " + block.unscaled_because)
            line = f"{block.name:{width}}  {block.exponent:8d}  {lie:>16}  {'; '.join(notes)}"
            yield line.rstrip()
        if self.never:
            yield "never had a gradient: " + ", ".join(self.never)


def make(
    names: Sequence[str],
    exponents: Sequence[int],
    amax: Sequence[Sequence[float]],
    weights: Sequence[tuple[str, int, float]],
    reasons: dict[int, str],
    never: Sequence[str],
) -> BlocksReport:
    """A report.

    Args:
        names: Of the blocks.
        exponents: Of the blocks.
        amax: The rows that `BlockPolicy.update()` takes.
        weights: Names of weights, the places of their blocks, and their largest gradients.
        reasons: Why inputs are unscaled, by place.
        never: Weights that never had a gradient.
    """
    blocks = []
    for place, (name, exponent) in enumerate(zip(names, exponents, strict=True)):
        own = {weight: _log2(found) for weight, block, found in weights if block == place}
        entering, leaving = _log2(amax[ENTERING][place]), _log2(amax[LEAVING][place])
        because = reasons.get(place, "")
        blocks.append(BlockReport(name, exponent, entering, leaving, own, because))
    return BlocksReport(tuple(blocks), tuple(never))


def _log2(amax: float) -> float | None:
    """log2 of what a meter shows."""
    if amax == 0:
        return None
    if not math.isfinite(amax):
        return amax
    return math.log2(amax) if amax > TINY else -math.inf
