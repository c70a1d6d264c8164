"""Planted illnesses: which finding each of them gives, in which module; and none in healthy runs.

    python benchmarks/illnesses.py            # all of them, in two minutes on a CPU
    python benchmarks/illnesses.py --write    # and the table into docs/measurements/illnesses.md

Every run is trained by the same few lines, `diagnose()` in _diagnosis.py: a scaler, a log and an
inspector.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import _healthy_runs as healthy
import _ill_runs as ill
import torch
from _diagnosis import Case, Verdict

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "illnesses.md"


ILL = [
    Case(
        "weights initialized a million times too large",
        "forward-overflow",
        "2",
        ill.bad_initialisation,
    ),
    Case("a logarithm of zero", "forward-overflow", "2", ill.log_of_zero),
    Case(
        "activations of 1e5 in one block",
        "forward-overflow",
        "blocks.1.widen",
        ill.large_activations,
    ),
    Case("NaN among the labels", "loss-not-finite", "", ill.nan_label),
    Case("zero_grad() forgotten", "gradients-not-cleared", "", ill.forgotten_zero_grad),
    Case("clipping before unscaling", "clip-before-unscale", "", ill.wrong_clip_order),
    Case("a scale too low for one head", "underflow", "small", ill.small_head),
    Case("an expert without tokens", "dead-gradient", "experts.2", ill.dead_expert),
    Case("Adam's eps in float16", "weights-not-finite", "0.weight", ill.eps_in_float16),
    Case("NaN in the data", "data-not-finite", "", ill.nan_in_data),
    Case("a row of attention that is masked as a whole", "forward-overflow", "mix", ill.masked_row),
    Case("division by a standard deviation of zero", "forward-overflow", "1", ill.zero_std),
    Case(
        "the gradient of a standard deviation of zero",
        "nan-at-any-scale",
        "1",
        ill.zero_std_backward,
    ),
    Case("the gradient of a root of zero", "nan-at-any-scale", "1", ill.root_of_zero),
    Case("an exploding learning rate", "forward-overflow", "0", ill.exploding_learning_rate),
    Case("a scale fixed too high", "scale-too-high", "", ill.scale_too_high),
    Case("a gradient penalty that overflows", "loss-not-finite", "", ill.penalty_overflow),
    Case("a head that the loss does not use", "dead-gradient", "small", ill.unused_parameter),
    Case("a branch that is detached", "dead-gradient", "branch", ill.detached_branch),
    Case(
        "float16 weights and small steps",
        "update-lost",
        "",
        lambda: ill.half_weights(torch.float16, 1e-5),
    ),
    Case(
        "bfloat16 weights and small steps",
        "update-lost",
        "",
        lambda: ill.half_weights(torch.bfloat16, 1e-4),
    ),
    Case("a loss summed in float16", "loss-not-finite", "", ill.sum_in_float16),
    Case(
        "exp() of large numbers in a softmax by hand", "forward-overflow", "1", ill.softmax_by_hand
    ),
    Case("losses of very different size", "losses-unbalanced", "", ill.unbalanced_losses),
    Case("float16 without a scale", "underflow", "", ill.no_scale),
    Case("a layer whose ReLU never fires", "dead-gradient", "2", ill.dead_relu),
    Case("a sum over 4,096 tokens in float16", "forward-overflow", "pool", ill.sum_pooling),
    Case("a residual stream that grows", "forward-overflow", "blocks.5", ill.growing_residuals),
    Case("a checkpoint with a NaN", "weights-not-finite", "2.weight", ill.bad_checkpoint),
]
HEALTHY = [
    Case("MLP, torch's loop", "", "", healthy.mlp),
    Case("CNN with batch norm", "", "", healthy.cnn),
    Case("GPT, gradients clipped", "", "", healthy.gpt),
    Case("LSTM", "", "", healthy.lstm),
    Case("GAN, two updates", "", "", healthy.gan),
    Case("GAN, one update, the critic's pass goes through the generator", "", "", healthy.gan_once),
    Case("GPT with LoRA", "", "", healthy.lora),
    Case("an expert that gets tokens in every fourth step", "", "", healthy.rare_expert),
    Case("stochastic depth", "", "", healthy.stochastic_depth),
    Case("distillation of a fixed network", "", "", healthy.fixed_target),
    Case("masked scores, and a scale that begins too high", "", "", healthy.masked_scores),
    Case("bfloat16 weights, learning rate 0 at first", "", "", healthy.warm_up),
]


def judge(case: Case) -> Verdict:
    """Trains, always from the same seed."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an ill run also warns
        return Verdict(case, case.train())


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """The lines of the table in docs/measurements/illnesses.md."""
    lines = ["| run | finding | where | also found |", "|---|---|---|---|"]
    for case, findings in verdicts:
        right = [f for f in findings if (f.kind, f.where) == (case.kind, case.where)]
        kind, where = (right[0].kind, right[0].where) if right else ("", "")
        others = [f"{f.kind} {f'`{f.where}`' if f.where else ''}".strip() for f in findings]
        others = [each for each in others if each != f"{kind} `{where}`" and each != kind]
        shown = f"`{where}`" if where else "the run" if right else ""
        lines.append(f"| {case.name} | {kind or 'none'} | {shown} | {', '.join(others)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all cases and prints the table; exits with 1 if a finding is wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the table into the documentation page"
    )
    parser.add_argument("--only", help="only cases whose names contain this")
    options = parser.parse_args(arguments)
    chosen = [c for c in [*ILL, *HEALTHY] if options.only is None or options.only in c.name]
    verdicts = []
    for case in chosen:
        start = time.perf_counter()
        verdicts.append(judge(case))
        fine = "right" if verdicts[-1].right() else "WRONG"
        print(f"{fine}  {case.name}  ({time.perf_counter() - start:.1f} s)", flush=True)
        if options.only is not None or fine == "WRONG":
            for finding in verdicts[-1].findings:
                print(f"    {finding}")
    lines = table(verdicts)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        begin, end = page.index("| run |"), page.rindex("|\n") + 2
        PAGE.write_text(page[:begin] + "\n".join(lines) + "\n" + page[end:], encoding="utf-8")
    right = sum(verdict.right() for verdict in verdicts)
    print(f"{right} of {len(verdicts)} right")
    if right < len(verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
