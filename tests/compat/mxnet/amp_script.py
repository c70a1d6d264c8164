"""A training script of MXNet, in a process of its own: `python amp_script.py bfloat16`.

`amp.init` replaces MXNet's operators for the whole process. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")  # MXNet's own, about numpy

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402

import gradscale as gs  # noqa: E402
from gradscale.compat import mxnet as amp  # noqa: E402

FIRST, WEIGHT = 2.0**110, 2.0**20
"""The first scale and the weight of the loss, which together leave the range of bfloat16. The scale
alone must not: MXNet refuses a `rescale_grad` below the smallest normal float32 number."""
CLASSES = 3


def spirals(count: int) -> tuple[Any, Any]:
    """Points on three arms of a spiral, and which arm they are on."""
    rng = np.random.RandomState(0)
    label = rng.randint(0, CLASSES, count)
    radius = rng.rand(count)
    angle = 3 * radius + 2 * np.pi * label / CLASSES + 0.05 * rng.randn(count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return nd.array(points), nd.array(label)


def train(target: str) -> dict[str, Any]:
    """What training in `target` led to."""
    if target != "float32":
        amp.init(target)
    mx.random.seed(0)
    data, label = spirals(600)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(64, activation="relu"))
    net.add(gluon.nn.Dense(CLASSES))
    net.initialize(mx.init.Xavier())
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    policy = gs.Dynamic(init_scale=FIRST, growth_interval=1000, max_scale=FIRST)
    scaler = amp.init_trainer(trainer, policy)
    state, agreed, skipped = policy.init(), [], 0
    for _ in range(150):
        with autograd.record():
            outputs = net(data)
            loss = loss_fn(outputs.astype("float32"), label) * WEIGHT
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(data))
        assert scaler.outcome is not None
        state = policy.update(state, gs.GradStats(finite=scaler.outcome.finite))
        agreed.append(scaler.state == state)
        skipped += not scaler.outcome.applied
    right = net(data).astype("float32").argmax(axis=1) == label
    return {
        "type": str(outputs.dtype),
        "accuracy": float(right.mean().asscalar()),
        "halvings": float(np.log2(FIRST / scaler.loss_scale)),
        "skipped": skipped,
        "agreed": all(agreed),
    }


def output_function() -> list[float]:
    """Gradients, without the scale, of an operator that multiplies its own gradient by it."""
    weight = gluon.Parameter("weight", shape=(1, 2))
    weight.initialize(mx.init.Zero())
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0})
    scaler = amp.init_trainer(trainer, gs.Dynamic(init_scale=2.0**4, growth_interval=1))
    found = []
    for _ in range(3):
        scale = scaler.loss_scale
        with autograd.record():
            outputs = nd.SoftmaxOutput(weight.data() * 1.0, nd.array([0]))
            with amp.scale_loss(outputs, trainer) as scaled:
                autograd.backward(scaled)
        found.append(float(weight.grad().asnumpy()[0, 1]) / scale)
        weight.set_data(nd.zeros((1, 2)))
        trainer.step(1)
        weight.set_data(nd.zeros((1, 2)))
    return found


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "output":
        amp.init("bfloat16")
        sys.stdout.write(json.dumps(output_function()))
    else:
        sys.stdout.write(json.dumps(train(kind)))
