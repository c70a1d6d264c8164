"""A GPT and a perceptron in plain JAX, text to learn, and what a compiled step is made of.

Nothing here needs more than jax. Parameters are float32; a model computes in the type that it is
given, with norms, the softmax of attention and the loss in float32.
"""

from __future__ import annotations

import csv
import datetime
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradscale


class Size(NamedTuple):
    """How large a GPT is."""

    layers: int
    heads: int
    width: int
    words: int
    length: int


GPT_25M = Size(layers=8, heads=8, width=512, words=1024, length=256)
GPT_TINY = Size(layers=2, heads=2, width=16, words=32, length=12)


def gpt(key: Any, size: Size) -> dict[str, Any]:
    """The parameters of a GPT; those of all layers are stacked."""
    layers, _, width, words, length = size
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, std: float = 0.02) -> Any:
        return std * jax.random.normal(next(keys), shape)

    # As in GPT-2: what is added to the sum of layers is smaller the more of them there are.
    last = 0.02 / (2 * layers) ** 0.5
    stack = {
        "norm1": jnp.ones((layers, width)),
        "qkv": normal(layers, width, 3 * width),
        "out": normal(layers, width, width, std=last),
        "norm2": jnp.ones((layers, width)),
        "up": normal(layers, width, 4 * width),
        "up_bias": jnp.zeros((layers, 4 * width)),
        "down": normal(layers, 4 * width, width, std=last),
        "down_bias": jnp.zeros((layers, width)),
    }
    tables = {"words": normal(words, width), "places": normal(length, width)}
    return {**tables, "layers": stack, "norm": jnp.ones(width)}


def gpt_loss(params: Any, tokens: Any, heads: int, dtype: Any) -> Any:
    """The cross entropy of the next tokens, in float32."""
    words, places = params["words"].astype(dtype), params["places"].astype(dtype)
    length = tokens.shape[1] - 1
    unseen = jnp.triu(jnp.ones((length, length), bool), 1)

    def block(x: Any, layer: Any) -> Any:
        half = {name: leaf.astype(dtype) for name, leaf in layer.items()}
        x = x + _attention(_norm(x, layer["norm1"]), half, heads, unseen)
        hidden = jax.nn.gelu(_norm(x, layer["norm2"]) @ half["up"] + half["up_bias"])
        return x + hidden @ half["down"] + half["down_bias"], None

    x, _ = jax.lax.scan(block, words[tokens[:, :-1]] + places[:length], params["layers"])
    logits = _norm(x, params["norm"]) @ words.T
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def _norm(x: Any, weight: Any) -> Any:
    """RMS norm in float32, in the type of `x`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * weight).astype(x.dtype)


def _attention(x: Any, layer: Any, heads: int, unseen: Any) -> Any:
    """Causal self-attention."""
    batch, length, width = x.shape
    shape = (batch, length, 3, heads, width // heads)
    q, k, v = jnp.moveaxis((x @ layer["qkv"]).reshape(shape), 2, 0)
    q = q * (width // heads) ** -0.5
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k).astype(jnp.float32)
    shares = jax.nn.softmax(jnp.where(unseen, -1e30, scores)).astype(x.dtype)
    return jnp.einsum("bhlm,bmhd->blhd", shares, v).reshape(batch, length, width) @ layer["out"]


def texts(key: Any, count: int, words: int, length: int, rules: int = 4) -> Any:
    """`count` sequences to learn, int32.

    Each follows one of a few permutations: a word says which is next, nine times of ten. Which
    permutation it is has to be read off the beginning.
    """
    keys = jax.random.split(key, 4)
    tables = jnp.stack([jax.random.permutation(k, words) for k in jax.random.split(keys[0], rules)])
    rule = jax.random.randint(keys[1], (count,), 0, rules)
    anything = jax.random.randint(keys[2], (length, count), 0, words)
    follows = jax.random.bernoulli(keys[3], 0.9, (length, count))

    def one(word: Any, now: Any) -> Any:
        other, keeps = now
        word = jnp.where(keeps, tables[rule, word], other)
        return word, word

    _, found = jax.lax.scan(one, anything[0], (anything, follows))
    return found.T


def perceptron(key: Any, layers: int, width: int) -> list[dict[str, Any]]:
    """The parameters of a perceptron: two tensors for every layer."""
    keys = jax.random.split(key, layers)
    shape = (width, width)
    return [
        {"w": width**-0.5 * jax.random.normal(k, shape), "b": jnp.zeros(width)} for k in keys
    ]  # fmt: skip


def perceptron_loss(params: Any, x: Any, dtype: Any) -> Any:
    """How far the network is from the identity, in float32."""
    y = x.astype(dtype)
    for layer in params:
        y = jnp.tanh(y @ layer["w"].astype(dtype) + layer["b"].astype(dtype))
    return jnp.mean(jnp.square(y.astype(jnp.float32) - x))


def count(params: Any) -> int:
    """How many numbers there are in `params`."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def readers(hlo: str, shape: tuple[int, ...]) -> dict[str, list[str]]:
    """What the compiled program `hlo` does with its arguments of `shape` that begin with "g".

    For each argument: "reduce" for an instruction (on a GPU, a kernel) that makes scalars of it,
    "array" for one that makes an array.
    """
    entry = hlo[hlo.index("\nENTRY") :]
    size = f"[{','.join(map(str, shape))}]"
    names = re.findall(rf"%(g\S*) = \w+{re.escape(size)}\S* parameter", entry)
    found: dict[str, list[str]] = {name: [] for name in names}
    for made, arguments in re.findall(
        r"^\s+(?:ROOT )?%\S+ = (.*?) [\w-]+\((%.*?)\)[,\n]", entry, re.M
    ):
        for name in names:
            if f"%{name}" in re.findall(r"%[\w.\-]+", arguments):
                found[name].append("array" if size in made else "reduce")
    return found


def stored(hlo: str, shape: tuple[int, ...]) -> int:
    """How many arrays of `shape` the compiled program `hlo` writes."""
    entry = hlo[hlo.index("\nENTRY") :]
    size = re.escape(f"[{','.join(map(str, shape))}]")
    return len(re.findall(rf"%\S+ = \w+{size}\S* (?!parameter)[\w-]+\(", entry))


class Row(NamedTuple):
    """One result."""

    date: str
    benchmark: str
    case: str
    device: str
    python: str
    jax: str
    gradscale: str
    parameters: int
    what: str
    value: float


def keep(path: Path, benchmark: str, case: str, parameters: int, numbers: dict[str, float]) -> None:
    """Adds a row for every number to the table at `path`; old rows stay."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(Row._fields)
        for what, value in numbers.items():
            row = Row(
                datetime.date.today().isoformat(), benchmark, case, device(),
                platform.python_version(), jax.__version__, gradscale.__version__,
                parameters, what, value,
            )  # fmt: skip
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])


def device() -> str:
    """The name of the device."""
    first = jax.devices()[0]
    return platform.machine() + " CPU" if first.platform == "cpu" else first.device_kind
