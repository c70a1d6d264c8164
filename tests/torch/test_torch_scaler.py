"""`GradScaler.from_torch()`: our scaler goes on where torch's is, and refuses what it cannot do."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from gradscale import CallOrderError, Headroom, SettingError
from gradscale.torch import GradScaler, ShardedGradScaler, replace

SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**20,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
}


def deprecated(kind: Any, *args: Any, **settings: Any) -> Any:
    """A scaler of a class that torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return kind(*args, **settings)


def settings_of(scaler: Any) -> tuple[Any, ...]:
    return (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
        scaler._get_growth_tracker(),
        scaler.is_enabled(),
        scaler._device,
    )


class Loop:
    """A model and torch's loop, with a loss that overflows in some steps."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))
        self.optimizer = torch.optim.SGD([self.weight], lr=2.0**-6, momentum=0.5)

    def step(self, number: int) -> tuple[float, list[float]]:
        """The scale and the weights after a step."""
        self.optimizer.zero_grad()
        factor = 2.0**110 if number % 5 == 3 else 1.0
        loss = (self.weight.square() * factor).sum()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale(), self.weight.tolist()


@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_it_goes_on_as_torchs_would(steps: int) -> None:
    theirs, ours = (Loop(torch.amp.GradScaler("cpu", **SETTINGS)) for _ in range(2))
    for number in range(steps):
        assert theirs.step(number) == ours.step(number)
    ours.scaler = GradScaler.from_torch(ours.scaler)
    assert type(ours.scaler) is GradScaler
    assert settings_of(ours.scaler) == settings_of(theirs.scaler)
    history = [(theirs.step(n), ours.step(n)) for n in range(steps, steps + 12)]
    assert all(one == other for one, other in history)
    assert len({scale for (scale, _), _ in history}) == 2  # it fell and grew


def test_the_scaler_that_is_read_stays_as_it_is() -> None:
    theirs = Loop(torch.amp.GradScaler("cpu", **SETTINGS))
    theirs.step(0)
    before = copy.deepcopy(vars(theirs.scaler))
    ours = Loop(GradScaler.from_torch(theirs.scaler))
    ours.scaler.set_growth_interval(9)
    ours.step(3)
    assert ours.scaler.get_scale() != theirs.scaler.get_scale()
    assert vars(theirs.scaler) == before


@pytest.mark.parametrize("kind", [torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler])
def test_the_deprecated_classes_of_torch_are_taken(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else torch's switches itself off without CUDA.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    theirs = deprecated(kind, **SETTINGS)
    ours = GradScaler.from_torch(theirs)
    assert settings_of(ours) == settings_of(theirs)
    assert ours._device in ("cuda", "cpu")


def test_the_sharded_class_of_torch_becomes_ours(one_rank: Any) -> None:
    theirs = TorchSharded("cpu", process_group=one_rank, **SETTINGS)
    for ours in (GradScaler.from_torch(theirs), ShardedGradScaler.from_torch(theirs)):
        assert type(ours) is ShardedGradScaler
        assert settings_of(ours) == settings_of(theirs)
        groups = ours._pipeline.consensus.groups
        assert groups.sharded
        assert [group.process() for group in groups._known] == [one_rank]

    class Mine(GradScaler):
        pass

    with pytest.raises(SettingError, match=r"not a Mine. Call ShardedGradScaler\.from_torch"):
        Mine.from_torch(theirs)
    assert type(ShardedGradScaler.from_torch(torch.amp.GradScaler("cpu"))) is ShardedGradScaler


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, TorchSharded])
def test_a_disabled_scaler_stays_disabled(kind: Any) -> None:
    ours = GradScaler.from_torch(kind("cpu", enabled=False))
    assert not ours.is_enabled()
    assert ours.state_dict() == {}
    loss = torch.ones(())
    assert ours.scale(loss) is loss


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**80, 3.0])
def test_a_scale_outside_our_bounds_is_kept(scale: float) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=scale)
    assert GradScaler.from_torch(theirs).get_scale() == scale
    theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": 2001})
    assert GradScaler.from_torch(theirs)._get_growth_tracker() == 2001


@pytest.mark.parametrize("scale", [0.0, torch.inf, torch.nan])
def test_a_scale_that_is_none_is_an_error(scale: float) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=scale)
    with pytest.raises(SettingError, match=rf"from_torch\(\): init_scale must be .*{scale}"):
        GradScaler.from_torch(theirs)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_the_middle_of_an_iteration_is_an_error(call: str) -> None:
    loop = Loop(torch.amp.GradScaler("cpu"))
    loop.scaler.scale(loop.weight.sum()).backward()
    getattr(loop.scaler, call)(loop.optimizer)
    with pytest.raises(CallOrderError, match=r"Call scaler\.update\(\) first"):
        GradScaler.from_torch(loop.scaler)
    if call == "unscale_":
        loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert GradScaler.from_torch(loop.scaler).get_scale() == loop.scaler.get_scale()


def test_a_scaler_of_ours_is_copied() -> None:
    class Mine(GradScaler):
        pass

    ours = Mine("cpu", policy=Headroom())
    ours.load_state_dict(ours.state_dict())
    made = GradScaler.from_torch(ours)
    assert type(made) is Mine
    assert made is not ours
    assert made.state_dict() == ours.state_dict()
    made._lazy_init_scale_growth_tracker(torch.device("cpu"))
    made.update(2.0)
    assert ours.get_scale() != 2.0
    with pytest.raises(SettingError, match=r"gradscale\.torch\.scaler\.GradScaler"):
        Mine.from_torch(GradScaler("cpu"))


class Theirs(torch.amp.GradScaler):
    """What somebody made of torch's class."""


@pytest.mark.parametrize("what", [Theirs("cpu"), nn.Linear(1, 1), None, {}])
def test_other_classes_are_an_error_that_names_them(what: Any) -> None:
    with pytest.raises(SettingError, match=rf"{type(what).__qualname__}.*load_state_dict"):
        GradScaler.from_torch(what)


def test_inside_replace_it_takes_either() -> None:
    theirs = torch.amp.GradScaler("cpu", **SETTINGS)
    with replace():
        assert type(GradScaler.from_torch(theirs)) is GradScaler
        replaced = torch.amp.GradScaler(device="cpu", **SETTINGS)
        assert isinstance(replaced.from_torch(theirs), GradScaler)
        assert settings_of(GradScaler.from_torch(replaced)) == settings_of(theirs)


def test_it_survives_a_pickle() -> None:
    ours = GradScaler.from_torch(torch.amp.GradScaler("cpu", **SETTINGS))
    assert settings_of(pickle.loads(pickle.dumps(ours))) == settings_of(ours)


@pytest.mark.gpu
def test_a_scale_on_the_gpu_is_taken_over() -> None:
    theirs = torch.amp.GradScaler("cuda", **SETTINGS)
    weight = torch.ones(4, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step(scaler: Any) -> Tensor:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return weight.detach().clone()

    step(theirs)
    ours = GradScaler.from_torch(theirs)
    assert settings_of(ours) == settings_of(theirs)
    step(ours)
    assert ours.get_scale() == theirs.get_scale()
    assert ours._get_growth_tracker() == 2
