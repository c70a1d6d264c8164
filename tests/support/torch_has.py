"""What a test needs of torch. Where this torch does not have it, the test is skipped, with the name
of what is missing."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed.fsdp
from torch.optim import SGD

from gradscale.torch import features


def fully_shard() -> None:
    """FSDP2 by its public name (torch 2.6), and with it on the CPU."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("needs torch.distributed.fsdp.fully_shard", allow_module_level=True)


def grad_dtype() -> None:
    """Gradients in another format than their weight (torch 2.10)."""
    if not features.HAS_GRAD_DTYPE:
        pytest.skip("needs Tensor.grad_dtype")


def named_parameters() -> None:
    """Optimizers that take names with their parameters (torch 2.6)."""
    try:
        SGD([("w", torch.ones(1, requires_grad=True))], lr=1.0)
    except TypeError:
        pytest.skip("needs optimizers that take names of parameters")


def operators_in_graphs() -> None:
    """Operators of ours in compiled functions (torch 2.8)."""
    if not features.COMPILES_OPERATORS:
        pytest.skip("needs torch.Tag.cudagraph_unsafe", allow_module_level=True)


def reasons_of_graph_breaks() -> None:
    """`torch.compiler.disable(reason=...)` (torch 2.8)."""
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip("needs torch.compiler.disable(reason=...)")
