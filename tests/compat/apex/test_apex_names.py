"""`install()`, and the names besides `amp`: fp16_utils, optimizers, parallel, normalization."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscale.compat.apex as compat
from gradscale.compat.apex import amp, fp16_utils, larc, optimizers, parallel
from gradscale.compat.apex.fp16_utils import FP16_Optimizer
from gradscale.errors import CallOrderError, SettingError, StateError
from programs import run_python

pytestmark = pytest.mark.usefixtures("fresh_amp")
HALF, FLOAT = torch.float16, torch.float32
APEX = [
    "apex",
    "apex.amp",
    "apex.fp16_utils",
    "apex.normalization",
    "apex.optimizers",
    "apex.parallel",
]


# Installing.


def test_import_alone_changes_nothing() -> None:
    program = (
        "import sys, torch; from torch import nn; before = torch.mm, nn.Module.__call__; "
        "import gradscale.compat.apex; "
        "assert 'apex' not in sys.modules; assert before == (torch.mm, nn.Module.__call__)"
    )
    done = run_python("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr


def test_installed_names_can_be_imported_in_every_way() -> None:
    apex = compat.install()
    assert compat.install() is apex
    for name in APEX:
        assert importlib.import_module(name).__name__ == name
        assert importlib.util.find_spec(name) is not None  # as transformers looks for it
    assert apex.amp.initialize is amp.initialize
    namespace: dict[str, Any] = {}
    exec(
        "import apex, apex.amp\n"
        "from apex import amp\n"
        "from apex.amp import _amp_state, scale_loss\n"
        "from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model\n"
        "from apex.fp16_utils import *\n"
        "from apex.fp16_utils.fp16_optimizer import FP16_Optimizer\n"
        "from apex.optimizers import FusedAdam, FusedSGD, FusedLAMB\n"
        "from apex.normalization import FusedLayerNorm\n",
        namespace,
    )
    assert namespace["network_to_half"] is fp16_utils.network_to_half


@pytest.mark.parametrize("name", ["apex.contrib", "apex.amp.lists", "apex.RNN"])
def test_what_there_is_not_is_an_import_error(name: str) -> None:
    compat.install()
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


def test_uninstall_leaves_no_trace() -> None:
    module: Any = types.SimpleNamespace(function=abs)
    before = set(sys.modules)
    compat.install()
    amp.register_half_function(module, "function")
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    assert module.function is not abs
    compat.uninstall()
    assert set(sys.modules) == before
    assert module.function is abs
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    assert module.function is abs
    compat.uninstall()


def test_another_apex_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("apex")
    monkeypatch.setitem(sys.modules, "apex", real)
    with pytest.raises(SettingError, match="before another apex is imported"):
        compat.install()
    compat.uninstall()
    assert sys.modules["apex"] is real


# FP16_Optimizer.


def half_line(**settings: Any) -> tuple[nn.Linear, FP16_Optimizer]:
    """A half layer with weights 1 and 2 and its optimizer."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0]])
    layer.half()
    return layer, FP16_Optimizer(torch.optim.SGD(layer.parameters(), lr=1.0), **settings)


def loss_of(layer: nn.Linear, *x: float) -> Tensor:
    """A loss whose gradients are `x`."""
    return layer(torch.tensor([x], dtype=HALF)).float().sum()


def master_grads(optimizer: FP16_Optimizer) -> list[float]:
    """The unscaled gradients."""
    found: Any = optimizer.inspect_master_grad_data()
    return found[0][0].flatten().tolist()  # type: ignore[no-any-return]


def test_fp16_optimizer_steps_masters() -> None:
    layer, optimizer = half_line(static_loss_scale=128.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(layer, 0.5, 0.25))
    assert master_grads(optimizer) == [0.5, 0.25]
    optimizer.step()
    assert layer.weight.tolist() == [[0.5, 1.75]]
    assert layer.weight.dtype is HALF
    assert optimizer.loss_scale == 128.0
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state


def test_fp16_optimizer_skips_an_overflow_and_lowers_the_scale() -> None:
    layer, optimizer = half_line(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 256.0})
    optimizer.backward(loss_of(layer, math.inf, 1.0))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert layer.weight.tolist() == [[1.0, 2.0]]
    assert optimizer.loss_scale == 128.0
    optimizer.zero_grad()
    optimizer.backward(loss_of(layer, 0.5, 0.5))
    assert not optimizer.overflow
    optimizer.step()
    assert layer.weight.tolist() == [[0.5, 1.5]]


