"""What public training scripts do with Apex, line by line, after `install()`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscale.compat.apex as compat

pytestmark = pytest.mark.usefixtures("fresh_amp")
LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def _installed(fresh_amp: None) -> None:
    """`import apex` gives ours."""
    compat.install()


def network() -> nn.Sequential:
    """A small classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    torch.manual_seed(1)
    return [(torch.randn(16, 4), torch.randint(0, 2, (16,))) for _ in range(count)]


def weights(model: nn.Module) -> list[Any]:
    """Its parameters as numbers."""
    return [param.tolist() for param in model.parameters()]


def test_imports_of_examples_for_imagenet() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "import apex\n"
        "from apex.parallel import DistributedDataParallel as DDP\n"
        "from apex.fp16_utils import *\n"
        "from apex import amp, optimizers\n"
        "from apex.multi_tensor_apply import multi_tensor_applier\n"
        "from apex.parallel.LARC import LARC\n",
        namespace,
    )
    assert namespace["multi_tensor_applier"].available is False
    assert namespace["LARC"].__name__ == "LARC"


def test_state_is_found_by_every_path() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "import apex, apex.amp, apex.amp._amp_state, apex.amp.frontend, apex.amp.handle\n"
        "from apex import amp\n"
        "from apex.amp import _amp_state\n"
        "from apex.amp._amp_state import _amp_state as by_module, master_params\n"
        "from apex.amp.frontend import initialize, load_state_dict, state_dict\n"
        "from apex.amp.handle import scale_loss, disable_casts, AmpHandle, NoOpHandle\n"
        "from apex.amp.opt import OptimWrapper\n"
        "from apex.amp.scaler import LossScaler\n"
        "from apex.amp import amp as inner\n"
        "import apex.parallel.LARC, apex.parallel.distributed\n"
        "LARC = apex.parallel.LARC.LARC\n",
        namespace,
    )
    ours = compat.amp
    assert namespace["_amp_state"] is namespace["by_module"] is ours._amp_state
    assert namespace["apex"].amp._amp_state is ours._amp_state
    for name in ("master_params", "initialize", "state_dict", "load_state_dict", "scale_loss"):
        assert namespace[name] is getattr(ours, name)
    assert namespace["inner"].half_function is ours.half_function


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_vision_transformer_script(level: str, one_rank: Any) -> None:
    # Sets the scale, accumulates, clips by master_params, and wraps after initialize.
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = amp.initialize(models=model, optimizers=optimizer, opt_level=level)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**10
    with pytest.warns(UserWarning, match="has no message_size, gradient_predivide_factor; "):
        model = DDP(model, message_size=250000000, gradient_predivide_factor=1 + 1)
    seen = []
    for step, (x, y) in enumerate(batches()):
        loss = nn.functional.cross_entropy(model(x), y) / 2
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            seen.append(scaled_loss.item() / loss.item())
        if (step + 1) % 2 == 0:
            norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            assert 0 < norm < 10
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert seen == pytest.approx([2**10] * 6, rel=2**-22)  # a product and a quotient are rounded
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2**10


@pytest.mark.parametrize("level", LEVELS)
def test_self_supervised_script_with_larc(level: str) -> None:
    # Sets the learning rate of param_groups, saves and resumes all three states.
    import apex
    from apex.parallel.LARC import LARC

    def begin() -> tuple[nn.Module, Any]:
        model = network()
        optimizer: Any = torch.optim.SGD(
            model.parameters(), lr=0.4, momentum=0.9, weight_decay=1e-6
        )
        optimizer = LARC(optimizer=optimizer, trust_coefficient=0.001, clip=False)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level)
        for scaler in apex.amp._amp_state.loss_scalers:
            scaler._loss_scale = 2.0**8
        return model, optimizer

    def train(model: nn.Module, optimizer: Any, data: Any) -> None:
        for iteration, (x, y) in enumerate(data):
            for param_group in optimizer.param_groups:
                param_group["lr"] = 0.4 * (iteration + 1)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            for name, param in model.named_parameters():
                if name.startswith("3.bias"):
                    param.grad = None
            optimizer.step()

    data = batches()
    model, optimizer = begin()
    train(model, optimizer, data[:3])
    saved = copy.deepcopy(
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": apex.amp.state_dict(),
        }
    )
    train(model, optimizer, data[3:])
    want = weights(model)
    model, optimizer = begin()
    for key, value in (("state_dict", model), ("optimizer", optimizer), ("amp", apex.amp)):
        value.load_state_dict(saved[key])
    train(model, optimizer, data[3:])
    assert weights(model) == want
    assert optimizer.optim.param_groups[0]["weight_decay"] == 1e-6


@pytest.mark.parametrize("enabled", [True, False])
def test_script_with_a_handle(enabled: bool) -> None:
    from apex import amp

    amp_handle = amp.init(enabled=enabled)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = weights(model)
    for x, y in batches():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    assert all(a != b for a, b in zip(weights(model), before, strict=True))


