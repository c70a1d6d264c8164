"""`replace()`: code that imports torch's scaler inside gets ours, and nothing stays behind."""

from __future__ import annotations

import abc
import copy
import importlib
import inspect
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gradscale as gs
import gradscale.torch
from gradscale import SettingError
from gradscale.torch import GradScaler, ShardedGradScaler, replace
from gradscale.torch.construction import measure_more

NAMES = [
    "torch.GradScaler",
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.cpu.amp.GradScaler",
    "torch.cpu.amp.grad_scaler.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
]


def named(place: str) -> Any:
    """What has this name now."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def made(kind: Any, *args: Any, **settings: Any) -> Any:
    """A scaler on the CPU, whatever the class takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two are deprecated, and one does nothing without CUDA
        if list(inspect.signature(kind).parameters)[:1] == ["device"]:
            return kind("cpu", *args, **settings)
        return kind(*args, **settings)


TORCHS = {place: named(place) for place in NAMES}


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    yield
    assert {place: named(place) for place in NAMES} == TORCHS


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Imports a module that is written to a file."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name: str, source: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        names.append(name)
        return importlib.import_module(name)

    yield write  # type: ignore[misc]
    for name in names:
        del sys.modules[name]


TRAINER = """
import torch
import torch.cuda.amp
from torch import GradScaler as Short
from torch.amp import GradScaler
from torch.amp.grad_scaler import GradScaler as Deep
from torch.cuda.amp import GradScaler as Cuda
from torch.cpu.amp import GradScaler as Cpu
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

def train(scaler, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler

def run(model, data):
    return train(GradScaler("cpu", init_scale=4.0), model, data)

def by_attribute():
    return torch.amp.GradScaler("cpu")
"""


def test_a_module_that_is_imported_inside_trains_with_ours(written: Any) -> None:
    with replace():
        trainer = written("trainer_inside", TRAINER)
        assert isinstance(trainer.by_attribute(), GradScaler)
    # It keeps what it has imported, and no more.
    scaler = trainer.run(nn.Linear(2, 1), torch.ones(3, 4, 2))
    assert isinstance(scaler, GradScaler)
    assert scaler.get_scale() == 4.0
    assert scaler.outcome().applied
    for name in ("Short", "Deep", "Cuda", "Cpu"):
        assert issubclass(getattr(trainer, name), GradScaler), name
    assert issubclass(trainer.ShardedGradScaler, ShardedGradScaler)
    assert type(trainer.by_attribute()) is TORCHS["torch.amp.GradScaler"]


def test_a_module_that_was_imported_before_keeps_torchs(written: Any) -> None:
    trainer = written("trainer_before", TRAINER)
    with replace():
        scaler = trainer.run(nn.Linear(2, 1), torch.ones(3, 4, 2))
        assert type(scaler) is TORCHS["torch.amp.GradScaler"]
        assert isinstance(trainer.by_attribute(), GradScaler)  # it looks the name up


@pytest.mark.parametrize("place", NAMES)
def test_a_scaler_takes_what_torchs_takes_and_is_an_instance_of_it(place: str) -> None:
    torchs = TORCHS[place]
    with replace():
        kind = named(place)
        assert issubclass(kind, GradScaler)
        assert kind is not torchs
        assert issubclass(kind, torchs)
        scaler = made(kind, init_scale=8.0, growth_interval=7, enabled=True)
        assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 7)
        assert type(scaler) is kind
    # Outside the name is torch's again, and the scaler is an instance of that, too.
    for name in (torchs, named(place), TORCHS["torch.amp.GradScaler"], GradScaler):
        assert isinstance(scaler, name)
    again = pickle.loads(pickle.dumps(scaler))
    assert type(again) is type(copy.deepcopy(scaler)) is kind
    assert again.get_scale() == 8.0


def test_arguments_by_position_have_torchs_order() -> None:
    with replace():
        cuda = torch.cuda.amp.GradScaler(2.0, 4.0, 0.25, 5, False)
        plain = torch.amp.GradScaler("cpu", 2.0, 4.0, 0.25, 5)
        sharded = named(NAMES[-1])("cpu", 2.0, 0.25, 4.0, 5)
    assert not cuda.is_enabled()
    for scaler in (plain, sharded):
        found = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()
        assert (*found, scaler.get_growth_interval()) == (2.0, 4.0, 0.25, 5)
    with replace():
        assert torch.cuda.amp.GradScaler(2.0)._device == "cuda"
        assert torch.cpu.amp.grad_scaler.GradScaler(2.0)._device == "cpu"
        with pytest.raises(SettingError, match="growth_factor"):
            torch.cuda.amp.GradScaler(2.0, 0.5)


@pytest.mark.parametrize("place", NAMES)
def test_isinstance_has_torchs_answers_inside(place: str) -> None:
    scalers = {name: made(kind) for name, kind in TORCHS.items()}
    scalers["gradscale"] = GradScaler("cpu")
    outside = {name: isinstance(scaler, named(place)) for name, scaler in scalers.items()}
    with replace():
        inside = {name: isinstance(scaler, named(place)) for name, scaler in scalers.items()}
        assert not isinstance(nn.Linear(1, 1), named(place))
        assert not issubclass(int, named(place))
    assert inside == outside
    assert outside[place]


