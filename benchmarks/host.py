"""What a step takes of the host on the CPU, where gradients are so small that nothing else counts.

Ratios of processor time, the smaller the better, for 10 to 5,000 tensors of four elements:

    drop-in         torch's loop with our scaler, against torch's scaler; fused AdamW
    drop-in, clip   the same with unscale_() and torch's clip_grad_norm_()
    apply           backward() and apply(clip_norm=...), against torch's loop with clipping
    own AdamW       the same with gradscale.torch.optim.AdamW
    skipped         the drop-in loop with an infinite gradient, against the same with finite ones
    fp16-master     mp.step(clip_norm=...) with masters, against "fp32"; own AdamW

What is compared takes turns in one process, on one thread: the machine is as slow for one as it is
for the other. A ratio is that of the lower quartiles, because others only ever add to a time.
Gradients are copied outside of what is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _rows
import torch
from torch import nn

from gradscale import Static
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.optim import AdamW

SIZES = (10, 100, 1000, 5000)
WIDTH = 4
LIMIT = 1e9
"""A norm that is never reached."""
AGAINST = {
    "drop-in": "torch",
    "drop-in, clip": "torch, clip",
    "apply": "torch, clip",
    "own AdamW": "torch, clip",
    "skipped": "drop-in",
    "fp16-master": "fp32",
}
"""What each case is compared with."""
CASES = tuple(dict.fromkeys(name for pair in AGAINST.items() for name in pair))


class Weights(nn.Module):
    """So many parameters, and nothing else."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(WIDTH) for _ in range(tensors)])


class Case:
    """One way to step, with parameters and gradients of its own."""

    def __init__(self, name: str, tensors: int) -> None:
        self.name = name
        self.model = Weights(tensors)
        self.params = list(self.model.parameters())
        own = name in ("own AdamW", "fp16-master", "fp32")
        fused = AdamW(self.params) if own else torch.optim.AdamW(self.params, fused=True)
        self.optimizer: torch.optim.Optimizer = fused
        self.applied = 0
        self.after = self._after()
        self.grads = [torch.ones_like(param, requires_grad=False) for param in self.params]
        self.loss = torch.ones((), requires_grad=True)

    def _after(self) -> Callable[[], object]:
        """What is timed: a backward pass of next to nothing, and the step."""
        name, optimizer = self.name, self.optimizer
        if name in ("fp16-master", "fp32"):
            # A scale that stays: it is not in the gradients that are laid out here.
            policy = Static(8.0) if name == "fp16-master" else None
            mp = MixedPrecision(self.model, optimizer, name, policy=policy)
            self.params = list(self.model.parameters())

            def modes() -> object:
                mp.backward(self.loss * 1.0)
                return mp.step(clip_norm=LIMIT)

            return modes
        if name in ("apply", "own AdamW"):
            ours = GradScaler("cpu", init_scale=8.0)

            def two_calls() -> object:
                ours.backward(self.loss * 1.0)
                return ours.apply(optimizer, clip_norm=LIMIT)

            return two_calls
        kind = torch.amp.GradScaler if name.startswith("torch") else GradScaler
        # After a skipped step, the applied one before the next brings the scale back.
        interval = 1 if name == "skipped" else 2000
        scaler = kind("cpu", init_scale=8.0, growth_interval=interval)
        clips = name.endswith("clip")

        def torchs_loop() -> None:
            scaler.scale(self.loss * 1.0).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.params, LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return torchs_loop

    def iterate(self) -> float:
        """Seconds of the processor that an iteration takes, without laying out the gradients."""
        if self.name == "skipped":  # after one that is applied, as usual
            self._lay_out()
            self.after()
        self._lay_out()
        if self.name == "skipped":
            self.params[-1].grad[-1] = torch.inf  # type: ignore[index]
        before = self.params[0][0].item()
        start = time.process_time()
        self.after()
        taken = time.process_time() - start
        self.applied += self.params[0][0].item() != before
        return taken

    def _lay_out(self) -> None:
        """Gives every parameter a gradient."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.clone()


class Result(NamedTuple):
    """A case, what an iteration of it takes, and how that compares."""

    case: str
    params: list[torch.Tensor]
    milliseconds: float
    ratio: float


def quartile(times: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(times)[len(times) // 4]


def measure(tensors: int, rounds: int) -> list[Result]:
    """All cases with so many tensors."""
    cases = {name: Case(name, tensors) for name in CASES}
    times: dict[str, list[float]] = {name: [] for name in CASES}
    names = list(CASES)
    for round_ in range(rounds + 2):
        for name in names[:: 1 if round_ % 2 else -1]:  # none is always the first
            taken = cases[name].iterate()
            if round_ >= 2:  # two to warm up
                times[name].append(taken)
    for name, case in cases.items():
        if case.applied != (0 if name == "skipped" else rounds + 2):
            raise RuntimeError(f"{case.applied} of {rounds + 2} steps of {name!r} were applied.")
    lower = {name: quartile(each) for name, each in times.items()}
    return [
        Result(name, [*cases[name].params], lower[name] * 1e3, lower[name] / lower[other])
        for name, other in AGAINST.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and appends if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=SIZES)
    parser.add_argument("--updates", type=int, default=20_000, help="product of tensors and rounds")
    parser.add_argument("--save", action="store_true", help="append rows to results.csv")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tensors in options.tensors:
            rounds = max(10, options.updates // tensors)
            results = measure(tensors, rounds)
            said = ", ".join(f"{each.case} {each.ratio:.2f}" for each in results)
            print(f"{tensors:5} tensors, {rounds} rounds: {said}", flush=True)
            if options.save:
                rows = [
                    _rows.row("host", each.case, "cpu", each.params, rounds, each.milliseconds,
                              1 / each.ratio)
                    for each in results
                ]  # fmt: skip
                _rows.add(rows)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
