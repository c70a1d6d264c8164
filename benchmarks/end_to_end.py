"""What scaling costs in a whole training iteration: a GPT-2 small on one GPU.

Weights are float32, where nothing else is said, and the forward pass is autocast; every case has a
model of its own, the same tokens, clipping by norm and AdamW:

    bfloat16, no scaler             torch's clip_grad_norm_ and fused AdamW
    float16, no scaler              the same in float16: what scaling is compared with
    float16, torch's scaler         torch.amp.GradScaler: scale, unscale_, clip_grad_norm_, step,
                                    update; torch's fused AdamW
    float16, ours                   backward and apply(clip_norm=...), gradscale.torch.optim.AdamW
    float16 weights, ours           the same with float16 matrices and embeddings, and float32
                                    masters; norms and what is added up from layer to layer stay
                                    float32, as in the other cases
    float16, no scaler, our AdamW   as "float16, no scaler" with gradscale.torch.optim.AdamW

A repeat is `--steps` iterations between two synchronisations, and its result the wall clock per
iteration. The cases take turns, repeat by repeat. A row holds the median of the repeats, two more
the fastest and the slowest; `rounds` is the number of iterations in a repeat, and the last column
compares with torch's scaler. First the model runs as it is, then compiled. Rows are appended to
results.csv after each; old rows stay.

`--tiny` takes a very small model on the CPU, to see that everything runs; its rows are kept only
where `--results` says.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _rows
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscale.torch import GradScaler, optim

LR = 1e-4
MAX_NORM = 1.0
BATCHES = 8
WARM_UP = 5
TORCHS, NOBODYS, OURS = "float16, torch's scaler", "float16, no scaler", "float16, ours"
HALVES = "float16 weights, ours"
BFLOAT = "bfloat16, no scaler"


class Size(NamedTuple):
    """How large a model is."""

    layers: int
    heads: int
    width: int
    words: int
    length: int


# 50,257 words are an odd number, for which the library takes other, slower matrix products, and
# others for float16 than for bfloat16. Whoever trains this model in earnest fills them up.
SMALL = Size(layers=12, heads=12, width=768, words=50304, length=1024)
TINY = Size(layers=2, heads=2, width=32, words=101, length=16)


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.merge = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, one vector for every token, with what this block adds."""
        batch, length, width = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2 without dropout. The embedding of the tokens is also the last layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of every token but the first, told by those before it."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = (self.tokens(inputs) + self.places.weight[: inputs.shape[1]]).float()
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recipe(NamedTuple):
    """How a case trains."""

    dtype: torch.dtype
    after_forward: Callable[[Case, Tensor], object]
    own_optimizer: bool = False
    scaler: Callable[..., Any] | None = None
    weights: torch.dtype = torch.float32
    """Of matrices and embeddings."""


