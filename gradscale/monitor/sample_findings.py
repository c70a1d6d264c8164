"""What samples of a model show to be wrong.

A healthy run has no findings, so every rule asks for more than noise can give: what can happen once
in a good run has to be seen again, and thresholds lie far from what good runs show. The numbers in
the comments are those of the healthy runs in benchmarks/illnesses.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradscale.formats import format_named
from gradscale.monitor.diagnosis import DISTANT
from gradscale.monitor.findings import KINDS, Finding
from gradscale.monitor.samples import (
    ACTIVATION,
    ACTIVATION_GRAD,
    WEIGHT_GRAD,
    Sample,
    TensorSample,
)

SUBNORMAL = 0.5
"""Share of subnormal gradients, in every second sample, that is an underflow: with the median below
the smallest normal number, the smaller half has lost bits, and its tail is zero. Healthy: < 0.2."""
FLUSHED = 0.25
"""Share of the gradients that a replay shows to be flushed. Healthy: < 0.05."""
NEGLIGIBLE = 0.01
"""Share of the sum of magnitudes below which small gradients of outputs may be lost: a softmax
gives most classes next to none, and a GELU most of its inputs. Healthy: < 0.002, planted: 1."""
ENOUGH = 64
"""Nonzero elements below which shares say nothing."""
DEAD_SAMPLES = 3
"""Samples without a gradient that make a parameter dead: the first factor of LoRA has none in the
first step, because the second is zero, and an expert may have no tokens in one batch."""
DEAD_STEPS = 20
"""Steps from the first to the last of them: with stochastic depth, a layer may be left out of every
second step. What changed between samples is no dead parameter."""
LOST = 0.5
"""Share of 16-bit weights that a step left as they were. Healthy: no 16-bit weights without
masters, or steps larger than half of their last bit: < 0.3."""
STUCK_SAMPLES = 5
"""Samples in a row in which gradients are not finite. A scale that moves needs a few to fall."""
LEAST_SCALE, MOST_NORM, ROUND = 256.0, 1000.0, 1e-4
"""A norm of scaled gradients at or below `MOST_NORM`, with two digits to a relative precision of
`ROUND`, was given to a clipping function, unless the norm of the unscaled ones has two digits as
well: then that was, which is the right order."""
MOST_NAMED = 8
"""Findings of one kind; more are one of the whole model."""


def from_samples(samples: Sequence[Sample]) -> list[Finding]:
    """The findings, those that explain others first; none in a healthy run."""
    runs = [sample for sample in samples if not _is_replay(sample)]
    replays = [sample for sample in samples if _is_replay(sample)]
    found = [*_data(runs), *_weights(runs), *_forward(runs), *_backward(runs)]
    vanished = list(_underflow(runs, replays))
    if not any(finding.where == "" for finding in vanished):  # else it has been said
        vanished += _nothing(runs, replays)
    # Without a replay, zeros next to what underflows may be underflow as well.
    unclear = bool(vanished) and not replays
    found += [*vanished, *_dead(runs, replays, unclear), *_lost(runs)]
    return [*found, *_leftover(runs), *_clipped(runs)]


def _is_replay(sample: Sample) -> bool:
    """Whether it is a sample of a replay: nothing was stepped."""
    return any(tensor.flushed is not None for tensor in sample.tensors)


def _data(runs: Sequence[Sample]) -> Iterable[Finding]:
    """Inputs of the model that are not finite, and that have harmed a gradient or an output."""
    bad = [s for s in runs if s.fact("data_nonfinite") and s.first_nonfinite is not None]
    if bad:
        seen = f"In {len(bad)} of {len(runs)} samples the inputs of the model were not "
        yield Finding.of("data-not-finite", f"{seen}finite.", step=bad[0].step)


def _weights(runs: Sequence[Sample]) -> Iterable[Finding]:
    """Weights that are not finite: the first sample has those that were so first."""
    for sample in runs:
        names = list(sample.fact("weights_nonfinite"))
        if names:
            more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
            text = f"After step {sample.step}, weights of {names[0]}{more} are not finite."
            yield Finding.of("weights-not-finite", text, names[0], step=sample.step)
            return


def _forward(runs: Sequence[Sample]) -> Iterable[Finding]:
    """The first modules whose outputs are not finite though inputs and weights are."""
    seen: set[str] = set()
    for sample in runs:
        first = sample.first_nonfinite
        if first is None or first[1] != "forward" or first[0] in seen:
            continue
        if sample.fact("data_nonfinite") or sample.fact("weights_spoilt"):
            continue
        seen.add(first[0])
        where, _, low, high = first
        text = "Its outputs are the first that are not finite"
        remedy = KINDS["forward-overflow"]
        if not math.isnan(low):
            text += f"; its inputs lie between {low:.4g} and {high:.4g}"
            large = sample.fact("weights_large")
            mine = [size for name, size in large.items() if _in(name, where)]
            if mine:
                text += f", and its weights reach {max(mine):.4g}"
                remedy = (
                    "Lower the learning rate, or initialise the weights with smaller values. "
                    f"{remedy}"
                )
            elif max(abs(low), abs(high)) < 16:
                # exp() of less than 11 fits into float16, and so do sums of thousands of these.
                remedy = (
                    "Look for a division by zero, a logarithm of zero or a row that is masked "
                    f"completely. If there is none: {remedy}"
                )
        yield Finding("forward-overflow", where or "", f"{text}.", remedy, sample.step)


def _backward(runs: Sequence[Sample]) -> Iterable[Finding]:
    """Where gradients are not finite, sample after sample, though the forward pass is."""
    last = runs[-STUCK_SAMPLES:]
    firsts = [sample.first_nonfinite for sample in last]
    if len(last) < STUCK_SAMPLES or any(f is None or f[1] != "backward" for f in firsts):
        return
    where = max((f[0] for f in firsts if f), key=[f[0] for f in firsts if f].count)
    grads = [t for sample in last for t in sample.tensors if t.kind != ACTIVATION]
    infs, nans = sum(t.infs for t in grads), sum(t.nans for t in grads)
    scales = [sample.fact("scale").get("", 1.0) for sample in last]
    text = (
        f"In the last {len(last)} samples, at scales from {min(scales):g} to {max(scales):g}, "
        f"{infs} gradients were infinite and {nans} were NaN. "
    )
    step = last[0].step
    if all(sample.fact("loss_finite").get("") == 0.0 for sample in last):
        text = (
            f"In the last {len(last)} samples the loss was not finite, but all values in the model "
            "were finite. Check the computation of the loss from the outputs of the model, the "
            "targets, and the format of the loss."
        )
        yield Finding.of("loss-not-finite", text, step=step)
        return
    text += (
        "The first of them were those "
        f"{'that this module computes' if where else 'of the outputs'}."
    )
    most = math.ldexp(format_named(last[-1].format).max, -DISTANT)
    given = [max(abs(f[2]), abs(f[3])) for f in firsts if f]
    far = bool(where) and all(each < most for each in given)  # false if one is NaN
    kind = "nan-at-any-scale" if far or not infs else "scale-too-high"
    yield Finding.of(kind, text, where, step=step)


def _underflow(runs: Sequence[Sample], replays: Sequence[Sample]) -> Iterable[Finding]:
    """Modules whose gradients are too small for the format at this scale."""
    # While steps are skipped the scale falls, and what underflows then is not what is wrong.
    runs = [sample for sample in runs if sample.fact("applied").get("", 1.0)]
    shares: dict[str, float] = {}
    texts: dict[str, str] = {}
    modules: set[str] = set()
    for sample in replays[-1:]:
        for tensor in _grads(sample):
            modules.add(_module(tensor))
            share = tensor.underflow() or 0.0
            enough = (tensor.flushed or 0) + tensor.nonzero() >= ENOUGH
            if share > FLUSHED and enough and _matters(sample, tensor):
                if share > shares.get(_module(tensor), 0.0):
                    shares[_module(tensor)] = share
                    texts[_module(tensor)] = (
                        f"{100 * share:.0f} % of the {_what(tensor)} that are not zero in float32 "
                        f"are zero in {sample.format} at scale {tensor.scale:g}."
                    )
    times: dict[str, int] = {}
    for sample in runs:
        for module in {_module(t) for t in _grads(sample) if _is_subnormal(sample, t)}:
            times[module] = times.get(module, 0) + 1
    for tensor in _grads(runs[-1]) if runs else ():
        module = _module(tensor)
        modules.add(module)
        often = times.get(module, 0)
        if _is_subnormal(runs[-1], tensor) and often > 1 and often * 2 >= len(runs):
            share = tensor.subnormal(runs[-1].format_of(tensor))
            shares.setdefault(module, share)
            texts.setdefault(
                module,
                f"{100 * share:.0f} % of the nonzero {_what(tensor)} are subnormal in "
                f"{runs[-1].format} at scale {tensor.scale:g}, in {often} of {len(runs)} samples.",
            )
    last = (runs or replays)[-1:]
    step = last[0].step if last else None
    grouped: dict[str, str] = {}
    for module in sorted(texts, key=lambda each: -shares[each]):
        where = _outermost(module, list(texts), modules)
        text = texts[module] if where == module else f"In {module}: {texts[module]}"
        grouped.setdefault(where, text)
        shares.setdefault(where, shares[module])
    total = len({_outermost(module, list(texts), modules) for module in modules})
    yield from _named("underflow", grouped, shares, total, step)


def _is_subnormal(sample: Sample, tensor: TensorSample) -> bool:
    """Whether more than half of a gradient is subnormal."""
    format = sample.format_of(tensor)
    if tensor.nonzero() < ENOUGH or tensor.below(format.smallest_subnormal):
        return False  # smaller than the format has: a sum in float32 of what the format has lost
    return tensor.subnormal(format) > SUBNORMAL and _matters(sample, tensor)


def _matters(sample: Sample, tensor: TensorSample) -> bool:
    """Whether what underflows is a part of the gradient that is worth having."""
    if tensor.kind == WEIGHT_GRAD:
        return True  # Adam gives every weight a step of the same size
    return tensor.small_part(sample.format_of(tensor)) >= NEGLIGIBLE


def _nothing(runs: Sequence[Sample], replays: Sequence[Sample]) -> Iterable[Finding]:
    """A model in which every gradient of a weight was zero, from the first sample on."""
    grads = [tensor for sample in runs for tensor in sample.of(WEIGHT_GRAD)]
    # A loss that is not finite can have gradients of zero, as a mean over no label has.
    fine = [sample for sample in runs if sample.fact("loss_finite").get("", 1.0)]
    seen = [sample for sample in fine if sample.of(WEIGHT_GRAD)]
    if len(seen) < DEAD_SAMPLES or any(tensor.zeros < tensor.numel for tensor in grads):
        return
    scales = [sample.fact("scale").get("", 1.0) for sample in seen]
    text = (
        f"All gradients of weights were zero in all of {len(seen)} samples, at scales from "
        f"{min(scales):g} to {max(scales):g}."
    )
    kind = "dead-gradient" if _is_cut_off(seen[-1], replays) else "underflow"
    yield Finding.of(kind, text, step=seen[0].step)


def _is_cut_off(sample: Sample, replays: Sequence[Sample]) -> bool:
    """Whether weights have gradients of zero for another reason than underflow.

    So it is if float32 has the same zeros. Without a replay: if what the modules of the weights
    return has gradients that fit the format.
    """
    if sample.format == "float32":
        return True
    if replays:
        return not any(tensor.flushed for tensor in replays[-1].of(WEIGHT_GRAD))
    owners = {_module(tensor) for tensor in sample.of(WEIGHT_GRAD)}
    return any(
        tensor.counts and tensor.subnormal(sample.format_of(tensor)) <= SUBNORMAL
        for tensor in sample.of(ACTIVATION_GRAD)
        if tensor.name in owners
    )


def _dead(runs: Sequence[Sample], replays: Sequence[Sample], unclear: bool) -> Iterable[Finding]:
    """Parameters that never had a gradient other than zero, though others had.

    Args:
        runs: The samples of the run.
        replays: Those of replays.
        unclear: Whether zeros may have another cause; then only a gradient that is missing counts.
    """
    applied = [sample for sample in runs if sample.fact("applied").get("", 1.0)]
    trained = [s for s in applied if any(t.counts for t in s.of(WEIGHT_GRAD))]
    if len(trained) < DEAD_SAMPLES or trained[-1].step - trained[0].step < DEAD_STEPS:
        return
    alive: set[str] = set()
    known: dict[str, None] = {}
    for sample in trained:
        for tensor in sample.of(WEIGHT_GRAD):
            known.setdefault(tensor.name)
            if tensor.zeros < tensor.numel:
                alive.add(tensor.name)
        for name in sample.fact("no_grad"):
            known.setdefault(name)
        alive.update(sample.fact("trained_between"))  # in iterations that were not sampled
    lost = {t.name for s in replays for t in s.of(WEIGHT_GRAD) if t.flushed}  # see _underflow
    dead = [name for name in known if name not in alive | lost]
    texts: dict[str, str] = {}
    for name in dead:
        where = _outermost(name, dead, known)
        all_none = all(n in s.fact("no_grad") for s in trained for n in dead if _in(n, where))
        if not all_none and (unclear or where == name):
            continue  # a bias that cancels, as in the difference of two outputs
        what = "no gradient" if all_none else "no nonzero gradient"
        texts.setdefault(where, f"It had {what} in any of {len(trained)} samples.")
    yield from _named("dead-gradient", texts, {}, len(known), trained[0].step)


def _outermost(name: str, dead: Sequence[str], known: Iterable[str]) -> str:
    """The outermost module of which all that is `known` is `dead`; else `name`."""
    best = name
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        inside = [each for each in known if _in(each, module)]
        if not all(each in dead for each in inside):
            break
        best = module
    return best


def _in(name: str, module: str) -> bool:
    """Whether `name` is, or is part of, `module`."""
    return name == module or name.startswith(f"{module}.")


def _lost(runs: Sequence[Sample]) -> Iterable[Finding]:
    """16-bit weights that steps do not change."""
    stepped = [s for s in runs if s.fact("applied").get("", 1.0) and s.fact("update_lost")]
    if len(stepped) < 2:
        return
    last = stepped[-1]
    shares = {}
    for name, share in last.fact("update_lost").items():
        often = sum(s.fact("update_lost").get(name, 0.0) > LOST for s in stepped)
        if share > LOST and often > 1 and often * 2 >= len(stepped):
            shares[name] = share
    texts = {
        name: f"The step did not change {100 * share:.0f} % of its weights, because the change is "
        "smaller than half of their last bit."
        for name, share in shares.items()
    }
    yield from _named("update-lost", texts, shares, len(last.fact("update_lost")), last.step)


def _leftover(runs: Sequence[Sample]) -> Iterable[Finding]:
    """Gradients that a step has used and that the next one uses again."""
    seen = [sample for sample in runs if sample.fact("leftover")]
    if len(seen) < 2 or len(seen) * 2 < len(runs) - 1:
        return
    left = seen[-1].fact("leftover")
    name = max(left, key=lambda each: left[each])
    text = (
        f"In {len(seen)} of {len(runs)} samples the backward pass added to gradients that a step "
        f"had already used: those of {len(left)} parameters, the largest {left[name]:.3g} in "
        f"{name}."
    )
    yield Finding.of("gradients-not-cleared", text, step=seen[0].step)


def _clipped(runs: Sequence[Sample]) -> Iterable[Finding]:
    """Gradients whose norm was limited while they were scaled."""
    seen = [(s, s.fact("norm_used").get("", 0.0)) for s in runs if _was_clipped(s)]
    if len(seen) < 2:
        return
    first, norm = seen[0]
    same = [s for s, each in seen if abs(each - norm) <= ROUND * norm]
    if len(same) < 2 or len(same) * 2 < len(runs) - 1:
        return
    made, scale = first.fact("norm_made")[""], first.fact("scale")[""]
    text = (
        f"The norm of the scaled gradients was {made:.4g} after the backward pass and {norm:.4g} "
        f"in the step, at scale {scale:g}. Without the scale, the latter is {norm / scale:.3g}."
    )
    yield Finding.of("clip-before-unscale", text, step=first.step)


def _was_clipped(sample: Sample) -> bool:
    """Whether the norm of its scaled gradients was limited to a round number."""
    made, used = sample.fact("norm_made").get("", 0.0), sample.fact("norm_used").get("", 0.0)
    if not 0.0 < used <= min(0.999 * made, MOST_NORM) or math.isinf(made):
        return False
    scale = sample.fact("scale").get("", 1.0)
    return scale >= LEAST_SCALE and _is_round(used) and not _is_round(used / scale)


def _is_round(number: float) -> bool:
    """Whether it has two digits, but for rounding."""
    return abs(float(f"{number:.1e}") - number) <= ROUND * number


def _grads(sample: Sample) -> list[TensorSample]:
    """The gradients of a sample that were computed in a 16-bit format."""
    grads = [tensor for tensor in sample.tensors if tensor.kind != ACTIVATION]
    return [tensor for tensor in grads if sample.format_of(tensor).name != "float32"]


def _module(tensor: TensorSample) -> str:
    """The module of a gradient."""
    weight = tensor.kind == WEIGHT_GRAD
    return tensor.name.rpartition(".")[0] if weight else tensor.name


def _what(tensor: TensorSample) -> str:
    """What a tensor holds, in words."""
    return f"gradients of {tensor.name}" if tensor.kind == WEIGHT_GRAD else "gradients of outputs"


def _named(
    kind: str, texts: dict[str, str], shares: dict[str, float], total: int, step: int | None
) -> Iterable[Finding]:
    """A finding for each place; one for the whole model if most of it is concerned.

    Args:
        texts: The evidence by place.
        shares: How bad it is there.
        total: How many places there are.
    """
    worst = sorted(texts, key=lambda where: -shares.get(where, 0.0))
    if len(texts) > MOST_NAMED or (len(texts) > 2 and len(texts) * 3 > total * 2):
        more = (
            f"{len(texts)} of {total} modules or parameters; the worst is {worst[0]}: "
            f"{texts[worst[0]]}"
        )
        yield Finding.of(kind, more, step=step)
        return
    for where in worst:
        yield Finding.of(kind, texts[where], where, step=step)
