"""Made-up run logs that follow the schema: a training with a rising scale, skips and samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradscale.formats import FLOAT16
from gradscale.monitor.findings import Finding
from gradscale.monitor.samples import Sample, TensorSample
from gradscale.runlog import Run, encode, finding_line, rank_file, sample_line

HEADER: dict[str, Any] = {
    "kind": "run",
    "version": 1,
    "gradscale": "0.2.0",
    "engine": "torch 2.13.0",
    "rank": 0,
    "world_size": 1,
    "time": 1_700_000_000.0,
    "settings": {"policy": "Dynamic()", "format": "float16", "device": "cuda"},
}
HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
)


def layer_names(blocks: int) -> list[str]:
    """Parameter names of a small transformer."""
    parts = ("ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight")
    inner = [f"transformer.h.{block}.{part}" for block in range(blocks) for part in parts]
    return ["transformer.wte.weight", *inner, "lm_head.weight"]


def tensor(
    name: str, kind: str, center: float, width: float, numel: int = 4096, scale: float = 1.0
) -> TensorSample:
    """Magnitudes that are spread around 2**center; what float16 cannot hold is flushed."""
    low, high = math.floor(center - 4 * width), math.ceil(center + 3 * width)
    weights = [math.exp(-(((e - center) / width) ** 2) / 2) for e in range(low, high + 1)]
    counts = [round(numel * w / sum(weights)) for w in weights]
    flushed = sum(c for e, c in enumerate(counts, low) if e < -25)
    infs = sum(c for e, c in enumerate(counts, low) if e > 15)
    kept = [(e, c) for e, c in enumerate(counts, low) if -25 <= e <= 15 and c]
    first, last = (kept[0][0], kept[-1][0]) if kept else (0, -1)
    inside = tuple(counts[e - low] for e in range(first, last + 1))
    zeros = flushed + numel // 50
    whole = sum(inside) + zeros + infs
    return TensorSample(name, kind, whole, first, inside, zeros, flushed, infs, 0, scale)


def sample(step: int, names: list[str], scale: float, bad: bool = False) -> Sample:
    """A sample in which gradients shrink from the last layer to the first."""
    rows = []
    for index, name in enumerate(names):
        depth = (len(names) - index) / len(names)
        center = math.log2(scale) - 20.0 - 14.0 * depth + (9.0 if bad else 0.0)
        rows.append(tensor(name, "weight_grad", center, 3.2, scale=scale))
        rows.append(tensor(name.removesuffix(".weight"), "activation", -1.0 + 3 * depth, 2.0))
    first = (names[-1].removesuffix(".weight"), "backward", 2.0**-9, 2.0**14) if bad else None
    return Sample(step, "float16", tuple(rows), first, ())


def write_run(
    folder: Path,
    steps: int = 1200,
    *,
    blocks: int = 4,
    samples: int = 5,
    scale: float = 2.0**16,
    seed: int = 0,
    findings: bool = True,
    rename: Callable[[str], str] = str,
    rank: int = 0,
    loss: bool = True,
) -> Path:
    """Writes the log of a training into `folder`; returns the folder."""
    draw = random.Random(seed)
    names = [rename(name) for name in layer_names(blocks)]
    lines: list[dict[str, Any]] = [{**HEADER, "rank": rank}]
    in_a_row, good = 0, 0
    sampled = {1 + i * (steps - 1) // max(samples - 1, 1) for i in range(samples)}
    for step in range(1, steps + 1):
        amax = 2.0 ** (draw.gauss(-4.0, 0.6) + 4.0 * step / steps) * scale
        bad = amax > 65504.0
        in_a_row, good, used = (in_a_row + 1, 0, scale) if bad else (0, good + 1, scale)
        taken: dict[str, Any] = {
            "optimizer": 0,
            "applied": not bad,
            "loss_finite": True,
            "skipped_in_a_row": in_a_row,
            "scale": used,
        }
        if bad:
            culprits = [[draw.choice(names), rank, draw.randrange(1, 90), 0] for _ in range(2)]
            taken |= {"verdict": "scale too high", "culprits": culprits, "amax": math.inf}
            scale /= 2.0
        else:
            headroom = math.log2(65504.0 / amax)
            taken |= {"amax": amax, "headroom": headroom, "grad_norm": amax / used * 7.0}
            if step % 10 == 0:
                taken["underflow"] = min(0.9, 0.02 * 2.0 ** (headroom / 3))
            if good >= 150:
                scale, good = scale * 2.0, 0
        line: dict[str, Any] = {
            "kind": "step",
            "step": step,
            "time": 1_700_000_000.0 + step * 0.21,
            "scale": scale,
            "steps": [taken],
        }
        if loss:
            line["loss"] = 3.0 * math.exp(-step / steps * 2) + draw.gauss(0.4, 0.05)
        if scale != used:
            line["moves"] = [[0, used, scale, 2.0**-14]]
            name = "grow" if scale > used else "backoff"
            lines.append(
                {"kind": "event", "step": step, "name": name, "scale": scale, "loss_id": 0}
            )
        lines.append(line)
        if step in sampled:
            lines.append(sample_line(sample(step, names, used, bad)))
    if findings:
        worst = sample(steps, names, scale).of("weight_grad")[1]
        small = f"{worst.subnormal(FLOAT16):.0%} of its gradients are below the smallest normal "
        small += f"number of float16 at a scale of {scale:g}."
        lines.append(finding_line(Finding.of("underflow", small, worst.name, step=steps // 2)))
        skipped = sum(not line["steps"][0]["applied"] for line in lines if "steps" in line)
        often = f"{skipped} of {steps} steps were skipped."
        lines.append(finding_line(Finding.of("skips-too-often", often, step=steps // 3)))
    folder.mkdir(parents=True, exist_ok=True)
    rank_file(folder, rank).write_bytes(b"".join(map(encode, lines)))
    return folder


def named_run(name: str, where: str, layer: str, setting: str) -> Run:
    """A run of one step whose names are given."""
    tensors = (tensor(layer, "weight_grad", -20.0, 3.0),)
    taken = {"applied": False, "verdict": where, "culprits": [[layer, 0, 1, 0]], "scale": 2.0}
    line = {"kind": "step", "step": 1, "rank": 0, "scale": 1.0, "loss": 2.0, "steps": [taken]}
    event = {"kind": "event", "step": 1, "rank": 0, "name": name, "scale": 1.0, "loss_id": where}
    return Run(
        settings={setting: setting},
        ranks=[0],
        steps=[line],
        events=[event],
        findings=[Finding("underflow", where, name, layer, 1, 0)],
        samples=[Sample(1, name, tensors, (layer, where, 0.0, math.inf), ())],
        skipped_lines=0,
        headers=[{**HEADER, "engine": name}],
    )
