"""What a step costs after the backward pass: unscale, check, clip and AdamW, on one GPU.

For the parameters of a model, with gradients that lie where they lay the step before:

    torch                             torch's scaler, unscale_, clip_grad_norm_, fused AdamW
    torch, no clipping                the same without clipping: step and update alone
    torch, foreach                    as "torch" with the default AdamW, which waits for the device
    torch, compiled                   no scaler: clip_grad_norm_ and a compiled AdamW
    ours, torch's loop                the calls of "torch" on our scaler, with torch's fused AdamW
    ours, clip_grad_norm_             scaler.clip_grad_norm_, step, update; torch's fused AdamW
    ours, torch's AdamW               apply(clip_norm=...) with torch's fused AdamW
    ours, torch's AdamW, no clipping  apply() with torch's fused AdamW
    ours                              apply(clip_norm=...) with gradscale.torch.optim.AdamW
    ours, float16 parameters, ...     the same with float16 parameters and gradients, and a float32
                                      or a split master; and with bfloat16
    floor                             32 bytes for every parameter at the speed of a copy, measured
                                      in this run; for half parameters 30, or 28 if split

and for each, in this order in the name of the row:

    alone             milliseconds from a synchronised start to a synchronised end, the median
    device            milliseconds of the device by events, with the host ahead of it, the median
    in a row          milliseconds as the mean over steps that nobody waits between, the median of
                      several such rows
    peak memory, MiB  what a step takes above what was allocated before it; the number stands in the
                      column `median_ms`, because the columns of the table are fixed

The last column compares with "torch", taken by turns with the case, or with "torch, no clipping"
where the case does not clip; half parameters too are compared with "torch", which has float32 ones,
taken before. The 7B-like model has as many layers as fit beside the optimizer state of one case,
and its rows say how many; it is compared with what was taken before. A case that fails is left out,
with the reason. Rows are appended to results.csv after every case; old rows stay.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _rows
import _shapes
import _timing
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch import GradScaler, optim

SEVEN_B = "7B-like"
MODELS = {
    "GPT-2 XL": _shapes.gpt2(48, 1600),
    "GPT-2 small": _shapes.gpt2(12, 768),
    "ResNet-50": _shapes.resnet50(),
    SEVEN_B: _shapes.seven_b(),
}
WITH_HALF_PARAMETERS = ("GPT-2 XL", "GPT-2 small")
FLOORS = {
    "floor": 32,
    "floor, half parameters, float32 master": 30,
    "floor, half parameters, split master": 28,
}
"""The fewest bytes that a step must move for every parameter."""
WAYS = {"alone": "ms", "device": "ms", "in a row": "ms", "peak memory, MiB": "MiB"}
"""What is measured, and in which unit."""
LR = 1e-6
MAX_NORM = 1e9
# Some cases divide the gradients by it in place, at every step: after the few hundred steps of a
# case they must still be ordinary numbers, because a device may be faster on zeros.
SCALE = 1.0625


class Recipe(NamedTuple):
    """How a case steps."""

    step: Callable[[Case], object]
    scaler: Callable[..., Any]
    optimizer: Callable[..., Optimizer]
    dtype: torch.dtype = torch.float32
    floor: str | None = None
    """What to compare the time of the device with."""
    compiled: bool = False


class Case:
    """One way to step, with a scaler and an optimizer of its own."""

    def __init__(
        self, recipe: Recipe, params: list[Tensor], grads: list[Tensor], device: str = "cuda"
    ) -> None:
        self.params, self.grads = params, grads
        self.scaler = recipe.scaler(device)
        self.optimizer = optimizer = recipe.optimizer(params)
        self.loss = torch.ones((), device=device, requires_grad=True)
        self.steps = 0
        self._step = recipe.step
        self.plain_step: Callable[[], object] = optimizer.step
        if recipe.compiled:
            torch._dynamo.reset()  # else the shapes of the last model make these dynamic ones

            @torch.compile(fullgraph=False)
            def compiled_step() -> None:
                optimizer.step()

            self.plain_step = compiled_step
        self.refill()

    def refill(self) -> None:
        """Makes the gradients ordinary numbers."""
        for grad in self.grads:
            grad.normal_()

    def before(self) -> None:
        """What the backward pass would leave."""
        self.scaler.scale(self.loss * 1.0).backward()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def after(self) -> None:
        """Everything up to the next forward pass."""
        self._step(self)
        self.steps += 1

    def skipped(self) -> int:
        """How many steps were not applied; those move less memory."""
        return self.steps - int(self.optimizer.state[self.params[0]].get("step", self.steps))


def torchs_loop(case: Case) -> None:
    """torch's calls for a step that clips."""
    case.scaler.unscale_(case.optimizer)
    torch.nn.utils.clip_grad_norm_(case.params, MAX_NORM)
    step_and_update(case)


