"""Planted illnesses: which finding each of them gives, in which module; and none in healthy runs.

    python benchmarks/illnesses.py            # all of them, as the table of docs/illnesses.md
    python benchmarks/illnesses.py --write    # and into that page

Every run is trained by the same few lines, `diagnose()`: a scaler, a log and an inspector.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _patients as models
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscale.monitor.findings import Finding
from gradscale.policy import Dynamic, Static
from gradscale.torch import GradScaler, Inspector

PAGE = Path(__file__).parents[1] / "docs" / "illnesses.md"
STEPS, EVERY = 60, 4

LossOf = Callable[[int], Tensor]
"""The loss of the step of this number."""
Step = Callable[[GradScaler, torch.optim.Optimizer, Tensor], None]
"""Everything in an iteration after the loss."""


class Case(NamedTuple):
    """A run, and what must be found."""

    name: str
    kind: str
    """The kind of finding; "" for a healthy run."""
    where: str
    """The module or parameter."""
    train: Callable[[], list[Finding]]


class Verdict(NamedTuple):
    """What was found in a run."""

    case: Case
    findings: list[Finding]

    def right(self) -> bool:
        """Whether the illness is among the findings; of a healthy run, whether there are none."""
        if not self.case.kind:
            return not self.findings
        return (self.case.kind, self.case.where) in [(f.kind, f.where) for f in self.findings]

    def first(self) -> bool:
        """Whether it is the first of them."""
        return self.right() and (not self.findings or self.findings[0].kind == self.case.kind)


def two_calls(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """The scaler's own loop."""
    scaler.backward(loss)
    scaler.apply(optimizer)


