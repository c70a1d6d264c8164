"""The shapes of the parameters of well-known models."""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]

SEVEN_B_LAYERS = 32


def gpt2(layers: int, width: int) -> Shapes:
    """The parameters of a GPT-2."""
    w = width
    block = [(w,), (w,), (w, 3 * w), (3 * w,), (w, w), (w,), (w,), (w,), (w, 4 * w), (4 * w,)]
    return [(50257, w), (1024, w), *[*block, (4 * w, w), (w,)] * layers, (w,), (w,)]


def resnet50() -> Shapes:
    """The parameters of a ResNet-50."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, size in ((width, inputs, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def seven_b(layers: int = SEVEN_B_LAYERS) -> Shapes:
    """The parameters of a model like LLaMA 7B, with as many layers as asked for."""
    width, hidden, words = 4096, 11008, 32000
    attention, perceptron = [(width, width)] * 4, [(hidden, width)] * 2 + [(width, hidden)]
    block: Shapes = [*attention, *perceptron, (width,), (width,)]
    return [(words, width), *block * layers, (width,), (words, width)]


def size(shapes: Shapes) -> int:
    """How many parameters there are."""
    return sum(map(math.prod, shapes))


def seven_b_layers(free: int) -> int:
    """How many layers of `seven_b` can be trained in `free` bytes of memory, all of them at most.

    Parameters, gradients and both averages of AdamW in float32 are 16 bytes each; a tenth of the
    memory stays free.
    """
    fit = [n for n in range(1, SEVEN_B_LAYERS + 1) if 16 * size(seven_b(n)) <= 0.9 * free]
    return max(fit, default=0)
