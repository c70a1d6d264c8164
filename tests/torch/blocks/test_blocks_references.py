"""Gradients of weights are written over if nobody else has them, and else left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscale.torch.blocks import edges, references

FACTOR = 2.0**-3


class Given(torch.autograd.Function):
    """The identity; its gradient is what `make` makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.make = make
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.make(grad), None


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every gradient of a weight, whether it was taken for one that nobody else has."""
    found: list[bool] = []

    def lone(*args: Any) -> list[bool]:
        # As many references to gradients as without this function: `args` holds the tuple.
        flags = references.lone(*args)
        found.extend(flags)
        return flags

    monkeypatch.setattr(edges, "lone", lone)
    return found


def lent(*params: Tensor) -> tuple[Tensor, ...]:
    """Views of weights, whose gradients are multiplied by FACTOR."""
    num = len(params)
    return edges.lend(FACTOR, None, tuple(range(num)), (0,) * num, 0, edges.Terms(), *params)


def weight() -> Tensor:
    return torch.linspace(1, 2, 12).reshape(3, 4).requires_grad_()


def test_gradients_that_nobody_else_has_are_written_over(written: list[bool]) -> None:
    one, two = weight(), weight()
    v, w = lent(one, two)
    addresses = []

    def make(grad: Tensor) -> Tensor:
        new = grad * 5
        addresses.append(new.data_ptr())
        return new

    (Given.apply(v, make).sum() + 2 * Given.apply(w, make).sum()).backward()
    assert written == [True, True]
    assert {one.grad.data_ptr(), two.grad.data_ptr()} == set(addresses)
    assert torch.equal(one.grad, torch.full((3, 4), 5 * FACTOR))
    assert torch.equal(two.grad, torch.full((3, 4), 10 * FACTOR))


@pytest.mark.parametrize("uses", ["twice", "autocast"])
def test_fresh_gradients_of_usual_operations(uses: str, written: list[bool]) -> None:
    param = weight()
    (view,) = lent(param)
    x = torch.ones(2, 3)
    if uses == "twice":
        (view.square().sum() + (x @ view).square().sum()).backward()
        want = 2 * param.detach() + 2 * x.T @ (x @ param.detach())
    else:
        with torch.autocast("cpu", dtype=torch.float16):
            out = x @ view
        out.float().sum().backward()
        want = torch.full((3, 4), 2.0)
    assert written == [True]
    assert torch.equal(param.grad, want * FACTOR)


def holders() -> dict[str, Callable[[Tensor, list[Any]], Tensor]]:
    """Ways in which somebody else has the gradient of a weight: it is put into the list."""

    def made(make: Callable[[Tensor, list[Any]], Tensor]) -> Callable[[Tensor, list[Any]], Tensor]:
        return lambda view, held: Given.apply(view, lambda grad: make(grad * 5, held))

    def hook(view: Tensor, held: list[Any]) -> Tensor:
        view.register_hook(lambda grad: held.append(grad))
        return view * 5

    def saved(new: Tensor, held: list[Any]) -> Tensor:
        with torch.enable_grad():
            held.append((torch.ones(3, 4, requires_grad=True) * new).grad_fn)
        return new

    def keep(alias: Callable[[Tensor], Any]) -> Callable[[Tensor, list[Any]], Tensor]:
        return made(lambda new, held: held.append(alias(new)) or new)

    return {
        "a tensor hook": hook,
        "a function that keeps it": keep(lambda new: new),
        "one that keeps a view": keep(lambda new: new.view(-1)),
        "one that keeps its data": keep(lambda new: new.detach()),
        "one that keeps its storage": keep(lambda new: new.untyped_storage()),
        "one that returns a view": made(lambda new, held: held.append(new) or new.view(3, 4)),
        "one that returns its data": made(lambda new, held: held.append(new) or new.detach()),
        "a saved graph": made(saved),
        "numpy": keep(lambda new: new.numpy()),
    }


def value_of(held: Any) -> Tensor:
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor(held.tolist(), dtype=torch.uint8).view(torch.float32)
    if isinstance(held, Tensor):
        return held.detach().clone().reshape(-1)
    if hasattr(held, "_saved_other"):
        return held._saved_other.clone().reshape(-1)
    return torch.tensor(held).reshape(-1)


@pytest.mark.parametrize("way", holders())
def test_gradient_that_somebody_else_has_is_left_as_it_is(way: str, written: list[bool]) -> None:
    param = weight()
    (view,) = lent(param)
    held: list[Any] = []
    holders()[way](view, held).sum().backward()
    assert written == [False]
    assert torch.equal(param.grad, torch.full((3, 4), 5 * FACTOR))
    assert torch.equal(value_of(held[0]), torch.full((12,), 5.0))


def test_gradient_of_a_caller_is_left_as_it_is(written: list[bool]) -> None:
    one, two = weight(), weight()
    given = torch.ones(3, 4)
    torch.autograd.backward(list(lent(one, two)), [given, given])
    assert written == [False, False]
    assert torch.equal(given, torch.ones(3, 4))
    assert torch.equal(one.grad, given * FACTOR)
    assert torch.equal(two.grad, given * FACTOR)


def test_kept_gradient_in_float16_is_left_as_it_is() -> None:
    param = weight().detach().half().requires_grad_()
    param.grad_dtype = torch.float32
    (view,) = lent(param)
    held: list[Any] = []
    holders()["a function that keeps it"](view, held).sum().backward()
    assert torch.equal(held[0], torch.full((3, 4), 5.0).half())
    assert torch.equal(param.grad, torch.full((3, 4), 5 * FACTOR))


def test_one_gradient_of_two_weights_is_left_as_it_is(written: list[bool]) -> None:
    one, two = weight(), weight()
    v, w = lent(one, two)
    ((v + w) * 3).sum().backward()
    assert written == [False, False]
    assert torch.equal(one.grad, torch.full((3, 4), 3 * FACTOR))
    assert torch.equal(two.grad, one.grad)


def test_expanded_gradient_is_left_as_it_is(written: list[bool]) -> None:
    param = weight()
    (view,) = lent(param)
    Given.apply(view, lambda grad: torch.ones(()).expand(3, 4).detach()).sum().backward()
    assert written == [False]
    assert torch.equal(param.grad, torch.full((3, 4), FACTOR))


def test_kept_gradient_of_a_view_is_that_before_the_factor() -> None:
    param = weight()
    (view,) = lent(param)
    view.retain_grad()
    (view * 5).sum().backward()
    assert torch.equal(view.grad, torch.full((3, 4), 5.0))
    assert torch.equal(param.grad, view.grad * FACTOR)


def test_some_gradients_are_written_over_and_others_not(written: list[bool]) -> None:
    params = [weight() for _ in range(8)]
    views = lent(*params)
    held: list[Any] = []
    keep = holders()["a function that keeps it"]
    total = sum((view * n).sum() for n, view in enumerate(views[:7]))
    (total + keep(views[7], held).sum()).backward()
    assert written == [True] * 7 + [False]
    for number, param in enumerate(params):
        want = 5 if number == 7 else number
        assert torch.equal(param.grad, torch.full((3, 4), want * FACTOR))
    assert torch.equal(held[0], torch.full((3, 4), 5.0))


def test_nothing_is_written_over_where_references_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(references, "uses", None)
    references.counts_of_lone.cache_clear()
    try:
        assert references.counts_of_lone() is None
        assert references.lone([torch.ones(2)], None) == [False]
    finally:
        references.counts_of_lone.cache_clear()
