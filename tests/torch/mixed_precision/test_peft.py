"""LoRA by PEFT on a float16 base: adapters are trained, and not one bit of the base moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from gradscale.torch import MixedPrecision
from pretrained_models import GENERATES, batch, losses, model
from tensors import same

peft = pytest.importorskip("peft")

TARGETS = {
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "bert": ["query", "value"],
    "t5": ["q", "v", "wo"],
    "vit": ["q_proj", "v_proj"],
}
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}


def adapted(name: str, path: Any, half: bool) -> Any:
    """A base that was loaded in float16, with adapters in float32, or in float16 as well."""
    model(name).save_pretrained(path)
    base = type(model(name)).from_pretrained(path, dtype=torch.float16)
    config = peft.LoraConfig(
        r=4,
        target_modules=TARGETS[name],
        task_type=TASKS.get(name),
        fan_in_fan_out=name == "gpt2",
    )
    torch.manual_seed(1)
    net = peft.get_peft_model(base, config).train()
    return net.half() if half else net


@pytest.mark.parametrize(
    ("name", "mode", "half"),
    [
        *((name, "fp16", False) for name in TARGETS),
        ("gpt2", "fp16", True),
        ("t5", "fp16", True),
        ("gpt2", "fp16-master", False),
        ("llama", "fp16-pure", True),
    ],
)
def test_only_adapters_are_trained(name: str, mode: str, half: bool, tmp_path: Any) -> None:
    net = adapted(name, tmp_path, half)
    adapters = [each for each in net.parameters() if each.requires_grad]
    base = {key: each for key, each in net.named_parameters() if not each.requires_grad}
    before = {key: each.detach().clone() for key, each in base.items()}
    mp = MixedPrecision(net, optim.AdamW(adapters, lr=2e-2), mode)
    found = list(losses(net, mp, batch(name), 10, skips=1))  # the scale looks for its height
    assert found[-1] < found[0] - 0.01
    if mode == "fp16":
        assert same(base, before)
        assert {each.dtype for each in adapters} == {torch.float32}
    else:  # norms become float32, with the same values
        assert same({key: each.half() for key, each in base.items()}, before)
    if name in GENERATES:
        inputs = {key: each for key, each in batch(name).items() if key != "labels"}
        assert len(net.eval().generate(**inputs, max_new_tokens=3, do_sample=False)) == 4
    net.save_pretrained(tmp_path / "adapters")
    with net.disable_adapter(), mp.autocast():
        assert net(**batch(name)).loss.isfinite()


def test_adapters_of_a_checkpointed_base(tmp_path: Any) -> None:
    net = adapted("llama", tmp_path, half=False)
    net.gradient_checkpointing_enable()
    net.enable_input_require_grads()
    adapters = [each for each in net.parameters() if each.requires_grad]
    mp = MixedPrecision(net, optim.AdamW(adapters, lr=2e-2), "fp16")
    net.config.use_cache = False
    found = list(losses(net, mp, batch("llama"), 5))
    assert found[-1] < found[0]