def own_clipping(case: Case) -> None:
    """torch's calls with our clipping."""
    case.scaler.clip_grad_norm_(case.optimizer, MAX_NORM)
    step_and_update(case)


def step_and_update(case: Case) -> None:
    """torch's calls for a step that does not clip."""
    case.scaler.step(case.optimizer)
    case.scaler.update()
    case.optimizer.zero_grad()


def without_scaler(case: Case) -> None:
    """A step that clips and knows of no scaler."""
    torch.nn.utils.clip_grad_norm_(case.params, MAX_NORM)
    case.plain_step()
    case.optimizer.zero_grad()


def apply(case: Case) -> None:
    """Our call, with clipping."""
    case.scaler.apply(case.optimizer, clip_norm=MAX_NORM)


def apply_without_clipping(case: Case) -> None:
    """Our call, without clipping."""
    case.scaler.apply(case.optimizer)


def cases() -> dict[str, Recipe]:
    """Every case by its name; what others are compared with comes first, what leaks last."""
    theirs = partial(torch.amp.GradScaler, init_scale=SCALE)
    nobodys = partial(torch.amp.GradScaler, enabled=False)
    our = partial(GradScaler, init_scale=SCALE)
    fused = partial(torch.optim.AdamW, lr=LR, fused=True)
    foreach = partial(torch.optim.AdamW, lr=LR, foreach=True)
    compilable = partial(foreach, capturable=True)
    own = partial(optim.AdamW, lr=LR)
    found = {
        "torch": Recipe(torchs_loop, theirs, fused),
        "torch, no clipping": Recipe(step_and_update, theirs, fused),
        "ours": Recipe(apply, our, own, floor="floor"),
        "ours, torch's AdamW": Recipe(apply, our, fused),
        "ours, torch's AdamW, no clipping": Recipe(apply_without_clipping, our, fused),
        "ours, clip_grad_norm_": Recipe(own_clipping, our, fused),
        "ours, torch's loop": Recipe(torchs_loop, our, fused),
        "torch, foreach": Recipe(torchs_loop, theirs, foreach),
        "torch, compiled": Recipe(without_scaler, nobodys, compilable, compiled=True),
    }
    for dtype in (torch.float16, torch.bfloat16):
        for master in ("float32", "split"):
            name = f"ours, {str(dtype).removeprefix('torch.')} parameters, {master} master"
            floor = f"floor, half parameters, {master} master"
            found[name] = Recipe(apply, our, partial(own, master=master), dtype, floor)
    return found


def base_of(name: str) -> str:
    """The case that `name` is compared with."""
    return "torch, no clipping" if "no clipping" in name else "torch"


def chosen(model: str, wanted: Sequence[str]) -> dict[str, Recipe]:
    """The cases of `model` with one of `wanted` in the name, and what they are compared with."""
    every = cases()
    if model not in WITH_HALF_PARAMETERS:
        every = {name: r for name, r in every.items() if r.dtype is torch.float32}
    names = {name for name in every if not wanted or any(text in name for text in wanted)}
    names |= {base_of(name) for name in names}
    return {name: recipe for name, recipe in every.items() if name in names}


