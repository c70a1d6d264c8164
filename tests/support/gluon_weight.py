"""A Gluon trainer of one weight whose gradient is known: it is `x` for the loss `weight * x`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon, nd

from gradscale.compat import mxnet as amp


class GluonWeight:
    """A weight of two elements, 0 at first, and its trainer: SGD with a learning rate of 1."""

    def __init__(
        self,
        policy: Any = None,
        *,
        devices: Sequence[Any] = (),
        grad_req: str = "write",
        dtype: str = "float32",
        optimizer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.devices = list(devices) or [mx.cpu()]
        self.weight = gluon.Parameter("weight", shape=(2,), grad_req=grad_req, dtype=dtype)
        self.weight.initialize(mx.init.Zero(), ctx=self.devices)
        settings = {"learning_rate": 1.0, **(optimizer or {})}
        self.trainer = gluon.Trainer([self.weight], "sgd", settings, **options)
        self.scaler: Any = None if policy is None else amp.init_trainer(self.trainer, policy)

    def losses(self, xs: Sequence[float]) -> list[Any]:
        """The loss on each device; to be called inside of autograd.record()."""
        there = zip(xs, self.devices, strict=True)
        kind = self.weight.dtype
        return [
            (self.weight.data(device) * nd.full((2,), x, ctx=device, dtype=kind)).sum()
            for x, device in there
        ]

    def backward(self, *xs: float, api: Any = amp) -> None:
        """Runs the backward pass of a scaled loss whose gradient is `x`, on each device."""
        with autograd.record(), api.scale_loss(self.losses(xs), self.trainer) as scaled:
            autograd.backward(scaled)

    def step(self, *xs: float, batch_size: int = 1, api: Any = amp) -> bool:
        """A whole iteration; whether it was applied, by what it did to the weight."""
        before = self.value
        self.backward(*xs, api=api)
        self.trainer.step(batch_size)
        return self.value != before

    @property
    def value(self) -> list[float]:
        """The elements of the weight on all devices."""
        return [number for data in self.weight.list_data() for number in data.asnumpy().tolist()]

    @property
    def gradient(self) -> list[float]:
        """The elements of the gradient on all devices."""
        return [number for grad in self.weight.list_grad() for number in grad.asnumpy().tolist()]
