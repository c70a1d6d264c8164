"""Small models of transformers with random weights, and their training in a mode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision import MODES
from gradscale.torch.optim import AdamW

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
GENERATES = ("gpt2", "llama", "t5")
HALF_MODES = [name for name in MODES if name != "fp32"]


def gpt2(dropout: float) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "loss_type": "ForCausalLM"}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TOKENS, **sizes, **drops))


def llama(dropout: float) -> Any:
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**TOKENS, **sizes, attention_dropout=dropout)
    return transformers.LlamaForCausalLM(config)


def bert(dropout: float) -> Any:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = transformers.BertConfig(vocab_size=64, intermediate_size=64, **SIZES, **drops)
    return transformers.BertForMaskedLM(config)


def t5(dropout: float) -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=64, decoder_start_token_id=0, **sizes, dropout_rate=dropout
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(dropout: float) -> Any:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, intermediate_size=64, num_labels=4, **SIZES, **drops
    )
    return transformers.ViTForImageClassification(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}


def model(name: str, dropout: float = 0.0, device: str = "cpu") -> Any:
    """A model in training, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[name](dropout).to(device).train()


def batch(name: str, device: str = "cpu") -> dict[str, Tensor]:
    """What a model takes, labels among it; the first text is shorter than the others."""
    source = torch.Generator().manual_seed(0)
    if name == "vit":
        pictures = torch.randn(4, 3, 16, 16, generator=source)
        return {"pixel_values": pictures.to(device), "labels": torch.arange(4, device=device)}
    tokens = torch.randint(2, 64, (4, 12), generator=source)
    seen = torch.ones_like(tokens)
    seen[0, 9:] = 0
    inputs = {"input_ids": tokens, "attention_mask": seen, "labels": tokens.clone()}
    return {key: value.to(device) for key, value in inputs.items()}


def precision(net: nn.Module, mode: str, lr: float = 3e-3, **settings: Any) -> MixedPrecision:
    params = [param for param in net.parameters() if param.requires_grad]
    return MixedPrecision(net, AdamW(params, lr=lr), mode, **settings)


def losses(
    net: Any, mp: MixedPrecision, inputs: Any, steps: int = 20, skips: int = 0
) -> Iterator[float]:
    """The losses of `steps` steps, of which so many may be skipped."""
    for _ in range(steps):
        with mp.autocast():
            loss = net(**inputs).loss
        mp.backward(loss)
        skips -= not mp.step(clip_norm=1.0).applied
        assert skips >= 0
        yield loss.item()


@cache
def run(name: str, mode: str, device: str = "cpu", lr: float = 3e-3, noise: float = 0.0) -> Tensor:
    """The losses of a run without dropout, whose weights are first changed by relative `noise`."""
    net = model(name, device=device)
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(1 + noise * (2 * torch.rand_like(param) - 1))
    return torch.tensor(list(losses(net, precision(net, mode, lr), batch(name, device))))


def tolerance(name: str, mode: str, device: str = "cpu") -> float:
    """How far the losses of a mode may be from float32's.

    A loss is computed from numbers of the format, so it has its unit roundoff. And training
    amplifies roundings: by how much is measured by changing all weights once by as much, in
    float32. A mode rounds in every operation of every step, some hundred times, and independent
    errors grow with the root of their number: 8 times that are allowed (0.2 to 5.4 were found).
    """
    unit = float(torch.finfo(MODES[mode].dtype).eps) / 2
    exact = run(name, "fp32", device)
    noisy = run(name, "fp32", device, noise=unit)
    return float(unit * exact.max() + 8 * (noisy - exact).abs().max())
