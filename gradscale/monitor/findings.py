"""What is wrong with a run and what to do about it, in words that every engine shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = {
    "loss-not-finite": "No scale cures a loss that is not finite: look at the forward pass, the "
    "data and the learning rate of the steps before.",
    "data-not-finite": "Check the data: drop or repair the inputs that are not finite before they "
    "reach the model.",
    "forward-overflow": "The forward pass leaves the range of the format: compute this module in "
    "float32 or bfloat16, or make its inputs smaller, as by a normalisation before it.",
    "scale-too-high": "Lower init_scale to the scale at which steps were applied again, or call "
    "scaler.calibrate() before the first step.",
    "scale-too-low": "Raise the scale: a higher init_scale, a shorter growth_interval, or "
    "policy='headroom', which places the scale by the largest gradient. If the gradients have "
    "exploded instead, lower the learning rate or pass clip_norm to apply().",
    "nan-at-any-scale": "Look for 0 / 0, or a root or logarithm of 0, in the backward pass of "
    "the parameters named here; an epsilon inside the root or logarithm is the usual cure.",
    "underflow": "Raise the scale: policy='headroom', a higher init_scale or max_scale. If other "
    "gradients overflow at that scale, give the loss a scale of its own (loss_id) or the blocks "
    "of the model theirs (gradscale.torch.blocks).",
    "dead-gradient": "Check that the loss depends on it and that nothing detaches it; take it out "
    "of the optimizer if it is meant to stay as it is.",
    "update-lost": "Keep float32 masters of the weights: MixedPrecision with 'fp16-master' or "
    "'bf16-master', or weights in float32 under autocast.",
    "weights-not-finite": "Load a checkpoint from before: no scale cures weights that are not "
    "finite. Then keep float32 masters (MixedPrecision with 'fp16-master'), choose an eps that "
    "float16 can hold (1e-8 is 0 in it; 1e-4 is not), or lower the learning rate.",
    "gradients-not-cleared": "Call optimizer.zero_grad() after every step, or apply(), which does "
    "it; gradients that are added to another iteration's have its scale.",
    "clip-before-unscale": "Clip after unscaling: scaler.unscale_(optimizer) before "
    "clip_grad_norm_(), scaler.clip_grad_norm_(), or clip_norm in apply().",
    "losses-unbalanced": "Weigh the losses so that their gradients are of one size, or keep a "
    "scale for each (loss_id), as now, and check that both still train.",
    "stuck": "Stop the run and look at the verdict and the parameters named here; go on from a "
    "checkpoint that was saved before the first of these skips.",
    "skips-too-often": "Raise growth_interval, set max_scale below the scale at which steps are "
    "skipped, or use policy='headroom', which stays below the largest gradient that it has seen.",
}
"""Every kind of finding, and what to do about it unless a rule has better advice."""


class Finding(NamedTuple):
    """Something that is wrong with a run."""

    kind: str
    """A key of `KINDS`."""
    where: str
    """The module or parameter; empty where it is of the whole run."""
    evidence: str
    """The numbers that show it, in one sentence."""
    remedy: str
    """What to do about it, in one or two sentences."""
    step: int | None = None
    """The `update()` at which it was first seen."""
    rank: int | None = None
    """The rank on which it was seen; None: of all, or there is one only."""

    @classmethod
    def of(
        cls,
        kind: str,
        evidence: str,
        where: str = "",
        *,
        step: int | None = None,
        rank: int | None = None,
    ) -> Finding:
        """A finding of this kind with the remedy that `KINDS` has for it."""
        return cls(kind, where, evidence, KINDS[kind], step, rank)

    def as_dict(self) -> dict[str, Any]:
        """Its fields by name, without `step` and `rank` where they are None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Finding:
        """The finding that `as_dict()` gave these fields for; others are ignored."""
        return cls(**{name: fields[name] for name in cls._fields if name in fields})

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        seen = [f"step {self.step}"] if self.step is not None else []
        seen += [f"rank {self.rank}"] if self.rank is not None else []
        first = f" (first at {', '.join(seen)})" if seen else ""
        return f"{self.kind}{place}{first}: {self.evidence} {self.remedy}"
