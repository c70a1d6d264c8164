"""A skipped step leaves no trace: parameters, optimizer state and step counters stay bit-identical.

For every optimizer of torch.optim that takes dense gradients, in every form that runs on the CPU,
and for third-party ones. Each is spoilt with an infinity or a NaN in one gradient element,
then trained on beside a twin that never met it: from there on the two must agree in every bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

from gradscale.torch import GradScaler
from gradscale.torch.grads import dispatch
from gradscale.torch.state import ScaleState

# Looking.

Picture = dict[str, Any]


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The numbers in `value` by path, to be compared with `==`: which here means by bits.

    A tensor becomes its dtype, shape and bytes, so 0.0 is not -0.0, and a NaN is itself but no
    other NaN. A tensor subclass is taken apart: its own idea of a copy or of equality counts for
    nothing.
    """
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from leaves(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield path, (value.dtype, tuple(value.shape), bytes(raw.tolist()))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        yield f"{path}.len", (int, len(value))
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, (type(value), struct.pack("d", value) if type(value) is float else value)


def picture(optimizer: optim.Optimizer) -> Picture:
    """All that a step can change: parameters, state, and what the groups hold."""
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    assert set(optimizer.state) <= set(params)
    whole = {
        "param": [param.detach() for param in params],
        "state": [optimizer.state.get(param, {}) for param in params],
        "group": [{k: v for k, v in group.items() if k != "params"} for group in groups],
    }
    return dict(leaves(whole, ""))


def traces(before: Picture, after: Picture) -> list[str]:
    """The paths at which a skipped step left a trace.

    State may appear at its initial values: zeros in all optimizers that make state and then skip.
    """

    def initial(path: str) -> bool:
        value = after[path][-1]
        return path.startswith(".state") and isinstance(value, bytes) and not any(value)

    changed = [path for path in before | after if before.get(path) != after.get(path)]
    return [path for path in changed if path in before or not initial(path)]


# What is stepped.


class Form(NamedTuple):
    """One way to make an optimizer."""

    name: str
    make: Callable[[list[nn.Parameter]], optim.Optimizer]
    routes: tuple[str, ...] = ("step", "unscale", "clip", "edit", "closure-1")
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (5,), (2, 2))
    """Of the parameters. The last one never gets a gradient."""
    needs_both: bool = False
    """Whether it wants gradients before the step and a closure as well."""