def measure(
    case: Case, base: Case | None, rounds: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """What a step of `case` costs, in every way, and what one of `base` costs by turns with it."""
    pair = [case] if base is None else [case, base]
    start = time.perf_counter()
    for each in pair * 3:  # also compiles
        each.before()
        each.after()
    torch.cuda.synchronize()
    print(f"  ready in {time.perf_counter() - start:.1f} s", flush=True)
    works = [_timing.Work(each.after, each.before, each.refill) for each in pair]
    devices = [_timing.on_device(work.call, work.before, rounds) for work in works]
    times = {
        "alone": _timing.alone(works, rounds),
        "device": [taken for taken, _ in devices],
        "in a row": _timing.in_a_row(
            works, steps, [taken if ahead else 0.0 for taken, ahead in devices]
        ),
        "peak memory, MiB": [_timing.peak_memory(each.after, each.before) for each in pair],
    }
    for each in pair:
        if skipped := each.skipped():
            print(f"  {skipped} of {each.steps} steps were skipped: these times mean little")
    mine = {way: both[0] for way, both in times.items()}
    return mine, {way: both[-1] for way, both in times.items()}


def free() -> None:
    """Gives back the memory of tensors that are gone."""
    gc.collect()
    torch.cuda.empty_cache()


class Bench:
    """The measurements of one model."""

    def __init__(self, model: str, speed: float, options: argparse.Namespace) -> None:
        free()
        self.model, self.shapes, self.options = model, MODELS[model], options
        if model == SEVEN_B:
            layers = _shapes.seven_b_layers(torch.cuda.mem_get_info()[0])
            self.model, self.shapes = f"{model}, {layers} layers", _shapes.seven_b(layers)
        self.recipes = chosen(model, options.cases)
        count = _shapes.size(self.shapes)
        self.floors = {name: size * count / speed for name, size in FLOORS.items()}
        self.pairs = model != SEVEN_B
        self.found: dict[str, dict[str, float]] = {}
        self.bases: dict[str, dict[str, float]] = {}
        """What the case that one is compared with has taken, by turns with it."""

    def run(self) -> None:
        """Measures every case, prints and appends."""
        for dtype in dict.fromkeys(recipe.dtype for recipe in self.recipes.values()):
            options = {"device": "cuda", "dtype": dtype}
            params = [torch.nn.Parameter(torch.empty(s, **options)) for s in self.shapes]
            grads = [torch.empty(s, **options) for s in self.shapes]
            for param in params:
                torch.nn.init.normal_(param, std=0.02)
            self.params = params
            for name, recipe in self.recipes.items():
                if recipe.dtype is dtype:
                    self.run_case(name, recipe, params, grads)
            del grads
            free()
        for floor, taken in self.floors.items():
            if floor == "floor" or any(recipe.floor == floor for recipe in self.recipes.values()):
                self.save(floor, {way: taken for way, unit in WAYS.items() if unit == "ms"})

    def run_case(
        self, name: str, recipe: Recipe, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Measures one case; one that fails does not take the others with it."""
        print(f"{self.model}, {name}", flush=True)
        case = base = None
        against = self.recipes[base_of(name)]
        try:
            case = Case(recipe, params, grads)
            # The largest model leaves no room for two, and does not wait for the host.
            if against is not recipe and against.dtype is recipe.dtype and self.pairs:
                base = Case(against, params, grads)
            sizes = self.options.rounds, self.options.steps
            self.found[name], self.bases[name] = measure(case, base, *sizes)
            if base is None:
                self.bases[name] = self.found.get(base_of(name), {})
        except Exception as error:
            print(f"  left out: {type(error).__name__}: {error}", flush=True)
        del case, base
        for param in params:
            param.grad = None
        free()
        if name in self.found:
            self.save(name, self.found[name])
            if recipe.floor is not None:
                ratio = self.found[name]["device"] / self.floors[recipe.floor]
                print(f"  on the device {ratio:.3f} times the {recipe.floor}", flush=True)

    def save(self, name: str, found: dict[str, float]) -> None:
        """Appends the rows of one case."""
        rows = []
        for way, taken in found.items():
            known = self.bases.get(name) or self.found.get(base_of(name), {})
            base = known.get(way, math.nan)
            rounds = {"in a row": self.options.steps, "peak memory, MiB": 1}
            rows.append(
                _rows.row(
                    "step", f"{self.model}, {name}, {way}", "cuda", self.params,
                    rounds.get(way, self.options.rounds), taken,
                    base / taken if taken else math.inf, WAYS[way],
                )
            )  # fmt: skip
        _rows.add(rows, self.options.results)


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--cases", nargs="*", default=[], help="only cases whose names contain one of these"
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds for a single step, and on the device"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps in a row")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device; nothing was measured")
        return
    speed = _timing.copy_speed()
    print(f"a copy reads and writes {speed / 1e9:.3f} TB/s", flush=True)
    for model in options.models:
        Bench(model, speed, options).run()


if __name__ == "__main__":
    main()
