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

import _ill_runs as ill
import _patients as models
import torch
from _diagnosis import EVERY, STEPS, Case, Verdict, diagnose, torchs_loop
from torch import Tensor, nn
from torch.nn import functional

from gradscale.monitor.findings import Finding
from gradscale.torch import GradScaler, Inspector

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "illnesses.md"


# Healthy runs.


def healthy_mlp() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model), step=torchs_loop)


def healthy_cnn() -> list[Finding]:
    model = models.cnn()
    return diagnose(model, models.images(model))


def healthy_gpt() -> list[Finding]:
    model = models.gpt()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return diagnose(model, models.text(model), step=step)


def healthy_lstm() -> list[Finding]:
    model = models.Recurrent()
    return diagnose(model, models.sequences(model))


def healthy_gan() -> list[Finding]:
    """Two networks that take turns, each with an inspector, one scaler and two updates."""
    generator, critic = models.mlp(), models.mlp(inputs=1)
    pair = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in (generator, critic)]
    scaler = GradScaler("cpu")
    inspectors = [Inspector(m, scaler, every=EVERY) for m in (generator, critic)]
    for number in range(STEPS):
        x, real = models.batch(number)
        for turn in (1, 0):
            pair[turn].zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                fake = generator(x)
                if turn:
                    gain = critic(real).float().mean() - critic(fake.detach()).float().mean()
                    loss = functional.softplus(-gain)
                else:
                    loss = functional.softplus(-critic(fake).float()).mean()
            scaler.scale(loss).backward()
            scaler.step(pair[turn])
            scaler.update()
    return [finding for inspector in inspectors for finding in inspector.findings()]


def healthy_lora() -> list[Finding]:
    model = models.lora(models.gpt())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return diagnose(model, models.text(model), optimizer=optimizer)


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
    Case("MLP, torch's loop", "", "", healthy_mlp),
    Case("CNN with batch norm", "", "", healthy_cnn),
    Case("GPT, gradients clipped", "", "", healthy_gpt),
    Case("LSTM", "", "", healthy_lstm),
    Case("GAN, two updates", "", "", healthy_gan),
    Case("GPT with LoRA", "", "", healthy_lora),
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