def torchs_loop(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """torch's loop."""
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def diagnose(
    model: nn.Module,
    loss_of: LossOf,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    step: Step = two_calls,
    autocast: bool = True,
    steps: int = STEPS,
    every: int = EVERY,
) -> list[Finding]:
    """Trains a model, and returns what the log and the inspector found, in that order."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if scaler is None:
        scaler = GradScaler("cpu", on_stuck="ignore")
    scaler.name(model)
    lines: list[dict[str, Any]] = []
    scaler.log_to(lines.append)
    inspector = Inspector(model, scaler, every=every)
    cast = torch.autocast("cpu", dtype=torch.float16, enabled=autocast)
    for number in range(steps):
        with cast:
            loss = loss_of(number)
        step(scaler, optimizer, loss)
    if autocast and not loss.dim() and bool(loss.isfinite()):
        inspector.replay(lambda: loss_of(steps))
    inspector.close()
    scaler.flush()
    logged = [line["finding"] for line in lines if line["kind"] == "finding"]
    found = [Finding.from_dict(fields) for fields in logged]
    # The log has a finding from when it was first seen; the inspector has the last word on its own.
    last = inspector.findings()
    own = {(f.kind, f.where) for f in last}
    records = [f for f in found if f.kind in RECORDS and (f.kind, f.where) not in own]
    return [*last, *records]


RECORDS = {"losses-unbalanced", "stuck", "skips-too-often", "scale-too-low"}
"""Kinds that only the records of steps show."""


# Ill runs.


def bad_initialisation() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    return diagnose(model, models.regression(model))


def log_of_zero() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), models.Log(), nn.Linear(16, 1))
    return diagnose(model, models.regression(model))


def large_activations() -> list[Finding]:
    model = models.gpt()
    with torch.no_grad():
        model.blocks[1].widen.bias.add_(1e5)
    return diagnose(model, models.text(model))


def nan_label() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model, target=lambda y: y.index_fill(0, FIRST, NAN)))


def forgotten_zero_grad() -> list[Finding]:
    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = models.mlp()
    return diagnose(model, models.regression(model), step=step)


def wrong_clip_order() -> list[Finding]:
    model = models.mlp()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return diagnose(model, models.regression(model), step=step)


def small_head() -> list[Finding]:
    model = models.Heads()
    return diagnose(model, models.heads(model, weight=1e-9))


def dead_expert() -> list[Finding]:
    model = models.Experts(dead=2)
    return diagnose(model, models.regression(model))


def eps_in_float16() -> list[Finding]:
    model = models.mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        # Unscaled gradients of 1e-5, whose squares float16 does not have.
        return 1e-3 * functional.mse_loss(model(x.half()).float(), y)

    # The scaler refuses such an optimizer, so this loop has none.
    inspector = Inspector(model, every=EVERY)
    for number in range(STEPS):
        loss_of(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        inspector.step()
    inspector.close()
    return inspector.findings()


def nan_in_data() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model, given=lambda x: x.index_fill(0, FIRST, NAN)))


def masked_row() -> list[Finding]:
    model = models.Attention(masked=True)
    return diagnose(model, models.sequences(model))


def zero_std() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Standardize(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    return diagnose(model, models.regression(model))


def zero_std_backward() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Standardize(eps=1e-3), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(0.5)
    return diagnose(model, models.regression(model))


def root_of_zero() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Root(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 0.0
    return diagnose(model, models.regression(model))


def exploding_learning_rate() -> list[Finding]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    return diagnose(model, models.regression(model), optimizer=optimizer)


def scale_too_high() -> list[Finding]:
    model = models.mlp()
    scaler = GradScaler("cpu", policy=Static(init_scale=2.0**24), on_stuck="ignore")
    return diagnose(model, models.regression(model), scaler=scaler)


def penalty_overflow() -> list[Finding]:
    model = models.mlp()

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        x.requires_grad_()
        out = model(x)
        # The mistake: a scale by hand, and a square in float16.
        (grad,) = torch.autograd.grad(2.0**12 * out.float().sum(), x, create_graph=True)
        return functional.mse_loss(out.float(), y) + grad.half().square().sum()

    return diagnose(model, loss_of)


def unused_parameter() -> list[Finding]:
    model = models.Heads()
    return diagnose(model, models.heads(model, unused=True))


def detached_branch() -> list[Finding]:
    model = models.Branches(detached=True)
    return diagnose(model, models.regression(model))


def half_weights(dtype: torch.dtype, lr: float) -> list[Finding]:
    model = models.mlp(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        return functional.mse_loss(model(x.to(dtype)).float(), y)

    return diagnose(model, loss_of, optimizer=optimizer, autocast=False)


def sum_in_float16() -> list[Finding]:
    model = models.mlp(outputs=512)

    def loss_of(number: int) -> Tensor:
        x, _ = models.batch(number)
        return (model(x).half() - 3.0).square().half().sum(dtype=torch.float16)

    return diagnose(model, loss_of)


def softmax_by_hand() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Softmax(factor=20.0), nn.Linear(16, 1))
    return diagnose(model, models.regression(model))


def unbalanced_losses() -> list[Finding]:
    model = models.Heads()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        large, small = loss.unbind()
        scaler.backward(large, retain_graph=True)
        scaler.backward(small, loss_id="small")
        scaler.apply(optimizer)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        first, second = model(x)
        both = functional.mse_loss(first.float(), y), functional.mse_loss(second.float(), y)
        return torch.stack([1e4 * both[0], 1e-6 * both[1]])

    policy = Dynamic(init_scale=2.0**8, growth_interval=5)
    scaler = GradScaler("cpu", policy=policy, on_stuck="ignore")
    return diagnose(model, loss_of, scaler=scaler, step=step, steps=260, every=40)


def no_scale() -> list[Finding]:
    model = models.mlp(width=128)
    scaler = GradScaler("cpu", policy=Static(init_scale=1.0))
    loss = models.regression(model)
    return diagnose(model, lambda number: 1e-4 * loss(number), scaler=scaler)


def dead_relu() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].bias.fill_(-1e3)
    return diagnose(model, models.regression(model))


def sum_pooling() -> list[Finding]:
    model = models.Pooled(tokens=4096, size=32.0)
    return diagnose(model, models.sequences(model, tokens=4096), steps=20)


def growing_residuals() -> list[Finding]:
    model = models.Residuals(blocks=8, factor=6.0)
    return diagnose(model, models.regression(model))


def bad_checkpoint() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].weight[3, 4] = NAN
    return diagnose(model, models.regression(model))


FIRST, NAN = torch.zeros(1, dtype=torch.long), math.nan


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
        "weights initialised a million times too large", "forward-overflow", "2", bad_initialisation
    ),
    Case("a logarithm of zero", "forward-overflow", "2", log_of_zero),
    Case(
        "activations of 1e5 in one block", "forward-overflow", "blocks.1.widen", large_activations
    ),
    Case("NaN among the labels", "loss-not-finite", "", nan_label),
    Case("zero_grad() forgotten", "gradients-not-cleared", "", forgotten_zero_grad),
    Case("clipping before unscaling", "clip-before-unscale", "", wrong_clip_order),
    Case("a scale too low for one head", "underflow", "small", small_head),
    Case("an expert without tokens", "dead-gradient", "experts.2", dead_expert),
    Case("Adam's eps in float16", "weights-not-finite", "0.weight", eps_in_float16),
    Case("NaN in the data", "data-not-finite", "", nan_in_data),
    Case("a row of attention that is masked as a whole", "forward-overflow", "mix", masked_row),
    Case("division by a standard deviation of zero", "forward-overflow", "1", zero_std),
    Case(
        "the gradient of a standard deviation of zero", "nan-at-any-scale", "1", zero_std_backward
    ),
    Case("the gradient of a root of zero", "nan-at-any-scale", "1", root_of_zero),
    Case("an exploding learning rate", "forward-overflow", "0", exploding_learning_rate),
    Case("a scale fixed too high", "scale-too-high", "", scale_too_high),
    Case("a gradient penalty that overflows", "loss-not-finite", "", penalty_overflow),
    Case("a head that the loss does not use", "dead-gradient", "small", unused_parameter),
    Case("a branch that is detached", "dead-gradient", "branch", detached_branch),
    Case(
        "float16 weights and small steps",
        "update-lost",
        "",
        lambda: half_weights(torch.float16, 1e-5),
    ),
    Case(
        "bfloat16 weights and small steps",
        "update-lost",
        "",
        lambda: half_weights(torch.bfloat16, 1e-4),
    ),
    Case("a loss summed in float16", "loss-not-finite", "", sum_in_float16),
    Case("exp() of large numbers in a softmax by hand", "forward-overflow", "1", softmax_by_hand),
    Case("losses of very different size", "losses-unbalanced", "", unbalanced_losses),
    Case("float16 without a scale", "underflow", "", no_scale),
    Case("a layer whose ReLU never fires", "dead-gradient", "2", dead_relu),
    Case("a sum over 4,096 tokens in float16", "forward-overflow", "pool", sum_pooling),
    Case("a residual stream that grows", "forward-overflow", "blocks.5", growing_residuals),
    Case("a checkpoint with a NaN", "weights-not-finite", "2.weight", bad_checkpoint),
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
    """The lines of the table in docs/illnesses.md."""
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
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    parser.add_argument("--only", help="a part of the names of cases")
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
