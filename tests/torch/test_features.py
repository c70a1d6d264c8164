"""What an older torch does not have: found out in one place, and refused where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscale import SettingError
from gradscale.torch import GradScaler, features
from gradscale.torch.blocks import BlockScales, hooks
from gradscale.torch.compile import ops
from gradscale.torch.grads import dispatch
from gradscale.torch.optim import Adam, AdamW, adam


def test_features_are_those_of_this_torch() -> None:
    version = torch.__version__
    assert (version >= (2, 5)) == features.TRACES_REPLACED_WEIGHTS
    assert (version >= (2, 7)) == features.ADAM_TAKES_DECOUPLED
    assert (version >= (2, 8)) == features.COMPILES_OPERATORS
    assert (version >= (2, 10)) == features.HAS_GRAD_DTYPE


def test_accelerator_is_found_without_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not features.accelerator(): of a build for CUDA, it is "cuda" without a GPU, too.
    there = "cuda" if torch.cuda.is_available() else None
    monkeypatch.delattr(torch, "accelerator", raising=False)
    assert features.accelerator.__wrapped__() == there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert features.accelerator.__wrapped__() == "cuda"


def test_reason_of_a_graph_break_is_left_out_where_torch_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda fn, *, reason: taken.append(reason) or fn)
    assert features.untraced(len, "why") is len
    monkeypatch.setattr(torch.compiler, "disable", lambda fn: taken.append(None) or fn)
    assert features.untraced(len, "why") is len
    assert taken == ["why", None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("operators", [False, features.COMPILES_OPERATORS])
def test_scale_and_apply_are_graph_breaks_without_operators(
    operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.update(str(node.target) for node in graph.graph.nodes)
        return graph

    def told(compile: bool) -> list[float]:
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 1), GradScaler("cpu", init_scale=4.0)
        optimizer = AdamW(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            scaler.scale(model(x).square().mean()).backward()
            scaler.apply(optimizer)

        body = torch.compile(step, backend=backend) if compile else step
        for number in range(3):
            body(torch.full((2, 3), float(number)))
        return [value for param in model.parameters() for value in param.view(-1).tolist()]

    monkeypatch.setattr(ops, "COMPILES_OPERATORS", operators)
    torch._dynamo.reset()
    assert told(True) == told(False)
    assert traced
    assert operators == any("gradscale" in target for target in traced)


def test_float16_blocks_are_refused_without_grad_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    monkeypatch.setattr(hooks, "HAS_GRAD_DTYPE", False)
    with pytest.raises(SettingError, match=r"grad_dtype.*float32 weights with autocast"):
        BlockScales(model, blocks=list(model))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["model", "block", "in place", "function"])
def test_compiled_blocks_are_refused_where_torch_compiles_the_wrong_weights(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "TRACES_REPLACED_WEIGHTS", False)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    BlockScales(model, blocks=list(model))
    call: Any = model
    if way == "model":
        call = torch.compile(model, backend="eager")
    elif way == "block":
        call = nn.Sequential(torch.compile(model[0], backend="eager"), model[1])
    elif way == "in place":
        model[0].compile(backend="eager")
    else:
        call = torch.compile(lambda x: model(x) + 1, backend="eager")
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(SettingError, match=r"BlockScales in a compiled function need torch 2\.5"):
        call(x)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x) + (way == "function"))


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_is_decoupled_where_torchs_adam_cannot(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "decoupled_weight_decay"  # torch before 2.7 has no such setting

    def stepped(kind: type[torch.optim.Adam], **settings: Any) -> list[float]:
        w = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = kind([w], lr=0.1, weight_decay=0.5, **settings)
        for _ in range(3):
            w.grad = w.detach() * 3.0
            optimizer.step()
        return w.tolist()

    expected = stepped(AdamW if decoupled else Adam)
    made = torch.optim.Adam.__init__

    def old_init(self: Any, *args: Any, **settings: Any) -> None:
        assert name not in settings
        made(self, *args, **settings)
        for where in (self.defaults, *self.param_groups):
            where.pop(name, None)

    monkeypatch.setattr(adam, "ADAM_TAKES_DECOUPLED", False)
    monkeypatch.setattr(torch.optim.Adam, "__init__", old_init)
    assert stepped(Adam, decoupled_weight_decay=decoupled) == expected
    optimizer = Adam([nn.Parameter(torch.ones(1))], decoupled_weight_decay=decoupled)
    assert optimizer.param_groups[0][name] is decoupled  # and so it is saved


def test_old_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    triton = pytest.importorskip("triton", minversion="3.4")
    package = dispatch.importlib.import_module("gradscale.torch.grads.triton")
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    monkeypatch.delattr(triton, "knobs", raising=False)
    with pytest.raises(ImportError, match=r"need Triton 3\.4 .* and this is Triton "):
        importlib.reload(package)