def test_language_model_script_resumes_its_masters() -> None:
    # Saves amp.master_params by itself, and puts them back by Apex' own names.
    from apex import amp

    def begin(state: Any = None) -> tuple[nn.Module, Any]:
        model = network()
        if state is not None:
            model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return amp.initialize(  # type: ignore[no-any-return]
            model, optimizer, opt_level="O2", loss_scale=256.0, master_weights=True
        )

    def train(model: nn.Module, optimizer: Any, data: Any) -> None:
        for x, y in data:
            loss = nn.functional.cross_entropy(model(x), y)
            with amp.scale_loss(loss, optimizer, delay_overflow_check=False) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            for param in model.parameters():
                param.grad = None

    data = batches()
    model, optimizer = begin()
    train(model, optimizer, data[:3])
    checkpoint = copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
        }
    )
    train(model, optimizer, data[3:])
    want = [param.tolist() for param in amp.master_params(optimizer)]
    model, optimizer = begin(checkpoint["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(
        amp.master_params(optimizer), checkpoint["master params"], strict=True
    ):
        param.data.copy_(saved_param.data)
    train(model, optimizer, data[3:])
    assert [param.tolist() for param in amp.master_params(optimizer)] == want


def test_script_asks_whether_amp_is_on() -> None:
    from apex import amp

    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(amp._amp_state, "loss_scalers")
    assert not hasattr(amp._amp_state, "handle")
    amp.initialize(network(), enabled=False)
    assert hasattr(amp._amp_state, "opt_properties")
    assert not amp._amp_state.opt_properties.enabled
    amp.initialize(network(), opt_level="O1")
    assert hasattr(amp._amp_state, "handle")
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 0.01
        scaler._scale_seq_len = 300
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 0.01
    options = amp._amp_state.opt_properties.options
    assert (options["cast_model_type"], options.get("cast_model_outputs")) == (None, None)


def test_script_registers_functions_and_decorates_its_own(monkeypatch: Any) -> None:
    from apex import amp

    monkeypatch.setattr(torch, "einsum", torch.einsum)  # put back whatever happens
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(torch, "sigmoid")
    seen: dict[str, torch.dtype] = {}

    class Norm(nn.Module):
        @amp.float_function
        def forward(self, x: Tensor) -> Tensor:
            seen["float"] = x.dtype
            return x / ((x**2).mean(dim=1, keepdim=True) + 1e-8) ** 0.5

    class Scaled(torch.autograd.Function):
        @staticmethod
        @amp.float_function
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen["function"] = x.dtype
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * 2

    @amp.promote_function
    def add(x: Tensor, y: Tensor) -> Tensor:
        seen["promote"] = x.dtype
        return x + y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), Norm()

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            seen["linear"] = x.dtype
            seen["einsum"] = torch.einsum("ij,jk->ik", x.float(), self.linear.weight).dtype
            seen["sigmoid"] = torch.sigmoid(x).dtype
            return add(Scaled.apply(self.norm(x)).half(), x.float())

    model = amp.initialize(Net(), opt_level="O1")
    model(torch.randn(2, 4)).sum().backward()
    assert seen == {
        "linear": torch.float16,
        "einsum": torch.float16,
        "sigmoid": torch.float32,
        "float": torch.float32,
        "function": torch.float32,
        "promote": torch.float32,
    }


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_script_accumulates(level: str, delay: bool) -> None:
    from apex import amp

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0)
    reference = copy.deepcopy(model)
    (first, second, *_) = batches()
    for x, y in (first, second):
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and x is first[0]) as scaled_loss:
            scaled_loss.backward()
        nn.functional.cross_entropy(reference(x), y).backward()
    want, got = (
        torch.cat([param.grad.float().flatten() for param in params]).norm()
        for params in (reference.parameters(), amp.master_params(optimizer))
    )
    # Without a scale small ones are rounded more: at most eight roundings by 2**-11 in a row.
    assert got.item() == pytest.approx(want.item(), rel=2**-8)
    optimizer.step()


def test_script_broadcasts_and_averages_flat_tensors(one_rank: Any) -> None:
    import apex
    from apex.parallel.distributed import flat_dist_call

    tensors = [torch.ones(2, 3), torch.full((2,), 2.0, dtype=torch.float16), torch.full((1,), 3.0)]
    want = [tensor.tolist() for tensor in tensors]
    flat_dist_call([t.data for t in tensors], torch.distributed.broadcast, (0,))
    assert [tensor.tolist() for tensor in tensors] == want
    apex.parallel.distributed.flat_dist_call(tensors, torch.distributed.all_reduce)
    assert [tensor.tolist() for tensor in tensors] == want
    calls: list[tuple[torch.dtype, int]] = []

    def double(flat: Tensor, extra: int = 0) -> None:
        calls.append((flat.dtype, flat.numel() + extra))
        flat.mul_(2)

    flat_dist_call(tensors, functools.partial(double), (10,))
    assert calls == [(torch.float32, 17), (torch.float16, 12)]
    assert tensors[2].tolist() == [6.0]


def test_script_converts_batch_norms(one_rank: Any) -> None:
    import apex

    group = apex.parallel.create_syncbn_process_group(1)
    model = apex.parallel.convert_syncbn_model(network(), process_group=group)
    assert isinstance(model[1], apex.parallel.SyncBatchNorm)
    assert model.eval()(torch.ones(2, 4)).shape == (2, 2)  # torch trains them on GPUs alone
