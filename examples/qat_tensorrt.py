"""Quantization-aware training in float16, exported for TensorRT: INT8 with learned step sizes.

A network learns by how many quarter turns a digit is rotated. See docs/how-to/quantize.md.
"""

import warnings
from collections import Counter
from copy import deepcopy

import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from gradscale.demo.digits import load_digits
from gradscale.torch import GradScaler

UNSEEN, IMAGES = load_digits().view(-1, 1, 8, 8).split([450, 1347])
BATCHES = ({0: torch.export.Dim("batch")},)


def int8(observer: type, scheme: torch.qscheme, **more: int) -> QuantizationSpec:
    """Symmetric INT8, as TensorRT requires, with a learned step size."""
    fake = pt2e.LearnableFakeQuantize.with_args(observer=observer, use_grad_scaling=True)
    return QuantizationSpec(torch.int8, fake, -127, 127, scheme, **more)


class TensorRTQuantizer(Quantizer):
    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        inputs = int8(pt2e.MinMaxObserver, torch.per_tensor_symmetric)
        weights = int8(pt2e.PerChannelMinMaxObserver, torch.per_channel_symmetric, ch_axis=0)
        for node in model.graph.nodes:
            if node.target in (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default):
                specs = {node.args[0]: inputs, node.args[1]: weights}
                note = QuantizationAnnotation(specs, _annotated=True)
                node.meta["quantization_annotation"] = note
        return model

    def validate(self, model: torch.fx.GraphModule) -> None: ...


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    every = [images.rot90(quarters, (2, 3)) for quarters in range(4)]
    return torch.cat(every), torch.arange(4).repeat_interleave(len(images))


def fit(model: nn.Module, steps: int, lr: float, half: bool = False) -> float:
    """Trains the model, and returns its accuracy on unseen images in percent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = GradScaler("cpu", enabled=half)
    scaler.follow(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps))
    torch.manual_seed(0)  # the same batches in float16 and in float32
    for _ in range(steps):
        inputs, quarters = turned(IMAGES[torch.randint(len(IMAGES), (32,))])
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            outputs = model(inputs)
        scaler.backward(nn.functional.cross_entropy(outputs.float(), quarters))
        scaler.apply(optimizer)
    inputs, quarters = turned(UNSEEN)
    return 100 * (model(inputs).argmax(1) == quarters).float().mean().item()


def quantized(net: nn.Module) -> torch.fx.GraphModule:
    """A copy of `net` with fake quantizers, with step sizes that are calibrated with the images."""
    inputs, _ = turned(IMAGES)
    graph = torch.export.export(deepcopy(net), (inputs,), dynamic_shapes=BATCHES)
    model = prepare_qat_pt2e(graph.module(), TensorRTQuantizer())
    for module in model.modules():
        if isinstance(module, pt2e.LearnableFakeQuantize):  # its kernels support only float32
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    model(inputs)
    return model.apply(pt2e.enable_range_learning)


def main(seed: int = 0, steps: int = 1000) -> None:
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(256, 4))
    fit(net, steps, lr=0.1)
    half = quantized(net)
    scores = fit(quantized(net), steps // 6, 0.02), fit(half, steps // 6, 0.02, half=True)
    for step in (param for name, param in half.named_parameters() if name.endswith(".scale")):
        step.data.abs_()  # one below 0 rounds alike, but convert_pt2e() needs it above
    inputs, _ = turned(UNSEEN)
    expected = half(inputs).detach().numpy()
    warnings.simplefilter("ignore", FutureWarning)  # the exporter uses deprecated functions
    final = torch.export.export(convert_pt2e(half), (inputs,), dynamic_shapes=BATCHES)
    program = torch.onnx.export(final, verbose=False).model_proto  # type: ignore[union-attr]
    (found,) = InferenceSession(program.SerializeToString()).run(None, {"input": inputs.numpy()})
    gap = abs(found - expected).max() / abs(expected).max()
    print("INT8 accuracy: {:.2f} % with float32, {:.2f} % with float16".format(*scores))
    print(f"ONNX differs by {gap:.2%}", Counter(node.op_type for node in program.graph.node))
    if not abs(scores[0] - scores[1]) < 1 or not gap < 0.02:
        raise SystemExit("float16, float32 and ONNX do not agree.")


if __name__ == "__main__":
    main()