def test_fp16_optimizer_adds_up_several_losses() -> None:
    layer, optimizer = half_line(static_loss_scale=8.0)
    optimizer.backward(loss_of(layer, 1.0, 0.0), update_master_grads=False)
    optimizer.backward(loss_of(layer, 0.5, 0.0), update_master_grads=False)
    optimizer.update_master_grads()
    assert master_grads(optimizer) == [1.5, 0.0]
    optimizer.update_master_grads()
    optimizer.backward(loss_of(layer, 0.0, 1.0))
    assert master_grads(optimizer) == [1.5, 1.0]
    optimizer.zero_grad()
    optimizer.backward(loss_of(layer, 0.25, 0.0))
    assert master_grads(optimizer) == [0.25, 0.0]


def test_fp16_optimizer_clips() -> None:
    layer, optimizer = half_line()
    optimizer.backward(loss_of(layer, 3.0, 4.0))
    assert float(optimizer.clip_master_grads(2.5)) == 5.0
    assert master_grads(optimizer) == pytest.approx([1.5, 2.0], rel=1e-5)


def test_fp16_optimizer_goes_on_from_a_checkpoint() -> None:
    dynamic = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0}}
    layer, optimizer = half_line(**dynamic)
    optimizer.backward(loss_of(layer, 2.0**-13, 0.5))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["fp32_from_fp16"][0][0].tolist() == [[1 - 2.0**-13, 1.5]]
    twin, its = half_line(**dynamic)
    twin.load_state_dict(layer.state_dict())
    its.loss_scale = 64.0
    its.load_state_dict(saved)
    assert its.loss_scale == 4.0
    masters = its.state_dict()["fp32_from_fp16"]
    assert masters[0][0].tolist() == [[1 - 2.0**-13, 1.5]]


def test_fp16_optimizer_refuses_what_it_cannot_do() -> None:
    layer, optimizer = half_line(static_loss_scale=2.0)
    with pytest.raises(CallOrderError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(CallOrderError, match=r"cannot be pickled. Save its state_dict\(\)"):
        copy.copy(optimizer)
    with pytest.raises(StateError, match="Nothing was loaded"):
        optimizer.load_state_dict({"loss_scaler": object()})
    saved = half_line(dynamic_loss_scale=True)[1].state_dict()
    with pytest.raises(StateError, match="has dynamic_loss_scale=True"):
        optimizer.load_state_dict(saved)
    with pytest.raises(SettingError, match="init_optimizer must be"):
        FP16_Optimizer(layer)  # type: ignore[arg-type]


def test_fp16_optimizer_trains_groups_that_are_added() -> None:
    layer, optimizer = half_line(static_loss_scale=2.0)
    more = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [more]})
    optimizer.backward(loss_of(layer, 0.5, 0.5) + 0.25 * more.sum())
    optimizer.step()
    assert more.tolist() == [0.75]
    assert layer.weight.tolist() == [[0.5, 1.5]]


# Networks and masters by hand.


def network() -> nn.Sequential:
    """A network with batch norms with and without weights."""
    norms = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
    return nn.Sequential(nn.Linear(2, 3), *norms, nn.GRU(3, 2))


def test_network_to_half_keeps_batch_norms() -> None:
    net = fp16_utils.network_to_half(network()[:2])
    assert net[1][0].weight.dtype is HALF
    assert net[1][1].weight.dtype is net[1][1].running_mean.dtype is FLOAT
    assert net(torch.randn(4, 2)).dtype is HALF


def test_convert_network_casts_all_but_batch_norms_with_weights() -> None:
    net = network()
    weight = net[0].weight
    assert fp16_utils.convert_network(net, HALF) is net
    assert net[0].weight is weight
    assert weight.dtype is net[3].weight_hh_l0.dtype is HALF
    assert net[1].weight.dtype is FLOAT
    assert net[2].running_mean.dtype is HALF
    assert net[2].num_batches_tracked.dtype is torch.int64


def test_fp16_model_casts_its_inputs() -> None:
    assert fp16_utils.FP16Model(nn.Linear(2, 1))(torch.randn(3, 2)).dtype is HALF


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_a_half_model(flat: bool) -> None:
    model = nn.Linear(2, 1).half()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    assert {master.dtype for master in masters} == {FLOAT}
    before = [param.detach().clone() for param in params]
    loss_of(model, 0.5, 0.25).backward()
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    torch.optim.SGD(masters, lr=1.0).step()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, (old.float() - param.grad.float()).half())  # type: ignore[union-attr]


def test_flat_masters_need_one_format() -> None:
    model = fp16_utils.convert_network(network(), HALF)
    with pytest.raises(SettingError, match="parameters of one dtype"):
        fp16_utils.prep_param_lists(model, flat_master=True)


def test_number_comes_out_of_a_tensor() -> None:
    assert fp16_utils.to_python_float(torch.tensor([1.5])) == 1.5
    assert fp16_utils.to_python_float([2.5]) == 2.5


