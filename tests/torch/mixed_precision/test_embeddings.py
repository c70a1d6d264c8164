"""Embeddings of another size: resized before MixedPrecision is made, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.optim import AdamW
from pretrained_models import batch, losses, model, precision


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "fp16-master"])
def test_embeddings_are_resized_before_or_refused(mode: str, tied: bool) -> None:
    def made() -> Any:
        net = model("llama")
        net.config.tie_word_embeddings = tied
        if tied:
            net.tie_weights()
        return net

    net = made()
    net.resize_token_embeddings(70, mean_resizing=False)
    list(losses(net, precision(net, mode), batch("llama"), 2))

    net = made()
    mp = precision(net, mode)
    list(losses(net, mp, batch("llama"), 1))
    net.resize_token_embeddings(70, mean_resizing=False)
    with pytest.raises(
        CallOrderError, match=r"embeddings of LlamaForCausalLM have been replaced .*\(70, 32\)"
    ):
        list(losses(net, mp, batch("llama"), 1))

    net = made()
    optimizer = AdamW(net.parameters())
    net.resize_token_embeddings(70, mean_resizing=False)
    if tied:  # transformers then keeps the parameter
        MixedPrecision(net, optimizer, mode)
    else:
        with pytest.raises(SettingError, match=r"no longer has, and not .* \(70, 32\)"):
            MixedPrecision(net, optimizer, mode)
        assert {each.dtype for each in net.parameters()} == {torch.float32}


def test_other_parameters_of_an_optimizer_are_no_embeddings() -> None:
    net = model("bert")
    net.get_input_embeddings().weight.requires_grad_(False)
    extra = nn.Parameter(torch.ones(5, 32))  # of a loss
    mp = MixedPrecision(net, AdamW([*net.cls.parameters(), extra]), "fp16")
    list(losses(net, mp, batch("bert"), 1))
    net.get_input_embeddings().weight.requires_grad_(True)
    list(losses(net, mp, batch("bert"), 1))


def test_embeddings_that_are_computed_are_not_replaced() -> None:
    net = model("llama")
    nn.utils.parametrizations.weight_norm(net.lm_head)
    list(losses(net, precision(net, "fp16"), batch("llama"), 2))


@pytest.mark.parametrize("mode", ["fp16", "fp16-master"])
def test_embeddings_of_a_sharded_model_are_left_alone(mode: str, one_rank: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model("llama"), mesh=init_device_mesh("cpu", (1,)))
    net.set_reshard_after_backward(False)
    if mode == "fp16":
        list(losses(net, precision(net, mode), batch("llama"), 2))
    else:
        with pytest.raises(SettingError, match="is sharded, so it cannot be cast"):
            precision(net, mode)
