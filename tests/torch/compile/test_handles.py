from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

from gradscale import CallOrderError
from gradscale.torch import GradScaler
from gradscale.torch.compile.handles import KEPT, find
from gradscale.torch.optim import AdamW
from gradscale.torch.telemetry.outcome import StepOutcome


def outcome_of_a_step() -> StepOutcome:
    w = torch.ones(1, requires_grad=True)
    scaler = GradScaler("cpu")
    scaler.backward(w.sum())
    return scaler.apply(AdamW([w]))


def test_outcomes_are_found_by_their_numbers_for_a_while() -> None:
    handle, outcome = GradScaler("cpu")._handle, outcome_of_a_step()
    outcomes = [copy.copy(outcome) for _ in range(KEPT + 1)]
    numbers = [handle.keep(each) for each in outcomes]
    for number, each in zip(numbers[1:], outcomes[1:], strict=True):
        assert handle.recall(number) is each
    with pytest.raises(CallOrderError, match="this one is older"):
        handle.recall(numbers[0])


def test_every_outcome_has_a_number_of_its_own() -> None:
    handle, outcome = GradScaler("cpu")._handle, outcome_of_a_step()
    assert [int(handle.keep(outcome)) for _ in range(3)] == [1, 2, 3]


def test_owners_are_found_while_they_live() -> None:
    scaler, optimizer = GradScaler("cpu"), AdamW([torch.ones(1, requires_grad=True)])
    numbers = [scaler._handle.number, optimizer._handle.number]
    assert [find(number) for number in numbers] == [scaler, optimizer]
    del scaler, optimizer
    gc.collect()
    for number in numbers:
        with pytest.raises(CallOrderError, match="was deleted"):
            find(number)


def test_copies_have_handles_of_their_own() -> None:
    optimizer = AdamW([torch.ones(1, requires_grad=True)])
    for one in (GradScaler("cpu"), optimizer):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert find(other._handle.number) is other
            assert other._handle.number != one._handle.number


def test_the_handle_of_an_optimizer_has_new_groups_and_members() -> None:
    first, second, third = (torch.ones(1, requires_grad=True) for _ in range(3))
    optimizer = AdamW([first])
    optimizer.add_param_group({"params": [second]})
    optimizer.param_groups[0]["params"].append(third)
    assert [[id(p) for p in each] for each in optimizer._handle.params] == [
        [id(first), id(third)],
        [id(second)],
    ]