def test_scales_by_hand_move_as_in_apex() -> None:
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=2)
    assert fp16_utils.DynamicLossScaler().loss_scale == 2.0**32
    seen = []
    for overflow in (False, False, True, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [4, 8, 4, 4, 8, 4, 2, 1, 1]
    param = nn.Parameter(torch.ones(1))
    assert not scaler.has_overflow([param])
    param.grad = torch.tensor([math.nan])
    assert scaler.has_overflow([param])
    static = fp16_utils.LossScaler(4.0)
    static.update_scale(True)
    assert not static.has_overflow([param])
    param.grad = None
    static.backward(param.sum())
    assert param.grad.tolist() == [4.0]  # type: ignore[attr-defined]
    assert static.scale_gradient(None, (torch.ones(1), None), None)[0].tolist() == [4.0]


# Optimizers.


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.5),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
        ),
        (
            lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.5, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, fused=True),
        ),
        (
            lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.5, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True, fused=True),
        ),
    ],
)
def test_fused_optimizer_is_torchs(ours: Any, theirs: Any) -> None:
    results = []
    for make in (ours, theirs):
        param = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = make([param])
        for grad in ([1.0, 2.0], [-3.0, 0.5]):
            param.grad = torch.tensor(grad)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.tensor([1.0, -2.0]))


def test_fused_optimizer_clears_gradients_as_asked() -> None:
    param = nn.Parameter(torch.ones(1))
    for optimizer, kept in (
        (optimizers.FusedAdam([param]), False),
        (optimizers.FusedAdam([param], set_grad_none=False), True),
        (optimizers.FusedSGD([param], lr=0.1), True),
        (optimizers.FusedSGD([param], lr=0.1, set_grad_none=True), False),
    ):
        param.grad = torch.ones(1)
        optimizer.zero_grad()
        assert (param.grad is not None) is kept
        copy.deepcopy(optimizer).zero_grad()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optimizers.FusedAdam(p, amsgrad=True), "amsgrad of FusedAdam must be False"),
        (lambda p: optimizers.FusedAdam(p, bias_correction=False), "bias_correction of FusedAdam"),
        (lambda p: optimizers.FusedSGD(p, lr=0.1, wd_after_momentum=True), "wd_after_momentum"),
        (lambda p: optimizers.FusedLAMB(p), r"no FusedLAMB. Use FusedAdam"),
        (lambda p: optimizers.FusedNovoGrad(p, lr=1), "no FusedNovoGrad"),
        (lambda p: optimizers.FusedAdagrad(p), r"no FusedAdagrad. Use torch.optim.Adagrad"),
        (lambda p: larc.LARC(p), "optimizer must be an optimizer of torch.optim, got list"),
        (lambda p: optimizers.multi_tensor_applier(p), "no multi_tensor_applier"),
        (lambda p: parallel.Reducer(p), "no Reducer"),
    ],
)
def test_what_has_no_equal_says_so(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make([nn.Parameter(torch.ones(1))])


# Several ranks.


def test_data_parallel_model_trains(one_rank: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0)
    wrapped = parallel.DistributedDataParallel(model, delay_allreduce=False)
    before = model.weight.detach().clone()
    loss = wrapped(torch.ones(3, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert [param.grad.tolist() for param in amp.master_params(optimizer)] == [[[3.0, 3.0]], [3.0]]
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_settings_for_speed_are_ignored_with_one_warning(one_rank: Any) -> None:
    with pytest.warns(UserWarning, match="has no message_size, delay_allreduce; ") as caught:
        parallel.DistributedDataParallel(nn.Linear(1, 1), delay_allreduce=True, message_size=1)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_average": False}, "gradient_average of DistributedDataParallel must be True"),
        ({"device_ids": [0]}, r"takes Apex' settings .* got device_ids"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parallel.DistributedDataParallel(nn.Linear(1, 1), **settings)


def test_batch_norms_over_all_ranks_are_torchs(one_rank: Any) -> None:
    model = parallel.convert_syncbn_model(network(), channel_last=True)
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert parallel.SyncBatchNorm is nn.SyncBatchNorm
    assert parallel.create_syncbn_process_group(0) is None
    assert torch.distributed.get_world_size(parallel.create_syncbn_process_group(1)) == 1
    with pytest.raises(SettingError, match="group_size must divide the number of ranks, 1, got 2"):
        parallel.create_syncbn_process_group(2)


def test_norms_are_torchs() -> None:
    assert compat.normalization.FusedLayerNorm is nn.LayerNorm
    assert compat.normalization.MixedFusedRMSNorm is nn.RMSNorm
