"""Models under `amp` that return more than a tensor: any class, and those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradscale.compat.apex import amp
from output_classes import Net, every_kind, tensors

pytestmark = pytest.mark.usefixtures("fresh_amp")
torch.set_num_threads(1)


@every_kind
def test_outputs_leave_as_float32(make: Any) -> None:
    net = Net(make)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    output = net(torch.ones(2, 4))
    assert type(output).__name__ == type(make(torch.ones(2, 4))).__name__
    found = tensors(output)
    assert {each.dtype for each in found if each.is_floating_point()} == {torch.float32}
    assert net.layer.weight.dtype is torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_lowest_number_of_a_mask_stays_the_lowest(level: str) -> None:
    net = Net(lambda x: x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    net(torch.tensor([torch.finfo(torch.float32).min, -torch.inf, 1.0, 2.0]))
    assert net.given.tolist() == [-65504.0, -torch.inf, 1.0, 2.0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_models_of_transformers(name: str, level: str) -> None:
    pytest.importorskip("transformers")
    from pretrained_models import GENERATES, batch, model

    net, inputs = model(name), batch(name)
    # Without masters the smallest eps is 0 in float16.
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-4)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(8):
        output = net(**inputs)
        with amp.scale_loss(output.loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert output.logits.dtype is output["logits"].dtype is torch.float32
    loss, logits = net(**inputs, return_dict=False)[:2]
    assert loss.dtype is logits.dtype is torch.float32
    if name in GENERATES:
        del inputs["labels"]
        texts = net.eval().generate(**inputs, max_new_tokens=3, do_sample=False)
        assert len(texts) == len(inputs["input_ids"])
