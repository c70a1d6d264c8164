"""Models of timm: outputs are tensors, tuples and lists of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.torch import MixedPrecision
from gradscale.torch.optim import AdamW

timm = pytest.importorskip("timm", reason="timm cannot be imported, or torchvision, which it needs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def last(output: Any) -> Tensor:
    """The scores, or the features of the last stage."""
    return output if isinstance(output, Tensor) else last(output[-1])


@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet10t", {"num_classes": 4}),
        ("resnet10t", {"features_only": True}),
        ("convnext_atto", {"num_classes": 4}),
        ("vit_tiny_patch16_224", {"num_classes": 4, "img_size": 32}),
        ("deit_tiny_distilled_patch16_224", {"num_classes": 4, "img_size": 32}),
    ],
)
def test_models_train(name: str, settings: dict[str, Any], mode: str) -> None:
    torch.manual_seed(0)
    net = timm.create_model(name, **settings).to(DEVICE).train()
    if hasattr(net, "set_distilled_training"):
        net.set_distilled_training(True)
    pictures = torch.randn(8, 3, 32, 32, device=DEVICE)
    mp = MixedPrecision(net, AdamW(net.parameters(), lr=1e-3), mode)
    losses = []
    for _ in range(20):
        with mp.autocast():
            output = net(pictures)
        score = last(output).float().flatten(1)[:, :4]
        loss = nn.functional.cross_entropy(score, torch.arange(8, device=DEVICE) % 4)
        mp.backward(loss)
        mp.step(clip_norm=1.0)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if mode != "fp16":
        parts = output if isinstance(output, list | tuple) else [output]
        assert {each.dtype for each in parts} == {torch.float32}
