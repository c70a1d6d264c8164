"""What is wrong with a run and what to do about it, in words that every engine shares."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

KINDS = {
    "loss-not-finite": "The scale is not the cause of a loss that is not finite. Check the "
    "forward pass, the data and the learning rate of the steps before.",
    "data-not-finite": "Check the data, and remove or repair inputs that are not finite before "
    "they reach the model.",
    "forward-overflow": "Values of the forward pass exceed the range of the format. Compute this "
    "module in float32 or bfloat16, or make its inputs smaller, for example with a normalisation "
    "layer before it.",
    "scale-too-high": "Lower init_scale to the scale at which steps were applied again, or call "
    "scaler.calibrate() before the first step.",
    "scale-too-low": "Raise the scale: use a higher init_scale, a shorter growth_interval, or "
    "policy='headroom', which sets the scale from the largest gradient. If the gradients have "
    "exploded instead, lower the learning rate or pass clip_norm to apply().",
    "nan-at-any-scale": "Look for 0 / 0, or a root or logarithm of 0, in the backward pass of the "
    "parameters listed here. The usual remedy is an epsilon inside the root or logarithm.",
    "underflow": "Raise the scale: use policy='headroom', or a higher init_scale or max_scale. If "
    "other gradients overflow at that scale, use a separate scale for the loss (loss_id) or for "
    "each block of the model (gradscale.torch.blocks).",
    "dead-gradient": "Check that the loss depends on the parameter and that nothing in between is "
    "detached. If it is not meant to be trained, remove it from the optimizer.",
    "update-lost": "Use float32 masters of the weights: MixedPrecision with 'fp16-master' or "
    "'bf16-master', or float32 weights under autocast.",
    "weights-not-finite": "Load a checkpoint from before the weights became infinite or NaN; no "
    "scale repairs them. Then use float32 masters (MixedPrecision with 'fp16-master'), choose an "
    "eps that is not 0 in float16 (1e-8 is; 1e-4 is not), or lower the learning rate.",
    "gradients-not-cleared": "Call optimizer.zero_grad() after every step, or use apply(), which "
    "calls it. Gradients that are added to those of another iteration have the scale of that "
    "iteration.",
    "clip-before-unscale": "Clip after unscaling: call scaler.unscale_(optimizer) before "
    "clip_grad_norm_(), or use scaler.clip_grad_norm_(), or pass clip_norm to apply().",
    "losses-unbalanced": "Weight the losses so that their gradients have similar magnitudes, or "
    "keep a separate scale for each loss (loss_id), as now, and check that both losses still "
    "fall.",
    "stuck": "Stop the run and check the verdict and the parameters listed here. Continue from a "
    "checkpoint that was saved before the first of these skipped steps.",
    "skips-too-often": "Raise growth_interval, set max_scale below the scale at which steps are "
    "skipped, or use policy='headroom', which keeps a margin between the largest recent gradient "
    "and the point of overflow.",
}
"""Every kind of finding, with its default remedy."""


class Finding(NamedTuple):
    """A problem of a run, with the evidence and a remedy."""

    kind: str
    """A key of `KINDS`."""
    where: str
    """The module or parameter; empty if it concerns the whole run."""
    evidence: str
    """The numbers that show it, in one sentence."""
    remedy: str
    """What to do, in one or two sentences."""
    step: int | None = None
    """The `update()` at which it was first seen."""
    rank: int | None = None
    """The rank on which it was seen; None: all ranks, or there is only one."""

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
        """Returns a finding of this kind with the remedy in `KINDS`."""
        return cls(kind, where, evidence, KINDS[kind], step, rank)

    def as_dict(self) -> dict[str, Any]:
        """Returns its fields by name, without `step` and `rank` if they are None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Finding:
        """Returns the finding with these fields, as from `as_dict()`; others are ignored."""
        return cls(**{name: fields[name] for name in cls._fields if name in fields})

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        seen = [f"step {self.step}"] if self.step is not None else []
        seen += [f"rank {self.rank}"] if self.rank is not None else []
        first = f" (first at {', '.join(seen)})" if seen else ""
        return f"{self.kind}{place}{first}: {self.evidence} {self.remedy}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """`findings` by their steps; what several ranks have found once, and of no rank."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = finding.kind, finding.where
        known = first.get(key)
        if known is None:
            first[key] = finding
            continue
        earliest = min(known, finding, key=_moment)
        first[key] = earliest._replace(rank=known.rank if known.rank == finding.rank else None)
    return sorted(first.values(), key=_moment)