LR = 0.02
ANY = {"plain": {}, "tensor-lr": {"lr": torch.tensor(LR)}}
DECAY = {"decay": {"weight_decay": 0.1}}
MAXIMIZE = {"maximize": {"maximize": True}}
COMMON = ANY | DECAY | MAXIMIZE
AMSGRAD = {"amsgrad": {"amsgrad": True, "weight_decay": 0.1}}
DECOUPLED = {"decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True}}
MOMENTUM = {"momentum": {"momentum": 0.9}}

VARIANTS: dict[type[optim.Optimizer], dict[str, dict[str, Any]]] = {
    optim.ASGD: COMMON | {"average": {"t0": 1.0, "lambd": 0.1}},
    optim.Adadelta: COMMON,
    optim.Adagrad: COMMON | {"lr-decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.5}},
    optim.Adam: COMMON | AMSGRAD | DECOUPLED,
    optim.AdamW: COMMON | AMSGRAD,
    optim.Adamax: COMMON,
    optim.LBFGS: ANY | {"wolfe": {"line_search_fn": "strong_wolfe"}},
    optim.NAdam: COMMON | DECOUPLED,
    optim.RAdam: COMMON | DECOUPLED,
    optim.RMSprop: COMMON | MOMENTUM | {"centered": {"momentum": 0.9, "centered": True}},
    optim.Rprop: ANY | MAXIMIZE,
    optim.SGD: COMMON
    | MOMENTUM
    | {
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
    },
}
NEWER: dict[str, dict[str, dict[str, Any]]] = {
    "Adafactor": COMMON,  # torch 2.5
    "Muon": ANY | DECAY | {"not-nesterov": {"nesterov": False}},  # torch 2.9
}
VARIANTS |= {getattr(optim, name): NEWER[name] for name in NEWER if hasattr(optim, name)}
LEFT_OUT = {optim.Optimizer: "is the base class", optim.SparseAdam: "takes no dense gradients"}

MODES: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def modes_of(kind: type[optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """The modes that the constructor of `kind` has arguments for, each also as capturable."""
    takes = inspect.signature(kind).parameters
    modes = {name: mode for name, mode in MODES.items() if mode.keys() <= takes.keys()} or {"": {}}
    if "capturable" in takes:
        capturable = {"capturable": True}
        modes |= {f"{name}-capturable": mode | capturable for name, mode in modes.items()}
    return modes


def refused(kind: type[optim.Optimizer], settings: dict[str, Any]) -> bool:
    """Whether torch has no such form on the CPU; `test_refused_forms_do_not_run` checks that."""
    if settings.get("capturable"):
        return not settings.get("fused")
    tensor_lr = isinstance(settings["lr"], Tensor)
    return tensor_lr and settings.get("foreach") is True and kind in (optim.Adam, optim.AdamW)


def torch_forms() -> Iterator[tuple[Form, bool]]:
    """Every combination of class, mode and variant, and whether torch refuses it on the CPU."""
    for kind, variants in VARIANTS.items():
        pairs = itertools.product(modes_of(kind).items(), variants.items())
        takes = inspect.signature(kind).parameters
        for (mode, chosen), (variant, extra) in pairs:
            if not extra.keys() <= takes.keys():  # Adam has "decoupled" from torch 2.7 on
                continue
            settings = {"lr": LR, **chosen, **extra}
            make = functools.partial(make_torch, kind, settings)
            form = Form("-".join(filter(None, (kind.__name__, mode, variant))), make)
            if kind is optim.LBFGS:
                settings["max_iter"] = 4
                form = form._replace(routes=("closure-1", "closure-2", "closure-3"))
            if kind.__name__ == "Muon":
                form = form._replace(shapes=((4, 3), (3, 5), (2, 2)))
            yield form, refused(kind, settings)


def make_torch(kind: Any, settings: dict[str, Any], params: list[nn.Parameter]) -> optim.Optimizer:
    return kind(params, **copy.deepcopy(settings))  # a tensor lr of its own


# Third-party optimizers. Those that are not installed are skipped. Why these packages: pyproject.


def adamw8bit(params: list[nn.Parameter]) -> optim.Optimizer:
    try:
        optimizer = pytest.importorskip("torchao.optim").AdamW8bit(params, lr=LR)
    except (AttributeError, ImportError) as error:  # formats that torch does not have
        pytest.skip(f"torchao does not suit this torch: {error}")
    # It compiles its step, which is slow and needs a C++ compiler.
    optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def muon(params: list[nn.Parameter]) -> optim.Optimizer:
    groups = [
        {"params": [p for p in params if (p.ndim == 2) is use_muon], "use_muon": use_muon}
        for use_muon in (True, False)
    ]
    return pytest.importorskip("pytorch_optimizer").Muon(groups, lr=LR)


def sam(params: list[nn.Parameter]) -> optim.Optimizer:
    library = pytest.importorskip("pytorch_optimizer")
    return library.SAM(params, optim.SGD, rho=0.05, lr=LR, momentum=0.9)


def bsam(params: list[nn.Parameter]) -> optim.Optimizer:
    return pytest.importorskip("pytorch_optimizer").BSAM(params, num_data=100, lr=LR)


THIRD_PARTY = [
    Form("torchao-AdamW8bit", adamw8bit, shapes=((64, 64), (5,), (2, 2))),  # smaller ones: 32 bits
    Form("pytorch_optimizer-Muon", muon),
    Form("pytorch_optimizer-SAM", sam, needs_both=True),
    # Evaluates twice, and counts its steps in the groups, before the closure is called.
    Form("pytorch_optimizer-BSAM", bsam, ("step", "closure-1", "closure-2"), needs_both=True),
]
TORCH = list(torch_forms())
FORMS = [form for form, refused_ in TORCH if not refused_] + THIRD_PARTY
REFUSED = [form for form, refused_ in TORCH if refused_]
BY_NAME = {form.name: form for form in FORMS}


class Bad(NamedTuple):
    """What is planted, and where: which element of which parameter."""

    value: float
    param: int
    element: int


BADS = [Bad(math.inf, 0, -1), Bad(-math.inf, 1, 0), Bad(math.nan, 1, -1)]
SPOILT = 100  # the batch of skipped steps; the good ones count from 0
# Skipped as the first step ever, later, and twice in a row. No zero_grad() after a skip.
HISTORY = ("skipped", "good", "skipped", "skipped", "good")


class Trainer:
    """Parameters, their optimizer and a scaler."""

    def __init__(self, form: Form, scaler: type[torch.amp.GradScaler] = GradScaler) -> None:
        random = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(s, generator=random)) for s in form.shapes]
        self.form = form
        self.optimizer = form.make(self.params)
        options = {"recheck": True} if scaler is GradScaler else {}  # for the route "edit"
        self.scaler: Any = scaler("cpu", init_scale=2.0**10, **options)

    def backward(self, batch: int) -> Tensor:
        """The loss of `batch`, after its scaled backward pass."""
        random = torch.Generator().manual_seed(1 + batch)
        values = torch.cat([p.view(-1) for p in self.params[:-1]])
        loss = (values - torch.randn(values.shape, generator=random)).cosh().sum()
        self.scaler.scale(loss).backward()
        return loss

    def plant(self, bad: Bad) -> None:
        """Spoils one element of one gradient."""
        self.params[bad.param].grad.view(-1)[bad.element] = bad.value

    def step(self, batch: int, route: str, bad: Bad | None = None) -> Any:
        """One iteration, without zero_grad(); what the scaler's `step()` returned.

        `bad` is planted where `route` says: before the call that it is named after, after
        unscale_() ("edit"), or in that evaluation of the closure.
        """
        scaler, optimizer = self.scaler, self.optimizer
        by_closure = route.startswith("closure")
        spoilt = int(route.split("-")[1]) if by_closure and bad else None
        evaluations = itertools.count(1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.backward(batch)
            if next(evaluations) == spoilt and bad:
                self.plant(bad)
            return loss

        torch.default_generator.manual_seed(batch)  # BSAM draws noise
        if not by_closure or self.form.needs_both:
            self.backward(batch)
            if bad and route in ("step", "unscale", "clip"):
                self.plant(bad)
            if route in ("unscale", "edit"):
                scaler.unscale_(optimizer)
            if route == "clip":
                scaler.clip_grad_norm_(optimizer, 0.5)
            if bad and route == "edit":
                self.plant(bad)
        args = [closure] if by_closure or self.form.needs_both else []
        result = scaler.step(optimizer, *args)
        scaler.update()
        assert spoilt is None or next(evaluations) == spoilt + 1
        return result


def cases(forms: list[Form]) -> list[Any]:
    """Every form with each of its routes."""
    return [pytest.param(f, route, id=f"{f.name}-{route}") for f in forms for route in f.routes]


@pytest.fixture(scope="module", autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """Fills what `torch.empty` gives with NaN, so that whoever reads it shows."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)  # a second one only costs, with tensors of ten elements
        assert torch.empty(3).isnan().all()
        yield
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def twin_pictures(form: Form, route: str) -> list[Picture]:
    """What good steps alone come to: at the start, and after each of them."""
    twin = Trainer(form)
    pictures = [picture(twin.optimizer)]
    for batch in range(HISTORY.count("good")):
        twin.step(batch, route)
        twin.optimizer.zero_grad()
        pictures.append(picture(twin.optimizer))
        changed = traces(*pictures[-2:])
        assert sum(path.startswith(".param") for path in changed) == 2, "the step did nothing"
    return pictures


def check_skips(form: Form, route: str, bad: Bad, twin: list[Picture], cleared: bool) -> None:
    """Trains through `HISTORY`, beside a twin that takes the good steps only."""
    trainer = Trainer(form)
    good = 0
    for kind in HISTORY:
        scale = trainer.scaler.get_scale()
        if kind == "good":
            trainer.step(good, route)
            trainer.optimizer.zero_grad()
            good += 1
            assert picture(trainer.optimizer) == twin[good]
            assert trainer.scaler.get_scale() == scale
            continue
        assert trainer.step(SPOILT, route, bad) is None
        assert traces(twin[good], picture(trainer.optimizer)) == []
        # No scale could have prevented what is planted after unscale_().
        assert trainer.scaler.get_scale() == (scale if route == "edit" else scale / 2)
        if cleared:
            assert not any(p.grad.count_nonzero() for p in trainer.params if p.grad is not None)


@pytest.mark.parametrize(("form", "route"), cases(FORMS))
def test_skip_leaves_no_trace(form: Form, route: str) -> None:
    twin = twin_pictures(form, route)
    for bad in BADS:
        check_skips(form, route, bad, twin, cleared=True)


@pytest.mark.parametrize(("form", "route"), cases([f for f in FORMS if "-fused" in f.name]))
def test_skip_decided_on_the_device_leaves_no_trace(
    form: Form, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where nobody waits to learn of the skip; the gradients are cleared later, then.
    place = ScaleState.place

    def place_tensors(state: ScaleState, device: torch.device) -> None:
        with dispatch.use("triton"):  # that the state is in tensors, and no more
            place(state, device)

    monkeypatch.setattr(ScaleState, "place", place_tensors)
    twin = twin_pictures(form, route)
    for bad in BADS:
        check_skips(form, route, bad, twin, cleared=False)


def test_undone_step_keeps_the_tensors_themselves() -> None:
    # The user may hold them: fill_() of a learning rate must still reach the optimizer.
    trainer = Trainer(BY_NAME["Adam-single-tensor-lr"])
    optimizer = trainer.optimizer
    trainer.step(0, "closure-1")
    lr, moment = optimizer.param_groups[0]["lr"], first_state(optimizer)["exp_avg"]
    trainer.step(SPOILT, "closure-1", BADS[0])
    assert optimizer.param_groups[0]["lr"] is lr
    assert first_state(optimizer)["exp_avg"] is moment


def test_every_optimizer_of_torch_is_here() -> None:
    classes = vars(optim).values()
    optimizers = {c for c in classes if inspect.isclass(c) and issubclass(c, optim.Optimizer)}
    assert optimizers == VARIANTS.keys() | LEFT_OUT.keys()
    capable = {f.name.split("-")[0] for f in FORMS if "-fused-" in f.name}
    assert capable == {c.__name__ for c in VARIANTS if "fused" in inspect.signature(c).parameters}


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.name)
def test_refused_forms_do_not_run(form: Form) -> None:
    with pytest.raises((AssertionError, ValueError), match="capturable"):
        Trainer(form).step(0, "step")


# The test itself is tested.


def trained_adam() -> optim.Optimizer:
    """Adam after one step, with a zero and a NaN among its moments."""
    trainer = Trainer(BY_NAME["Adam-single-amsgrad"])
    trainer.step(0, "step")
    first_state(trainer.optimizer)["exp_avg"][0, :2] = torch.tensor([0.0, math.nan])
    trainer.optimizer.param_groups[0]["step"] = 0.0
    return trainer.optimizer


def first_state(optimizer: optim.Optimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def nan_with_payload(optimizer: optim.Optimizer) -> None:
    first_state(optimizer)["exp_avg"].view(torch.int32)[0, 1] ^= 1
    assert first_state(optimizer)["exp_avg"][0, 1].isnan()


FAULTS: dict[str, tuple[Callable[[optim.Optimizer], Any], str]] = {
    "counter": (lambda o: first_state(o)["step"].add_(1), ".state.0.step"),
    "moment": (lambda o: first_state(o)["exp_avg"][1, 1].mul_(1 + 2**-20), ".state.0.exp_avg"),
    "minus-zero": (lambda o: first_state(o)["exp_avg"][0, 0].neg_(), ".state.0.exp_avg"),
    "other-nan": (nan_with_payload, ".state.0.exp_avg"),
    "no-longer-nan": (lambda o: first_state(o)["exp_avg"][0, 1].zero_(), ".state.0.exp_avg"),
    "missing-key": (lambda o: first_state(o).pop("max_exp_avg_sq"), ".state.0.max_exp_avg_sq"),
    "new-key": (lambda o: first_state(o).update(more=torch.ones(1)), ".state.0.more"),
    "other-type": (lambda o: first_state(o).update(step=1), ".state.0.step"),
    "parameter": (lambda o: o.param_groups[0]["params"][1].data[0].mul_(1.5), ".param.1"),
    "group": (lambda o: o.param_groups[0].update(lr=0.03), ".group.0.lr"),
    "group-counter": (lambda o: o.param_groups[0].update(step=-0.0), ".group.0.step"),
    "group-new-key": (lambda o: o.param_groups[0].update(more=0.0), ".group.0.more"),
}


@pytest.mark.parametrize(("fault", "path"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_seen(fault: Callable[[optim.Optimizer], Any], path: str) -> None:
    optimizer = trained_adam()
    before = picture(optimizer)
    assert traces(before, picture(optimizer)) == []
    fault(optimizer)
    assert traces(before, picture(optimizer)) == [path]
    assert before != picture(optimizer)


def test_state_may_appear_at_zero() -> None:
    optimizer = trained_adam()
    before = picture(optimizer)
    first_state(optimizer)["more"] = torch.zeros(2)
    assert traces(before, picture(optimizer)) == []
    assert before != picture(optimizer)


def test_fault_inside_a_tensor_subclass_is_seen() -> None:
    trainer = Trainer(BY_NAME["torchao-AdamW8bit"])
    trainer.step(0, "step")
    before = picture(trainer.optimizer)
    first_state(trainer.optimizer)["exp_avg"].codes.view(-1)[7] += 1
    assert traces(before, picture(trainer.optimizer)) == [".state.0.exp_avg.codes"]


@pytest.mark.parametrize("variant", ["momentum", "nesterov", "dampening"])
def test_torch_leaves_a_trace_in_fused_sgd(variant: str) -> None:
    found = {}
    for scaler in (torch.amp.GradScaler, GradScaler):
        trainer = Trainer(BY_NAME[f"SGD-fused-{variant}"], scaler)
        before = picture(trainer.optimizer)
        trainer.step(SPOILT, "step", BADS[0])
        found[scaler] = traces(before, picture(trainer.optimizer))
        trainer.optimizer.zero_grad()
        trainer.step(0, "step")
        spoilt = any(param.isnan().any() for param in trainer.params)
        assert spoilt is (scaler is torch.amp.GradScaler)
    assert found[GradScaler] == []
    assert found[torch.amp.GradScaler] == [f".state.{i}.momentum_buffer" for i in (0, 1)]