def test_ours_is_no_wider_inside() -> None:
    with replace():
        theirs = TORCHS["torch.amp.GradScaler"]("cpu")
        assert not isinstance(theirs, GradScaler)
        assert isinstance(theirs, torch.amp.GradScaler)


def test_a_class_that_is_derived_inside_is_one_of_ours(written: Any) -> None:
    source = (
        "import abc\nfrom torch.amp import GradScaler\n"
        "class Mine(GradScaler, abc.ABC):\n"
        "    def __init__(self, device):\n        super().__init__(device, init_scale=32.0)\n"
    )
    with replace():
        kind = written("derived_inside", source).Mine
        theirs = TORCHS["torch.amp.GradScaler"]("cpu")
        assert isinstance(kind("cpu"), torch.amp.GradScaler)
        assert not isinstance(torch.amp.GradScaler("cpu"), kind)
        assert not isinstance(theirs, kind)
    scaler = kind("cpu")
    assert isinstance(scaler, (GradScaler, abc.ABC))
    assert isinstance(scaler, kind)
    assert scaler.get_scale() == 32.0


def test_blocks_nest_and_an_exception_ends_them() -> None:
    def fail(wanted: dict[str, Any]) -> None:
        with replace():
            assert {place: named(place) for place in NAMES} == wanted
            raise KeyError

    with replace():
        inside = {place: named(place) for place in NAMES}
        with pytest.raises(KeyError):
            fail(inside)
        assert {place: named(place) for place in NAMES} == inside
    with pytest.raises(KeyError):
        fail(inside)
    assert torch.amp.GradScaler is TORCHS["torch.amp.GradScaler"]

    @replace()
    def train() -> Any:
        return torch.amp.GradScaler("cpu")

    assert isinstance(train(), GradScaler)


def test_blocks_of_threads_may_end_in_any_order() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with replace():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with replace():
        thread.start()
        assert entered.wait(60)
    assert issubclass(torch.amp.GradScaler, GradScaler)  # the other one goes on
    leave.set()
    thread.join()
    assert torch.amp.GradScaler is TORCHS["torch.amp.GradScaler"]


def test_a_name_that_is_changed_inside_is_restored() -> None:
    with replace():
        torch.amp.GradScaler = int  # type: ignore[misc, assignment]
    assert torch.amp.GradScaler is TORCHS["torch.amp.GradScaler"]


def test_trainers_that_look_the_name_up_get_ours() -> None:
    pytest.importorskip("accelerate")
    from accelerate.utils import GradScalerKwargs
    from accelerate.utils.modeling import get_grad_scaler

    with replace():
        scaler = get_grad_scaler(None, **GradScalerKwargs(init_scale=16.0).to_kwargs())
    assert isinstance(scaler, GradScaler)
    assert scaler.get_scale() == 16.0


def test_every_scaler_that_is_made_inside_is_announced(written: Any) -> None:
    seen: list[Any] = []
    derived = "from torch.amp import GradScaler\nclass Mine(GradScaler):\n    pass\n"
    with replace(on_new=seen.append):
        made_inside = [made(named(place)) for place in NAMES]
        made_inside += [written("announced", derived).Mine("cpu"), GradScaler("cpu")]
        copy.deepcopy(made_inside[0])  # not a new one
    GradScaler("cpu")
    assert list(map(id, seen)) == list(map(id, made_inside))


def test_a_policy_is_that_of_scalers_that_choose_none() -> None:
    with replace(policy="headroom"):
        plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        chosen = GradScaler("cpu", policy=gs.Static(init_scale=2.0))
        with replace(policy="dynamic"):
            inner = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        with replace():
            outer = torch.amp.GradScaler("cpu")
    assert plain.policy == gs.Headroom(init_scale=8.0)
    assert chosen.policy == gs.Static(init_scale=2.0)
    assert inner.get_growth_interval() == 3
    assert outer.policy == gs.Headroom()
    assert isinstance(GradScaler("cpu").policy, gs.Dynamic)
    with pytest.raises(SettingError, match="policy must be"), replace(policy="novel"):
        pass
    assert isinstance(GradScaler("cpu").policy, gs.Dynamic)


def test_more_is_measured_in_torchs_loop_where_it_is_asked_for() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 2.0**-13]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for asked in (False, True):
        scaler = GradScaler("cpu", init_scale=4.0)
        if asked:
            measure_more(scaler)
        weight.grad = None
        scaler.scale((weight * torch.tensor([8.0, 2.0**-20])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.outcome()
        assert (outcome.amax is not None) == (outcome.underflow is not None) == asked
    assert outcome.amax is not None
    assert outcome.underflow is not None
    assert (outcome.amax.item(), outcome.underflow.item()) == (32.0, 0.5)


def test_it_is_a_public_name() -> None:
    assert "replace" in gradscale.torch.__all__