def _moment(finding: Finding) -> float:
    """The step of a finding, before all others where it has none."""
    return -1 if finding.step is None else finding.step


# What follows from records of steps alone. Thresholds are such that a run in which a moving scale
# does its work has no finding: it falls by a few binades in the first steps, and then loses one
# step every time that it has grown too far.

FALL = 8
"""Overflows in a row that are too many. To find a scale that has grown too far out costs one, and a
spike two or three; eight are a scale that is a factor of 256 too high."""
LOWERED = 10
"""Binades by which a scale has fallen in vain when NaN gradients are not put down to it."""
OFTEN = 20
"""Overflows within `WINDOW` that are too many: 5 %, where the default settings lose 0.05 %."""
WINDOW = 400
"""Steps among which skips are counted."""
START = 100
"""Steps at the beginning, in which the scale may still be falling."""
ROOM = 6.0
"""Binades of headroom that are more than a scale needs to be safe from spikes."""
VANISHING = 0.05
"""A share of subnormal gradients that a higher scale should bring down."""
MEASURED = 20
"""Measurements in a row that show both, so that a few batches do not count."""
APART = 11
"""Binades between the scales of two losses: gradients of one that are so far below those of the
other are less than its last bit, as float16 has 11 of them."""
LASTING = 100
"""Updates for which they must be that far apart: scales may differ after a spike."""
STUCK_AFTER = 50
"""Skipped steps in a row after which a run is stuck, as in the engines."""


def from_records(
    records: Iterable[Mapping[str, Any]], *, stuck_after: int = STUCK_AFTER
) -> list[Finding]:
    """Returns the findings of a run, from the "step" lines of its log; of several ranks together.

    Examples:
        >>> healthy = [{"step": n, "scale": 1.0, "steps": [{"applied": True}]} for n in range(9)]
        >>> from_records(healthy)
        []
    """
    rules: dict[int | None, RecordRules] = {}
    for record in records:
        rank = record.get("rank")
        if rank not in rules:
            rules[rank] = RecordRules(stuck_after=stuck_after)
        rules[rank].take(record)
    several = len(rules) > 1
    return merged(
        finding._replace(rank=rank if several else None)
        for rank, each in rules.items()
        for finding in each.findings()
    )


def up_to_date(
    findings: Iterable[Finding],
    records: Iterable[Mapping[str, Any]],
    *,
    stuck_after: int = STUCK_AFTER,
) -> list[Finding]:
    """Returns `findings` of a log with the evidence of all its "step" lines.

    In the log they have the evidence of the step at which they were first seen.
    """
    rules: dict[int | None, RecordRules] = {}
    latest: dict[Finding, Callable[[], str]] = {}
    for record in records:
        rank = record.get("rank")
        if rank not in rules:
            rules[rank] = RecordRules(stuck_after=stuck_after)
        for found in rules[rank].take(record):
            latest[_undated(found)] = rules[rank].evidence_of(found.kind)
    known = {key: evidence() for key, evidence in latest.items()}
    return [
        finding._replace(evidence=known.get(_undated(finding), finding.evidence))
        for finding in findings
    ]


def _undated(finding: Finding) -> Finding:
    """A finding without its step and rank."""
    return finding._replace(step=None, rank=None)