class Case:
    """One way to train, with a model of its own."""

    def __init__(
        self, recipe: Recipe, size: Size, device: str, texts: Tensor, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        self.recipe, self.device, self.texts = recipe, device, texts
        model = GPT(size).to(device)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.to(recipe.weights)
        self.params = list(model.parameters())
        self.model: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
        self.optimizer: torch.optim.Optimizer
        if recipe.own_optimizer:
            self.optimizer = optim.AdamW(self.params, lr=LR)
        else:
            self.optimizer = torch.optim.AdamW(self.params, lr=LR, fused=True)
        self.scaler: Any = None if recipe.scaler is None else recipe.scaler(device)
        self.loss = torch.zeros((), device=device)

    def run(self, steps: int) -> float:
        """Milliseconds per iteration, over so many between two synchronisations."""
        start = self.now()
        for step in range(steps):
            with torch.autocast(self.device, dtype=self.recipe.dtype):
                loss = self.model(self.texts[step % BATCHES])
            self.recipe.after_forward(self, loss)
        taken = self.now() - start
        self.loss = loss.detach()
        return taken * 1e3 / steps

    def now(self) -> float:
        """Seconds, when the device has done its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def without_scaler(case: Case, loss: Tensor) -> None:
    """The rest of an iteration without scaling."""
    loss.backward()
    nn.utils.clip_grad_norm_(case.params, MAX_NORM)
    case.optimizer.step()
    case.optimizer.zero_grad()


def torchs_loop(case: Case, loss: Tensor) -> None:
    """The rest of an iteration with torch's scaler."""
    case.scaler.scale(loss).backward()
    case.scaler.unscale_(case.optimizer)
    nn.utils.clip_grad_norm_(case.params, MAX_NORM)
    case.scaler.step(case.optimizer)
    case.scaler.update()
    case.optimizer.zero_grad()


def two_calls(case: Case, loss: Tensor) -> None:
    """The rest of an iteration with ours."""
    case.scaler.backward(loss)
    case.scaler.apply(case.optimizer, clip_norm=MAX_NORM)


CASES = {
    BFLOAT: Recipe(torch.bfloat16, without_scaler),
    NOBODYS: Recipe(torch.float16, without_scaler),
    TORCHS: Recipe(torch.float16, torchs_loop, scaler=torch.amp.GradScaler),
    OURS: Recipe(torch.float16, two_calls, own_optimizer=True, scaler=GradScaler),
    HALVES: Recipe(
        torch.float16, two_calls, own_optimizer=True, scaler=GradScaler, weights=torch.float16
    ),
    "float16, no scaler, our AdamW": Recipe(torch.float16, without_scaler, own_optimizer=True),
}


def prepare(
    size: Size, device: str, texts: Tensor, compiled: bool, wanted: Sequence[str]
) -> dict[str, Case]:
    """The cases that can run here, warm; what cannot is left out, with the reason."""
    cases = {}
    for name, recipe in CASES.items():
        if wanted and not any(text in name for text in wanted):
            continue
        start = time.perf_counter()
        try:
            case = Case(recipe, size, device, texts, compiled)
            case.run(WARM_UP)
        except Exception as error:
            print(f"  {name} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        print(f"  {name} is ready in {time.perf_counter() - start:.1f} s", flush=True)
        cases[name] = case
    return cases


def per_cent(taken: dict[str, list[float]], name: str, base: str) -> None:
    """Prints by how much `name` is slower than `base`."""
    if name in taken and base in taken:
        ratio = statistics.median(taken[name]) / statistics.median(taken[base])
        print(f"  {name}, against {base}: {(ratio - 1) * 100:+.2f} %", flush=True)


def measure(mode: str, cases: dict[str, Case], steps: int, repeats: int) -> list[_rows.Row]:
    """The rows of all cases, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            taken[name].append(case.run(steps))
    rows = []
    base = statistics.median(taken.get(TORCHS, [float("nan")]))
    for name, case in cases.items():
        times = taken[name]
        summary = {
            "": statistics.median(times),
            ", fastest repeat": min(times),
            ", slowest repeat": max(times),
        }
        for which, value in summary.items():
            given = (case.device, case.params, steps, value, base / value)
            rows.append(_rows.row("end_to_end", f"{mode}, {name}{which}", *given))
    for name, case in cases.items():
        applied = int(case.optimizer.state[case.params[0]]["step"])
        of = WARM_UP + steps * repeats
        print(f"  {name}: loss {float(case.loss):.4f}, {applied} of {of} steps applied", flush=True)
    for name, against in (
        (TORCHS, NOBODYS),
        (OURS, NOBODYS),
        (OURS, "float16, no scaler, our AdamW"),
        (OURS, BFLOAT),
        (HALVES, BFLOAT),
    ):
        per_cent(taken, name, against)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="iterations per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="texts per batch")
    parser.add_argument(
        "--cases", nargs="*", default=[], help="only cases whose names contain one of these"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--eager", action="store_true", help="only the eager model")
    modes.add_argument("--compiled", action="store_true", help="only the compiled model")
    parser.add_argument("--tiny", action="store_true", help="a small eager model on the CPU")
    parser.add_argument(
        "--results", type=Path, help="CSV file with the rows; results.csv unless --tiny"
    )
    options = parser.parse_args(arguments)
    device, size = ("cpu", TINY) if options.tiny else ("cuda", SMALL)
    if device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was measured")
        return
    results = options.results or (None if options.tiny else _rows.RESULTS)
    whether_compiled = [False] if options.tiny or options.eager else [False, True]
    if options.compiled and not options.tiny:
        whether_compiled = [True]
    torch.manual_seed(0)
    shape = (BATCHES, options.batch, size.length + 1)
    texts = torch.randint(size.words, shape, device=device)
    for compiled in whether_compiled:
        mode = "compiled" if compiled else "eager"
        print(mode, flush=True)
        cases = prepare(size, device, texts, compiled, options.cases)
        rows = measure(mode, cases, options.steps, options.repeats)
        if results is not None:
            _rows.add(rows, results)
        del cases
        gc.collect()


if __name__ == "__main__":
    main()
