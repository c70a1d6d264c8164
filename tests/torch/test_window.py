from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from gradscale import CallOrderError
from gradscale.torch.window import Fate, Mark, Window


def window(scale: float = 4.0, before: dict[int, Mark] | None = None) -> Window:
    return Window(torch.tensor(scale), before or {})


def parameter(grad: float | None = 1.0) -> Tensor:
    tensor = torch.zeros(2, requires_grad=True)
    if grad is not None:
        tensor.grad = torch.full((2,), grad)
    return tensor


def run_pass(opened: Window, *added_to: Tensor) -> None:
    """Runs a backward pass that adds 1 to the gradients of some parameters."""
    leaf = torch.ones((), requires_grad=True)
    loss = (leaf * 1.0 + sum(p.sum() for p in added_to)) * 1.0
    loss.register_hook(lambda _: opened.begin())
    loss.backward()


def test_a_window_keeps_its_scale_when_the_original_moves() -> None:
    scale = torch.tensor(8.0)
    opened = Window(scale.clone(), {})
    scale.mul_(2)
    assert (float(opened.scale), float(opened.inv_scale)) == (8.0, 0.125)


def test_gradients_nobody_touched_yet_have_the_scale_of_the_window() -> None:
    params = [parameter(), parameter()]
    assert window().split(params) == (params, [])


def test_a_gradient_that_was_unscaled_is_not_fresh_again() -> None:
    opened, p, q = window(), parameter(), parameter()
    opened.mark([p])
    fresh, other = opened.split([p, q])
    assert [id(x) for x in fresh] == [id(q)]
    assert [(id(x), mark.left) for x, mark in other] == [(id(p), None)]


def test_an_edit_without_a_backward_pass_leaves_a_gradient_unscaled() -> None:
    opened, p = window(), parameter()
    opened.mark([p])
    p.grad.mul_(0.5)
    assert opened.split([p])[0] == []
    assert opened.edited([p])


def test_a_replaced_gradient_is_fresh() -> None:
    opened, p = window(), parameter()
    opened.mark([p])
    p.grad = torch.ones(2)
    assert opened.split([p])[1] == []


def test_a_shared_gradient_that_may_have_been_added_to_is_an_error() -> None:
    opened, p = window(), parameter()
    opened.mark([p])
    run_pass(opened, p)
    with pytest.raises(CallOrderError, match="zero_grad"):
        opened.split([p])


def test_a_gradient_that_another_optimizer_may_have_unscaled_is_an_error() -> None:
    opened, p = window(), parameter()
    opened.mark([p], torch.tensor(1.0), Fate.OPAQUE)
    with pytest.raises(CallOrderError, match="unscale_"):
        opened.split([p])


def test_marks_do_not_keep_gradients_alive() -> None:
    opened, p = window(), parameter()
    opened.mark([p])
    memory = Mark(p, Fate.USED, 0, None)
    p.grad = None
    gc.collect()
    assert memory.grad() is None
    assert not memory.untouched()
    assert opened.still([p]) == []


@pytest.mark.parametrize("fate", [Fate.USED, Fate.CLEARED, Fate.OPAQUE])
def test_gradients_that_an_optimizer_has_had_may_be_added_to(fate: Fate) -> None:
    first, p = window(), parameter()
    first.mark([p], fate=fate)
    second = window(16.0, first.leftovers())
    run_pass(second, p)
    assert second.split([p]) == ([p], [])


def test_gradients_passed_by_keep_their_own_scale() -> None:
    first, p, q = window(4.0), parameter(), parameter()
    stepped, waiting = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    first.use(stepped)
    first.close([stepped, waiting])
    assert first.closed
    assert first.split([q]) == ([q], [])  # in its own window it is as fresh as ever
    second = window(16.0, first.leftovers())
    run_pass(second)
    fresh, other = second.split([q])
    assert fresh == []
    assert float(other[0][1].left) == 0.25


@pytest.mark.parametrize(("scale", "error"), [(4.0, False), (16.0, True)])
def test_adding_to_gradients_passed_by_needs_the_same_scale(scale: float, error: bool) -> None:
    first, p, q = window(4.0), parameter(), parameter()
    stepped, waiting = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    first.use(stepped)
    first.close([stepped, waiting])
    second = window(scale, first.leftovers())
    run_pass(second)  # a first one that leaves it alone
    run_pass(second, q)
    if error:
        with pytest.raises(CallOrderError, match="another scale"):
            second.split([q])
    else:
        assert second.split([q]) == ([q], [])


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("how", ["zero_", "None", "data", "copy_"])
def test_gradients_passed_by_are_the_users_once_they_are_cleared_or_overwritten(
    when: str, how: str
) -> None:
    first, p, q = window(4.0), parameter(), parameter()
    stepped, waiting = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    first.use(stepped)
    first.close([stepped, waiting])

    def write() -> None:
        if how == "None":
            q.grad = None
        elif how == "data":
            q.grad.data.zero_()
        else:
            q.grad.zero_() if how == "zero_" else q.grad.copy_(torch.ones(2))

    if when == "before":
        write()
    second = window(16.0, first.leftovers())
    if when == "between":
        write()
    run_pass(second, q)
    if when == "after" and how == "data":
        return  # leaves no trace once something was added: nobody can know
    if when == "after":
        write()
        q.grad = torch.ones(2) if q.grad is None else q.grad
    assert second.split([q]) == ([q], [])


def test_gradients_passed_by_twice_remember_the_first_scale() -> None:
    p, q = parameter(), parameter()
    stepped, waiting = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    marks: dict[int, Mark] = {}
    for scale in (4.0, 16.0):
        opened = window(scale, marks)
        run_pass(opened)
        opened.use(stepped)
        opened.close([stepped, waiting])
        marks = opened.leftovers()
    assert float(marks[id(q)].left) == 0.25


def test_a_window_stays_open_while_nobody_has_used_its_gradients() -> None:
    opened = window()
    run_pass(opened)
    opened.close([])
    assert not opened.closed
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    opened.use(optimizer)
    assert opened.used_by(optimizer)
    assert not opened.used_by(torch.optim.SGD([parameter()], lr=1.0))
    assert not opened.begun_since(optimizer)
    run_pass(opened)
    assert opened.begun_since(optimizer)
    opened.close([])
    assert opened.closed
    unused = window()
    unused.close([])
    assert unused.closed


def test_flags_of_losses_and_penalties_are_all_remembered() -> None:
    opened = window()
    assert opened.loss_finite is None
    assert opened.penalty_finite is None
    for loss, finite in ((1.0, True), (math.nan, False), (1.0, False)):
        opened.note_loss(torch.tensor(loss))
        assert bool(opened.loss_finite) is finite
    opened.note_penalty([None])
    assert opened.penalty_finite is None
    opened.note_penalty([torch.ones(2), torch.tensor([1.0, math.inf])])
    assert not opened.penalty_finite
    opened.note_penalty([torch.ones(2)])
    assert not opened.penalty_finite


def test_only_gradients_written_since_they_were_marked_count_as_edited() -> None:
    opened, p, empty = window(), parameter(), parameter(None)
    assert opened.edited([p])  # never marked
    opened.mark([p, empty])
    assert not opened.edited([p, empty])
    p.grad[0] = 3.0
    assert opened.edited([p, empty])
    assert opened.known([p]) == [p]
    assert opened.fresh([p]) == []
    opened.forget([p])
    assert opened.still([p]) == opened.known([p]) == []
    assert opened.fresh([p]) == [p]