class RecordRules:
    """Looks at records one by one, and finds what is wrong with the run.

    A finding is made once, by the record that shows it; `findings()` has the numbers up to date.
    """

    def __init__(self, *, stuck_after: int = STUCK_AFTER) -> None:
        self._stuck_after = stuck_after
        self._found: dict[str, tuple[int, str, Callable[[], str]]] = {}
        """Step, place and evidence by the kind."""
        self._counts: dict[str, int] = defaultdict(int)
        """Skipped steps by their verdict."""
        self._falls: dict[Any, tuple[int, float, bool]] = {}
        """Of every optimizer, its overflows in a row, the scale of the first of them, and whether
        any left an infinity: NaN alone may have another cause, which the verdict knows later."""
        self._longest = (0, 0.0, 0.0)
        """The longest of these rows, with its first and last scale."""
        self._worked: dict[Any, float] = {}
        """Of every optimizer, the highest scale at which a step was applied."""
        self._begun: dict[Any, float] = {}
        """Of every optimizer, the scale of the first of the skipped steps in a row."""
        self._rows = 0
        """The most skipped steps in a row."""
        self._skips: deque[int] = deque()
        self._vanishing = 0
        self._scales: dict[int | str, float] = {}
        self._apart_since: int | None = None
        self._last = 0

    def findings(self) -> list[Finding]:
        """What was found so far."""
        return [self._made(kind) for kind in self._found]

    def take(self, record: Mapping[str, Any]) -> list[Finding]:
        """What `record`, the "step" line of a log, shows and no earlier one did."""
        before, number = len(self._found), int(record["step"])
        if number < self._last:  # the run went back to a checkpoint
            self._skips.clear()
            self._apart_since = None
        elif number > self._last + 1:  # steps in between were applied, and thinned out of the log
            self._falls.clear()
            self._begun.clear()
        self._last = number
        overflowed = False
        loss = record.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            self._take_loss(number, record)
        for step in record.get("steps", ()):
            if not step["applied"] and step.get("verdict") != "no gradients":
                overflowed |= self._take_skip(number, step)
            elif step["applied"]:
                self._take_applied(number, step)
        if overflowed:
            self._count_skip(number)
        if record.get("moves"):
            self._scales.update({loss_id: after for loss_id, _, after, *_ in record["moves"]})
        if len(self._scales) > 1:
            self._compare_scales(number)
        return [self._made(kind) for kind in list(self._found)[before:]]

    def evidence_of(self, kind: str) -> Callable[[], str]:
        """What returns the evidence of a finding of this kind, up to date."""
        return self._found[kind][2]

    def _made(self, kind: str) -> Finding:
        """The finding of a kind."""
        step, where, evidence = self._found[kind]
        return Finding.of(kind, evidence(), where, step=step)

    def _find(self, kind: str, step: int, evidence: Callable[[], str], where: str = "") -> None:
        """Notes a finding, unless there is one of its kind."""
        self._found.setdefault(kind, (step, where, evidence))

    def _take_loss(self, number: int, record: Mapping[str, Any]) -> None:
        """Looks at a loss that is not finite though the step was applied."""
        if any(step["applied"] for step in record.get("steps", ())):
            self._counts["applied"] += 1
            self._find("loss-not-finite", number, self._loss_evidence)

    def _loss_evidence(self) -> str:
        """How often steps were skipped or applied with such a loss."""
        skipped, applied = self._counts["loss not finite"], self._counts["applied"]
        parts = [self._times("loss not finite")] if skipped else []
        if applied:
            several = f"{applied} step{'s were' if applied > 1 else ' was'}"
            parts.append(f"{several} applied with such a loss, because gradients were finite.")
        return " ".join(parts)

    def _take_skip(self, number: int, step: Mapping[str, Any]) -> bool:
        """Looks at a step that was skipped; False if its cause is known not to be a high scale."""
        verdict = step.get("verdict", "")
        if not step.get("loss_finite", True):
            verdict = "loss not finite"
        self._counts[verdict] += 1
        worst = next(iter(step.get("culprits", ())), [""])[0]
        optimizer, scale = step.get("optimizer"), step.get("scale", math.nan)
        begun = self._begun.setdefault(optimizer, scale)
        if verdict == "loss not finite":
            self._find("loss-not-finite", number, self._loss_evidence)
        elif verdict == "NaN at any scale":
            # Of one step, this is a guess: while a scale that begins too high falls, gradients of
            # one part of a model can overflow to NaN alone, next to small ones of another part.
            worked = self._worked.get(optimizer, 0.0)
            if not (scale > worked and begun < math.ldexp(scale, LOWERED)):
                self._find("nan-at-any-scale", number, lambda: self._times(verdict), worst)
        elif verdict == "scale too low":
            self._find("scale-too-low", number, lambda: self._times(verdict))
        if verdict == "scale too high":
            row, first, infinite = self._falls.get(optimizer, (0, scale, False))
            culprits = step.get("culprits", ())
            infinite |= not culprits or any(infs != 0 for _, _, infs, _ in culprits)
            self._falls[optimizer] = row + 1, first, infinite
            self._longest = max(self._longest, (row + 1, first, scale), key=lambda fall: fall[0])
            if row + 1 >= FALL and infinite:
                self._find("scale-too-high", number, self._fall_evidence)
        else:
            self._falls.pop(optimizer, None)
        self._rows = max(self._rows, step.get("skipped_in_a_row", 0))
        if self._rows >= self._stuck_after:
            known = f"; the verdict for step {number} was {verdict!r}" if verdict else ""
            self._find("stuck", number, lambda: self._stuck_evidence() + known + ".", worst)
        return verdict not in ("loss not finite", "NaN at any scale", "scale too low")

    def _take_applied(self, number: int, step: Mapping[str, Any]) -> None:
        """Looks at a step that was applied."""
        optimizer = step.get("optimizer")
        self._falls.pop(optimizer, None)
        self._begun.pop(optimizer, None)
        worked = self._worked.get(optimizer, 0.0)
        self._worked[optimizer] = max(worked, step.get("scale", 0.0))
        self._take_room(number, step)

    def _times(self, verdict: str) -> str:
        """How often steps were skipped for one reason."""
        count = self._counts[verdict]
        return f"{count} {'step was' if count == 1 else 'steps were'} skipped ({verdict})."

    def _fall_evidence(self) -> str:
        row, first, last = self._longest
        return (
            f"{row} steps in a row were skipped because gradients overflowed, at scales from "
            f"{first:g} to {last:g}."
        )

    def _stuck_evidence(self) -> str:
        return f"{self._rows} steps in a row were skipped"

    def _count_skip(self, number: int) -> None:
        """Counts the overflows of late."""
        if number <= START:
            return
        self._skips.append(number)
        while self._skips[0] <= number - WINDOW:
            self._skips.popleft()
        if len(self._skips) >= OFTEN:
            text = f"{len(self._skips)} of {number - self._skips[0] + 1} steps were skipped."
            self._find("skips-too-often", number, lambda: text)

    def _take_room(self, number: int, step: Mapping[str, Any]) -> None:
        """Looks whether gradients vanish though there is room for a higher scale."""
        underflow, headroom = step.get("underflow"), step.get("headroom")
        if underflow is None or headroom is None:
            return
        wasted = headroom >= ROOM and underflow >= VANISHING
        self._vanishing = self._vanishing + 1 if wasted else 0
        if self._vanishing >= MEASURED:
            text = (
                f"{underflow:.0%} of the gradients underflow with {headroom:.1f} binades of "
                "headroom left."
            )
            self._find("scale-too-low", number, lambda: text)

    def _compare_scales(self, number: int) -> None:
        """Looks whether losses have had very different scales for long."""
        low = min(self._scales, key=self._scales.__getitem__)
        high = max(self._scales, key=self._scales.__getitem__)
        binades = math.log2(self._scales[high] / self._scales[low])
        if binades < APART:
            self._apart_since = None
            return
        if self._apart_since is None:
            self._apart_since = number
        if number - self._apart_since >= LASTING:
            text = (
                f"The scale of loss {low!r} is {self._scales[low]:g} and that of loss {high!r} "
                f"{self._scales[high]:g}, {binades:.0f} binades apart."
            )
            self._find("losses-unbalanced", number, lambda: text)
