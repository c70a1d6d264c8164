"""What a test needs of torch. Where this torch does not have it, the test is skipped, with the name
of what is missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.pipelining import PipelineStage
from torch.optim import SGD

from gradscale.torch import features
from sharded_names import FSDP2_ON_THE_CPU


def fsdp2_on_the_cpu() -> None:
    """FSDP2 without an accelerator (after torch 2.8)."""
    if not FSDP2_ON_THE_CPU:
        pytest.skip("needs FSDP2 on the CPU")


def fully_shard() -> None:
    """FSDP2 by its public name (torch 2.6)."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("needs torch.distributed.fsdp.fully_shard", allow_module_level=True)


def grad_dtype() -> None:
    """Gradients in another format than their weight (torch 2.10)."""
    if not features.HAS_GRAD_DTYPE:
        pytest.skip("needs Tensor.grad_dtype")


def full_graph(function: Callable[..., Any], *args: Any) -> bool:
    """Whether this torch traces `function`, which is what a model needs to be one graph."""
    try:
        torch.compile(function, backend="eager", fullgraph=True)(*args)
    except torch._dynamo.exc.Unsupported:
        assert torch.__version__ < (2, 13), "the pinned torch traces it"
        return False
    return True


def input_metadata() -> None:
    """Nodes of autograd that say which gradients they take (torch 2.6, not torch 2.4)."""
    if not hasattr((torch.ones(1, requires_grad=True) * 2).grad_fn, "_input_metadata"):
        pytest.skip("needs Node._input_metadata", allow_module_level=True)


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


def pipeline_stages() -> None:
    """Pipeline stages that find the shapes of their inputs out by themselves (torch 2.6)."""
    if inspect.signature(PipelineStage).parameters["input_args"].default is not None:
        pytest.skip("needs a PipelineStage without input_args")


def replaced_weights_in_graphs() -> None:
    """Compiled models that use weights which hooks have replaced (torch 2.5)."""
    if not features.TRACES_REPLACED_WEIGHTS:
        pytest.skip("needs torch.compile to trace weights that hooks replace")


def reasons_of_graph_breaks() -> None:
    """`torch.compiler.disable(reason=...)` (torch 2.8)."""
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip("needs torch.compiler.disable(reason=...)")


def stances_of_the_compiler() -> None:
    """`torch.compiler.set_stance()` (torch 2.6)."""
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("needs torch.compiler.set_stance")
