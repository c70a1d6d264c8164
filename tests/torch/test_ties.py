from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

from gradscale import CallOrderError
from gradscale.torch import GradScaler
from gradscale.torch.optim import AdamW
from gradscale.torch.ties import KEPT, Kept, find


def test_what_is_kept_is_found_by_its_number_for_a_while() -> None:
    kept: Kept[object] = Kept()
    things = [object() for _ in range(KEPT + 1)]
    numbers = [kept.keep(thing) for thing in things]
    assert [kept.recall(number) for number in numbers[1:]] == things[1:]
    with pytest.raises(CallOrderError, match="this one is older"):
        kept.recall(numbers[0])


def test_the_thing_that_came_last_keeps_its_number() -> None:
    kept: Kept[object] = Kept()
    first, second = object(), object()
    numbers = [int(kept.keep(thing)) for thing in (first, first, second, first)]
    assert numbers == [1, 1, 2, 3]


def test_owners_are_found_while_they_live() -> None:
    scaler, optimizer = GradScaler("cpu"), AdamW([torch.ones(1, requires_grad=True)])
    numbers = [scaler._tie.number, optimizer._tie.number]
    assert [find(number) for number in numbers] == [scaler, optimizer]
    del scaler, optimizer
    gc.collect()
    for number in numbers:
        with pytest.raises(CallOrderError, match="is gone"):
            find(number)


def test_copies_have_ties_of_their_own() -> None:
    optimizer = AdamW([torch.ones(1, requires_grad=True)])
    for one in (GradScaler("cpu"), optimizer):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert find(other._tie.number) is other
            assert other._tie.number != one._tie.number


def test_the_tie_of_an_optimizer_knows_new_groups_and_members() -> None:
    first, second, third = (torch.ones(1, requires_grad=True) for _ in range(3))
    optimizer = AdamW([first])
    optimizer.add_param_group({"params": [second]})
    optimizer.param_groups[0]["params"].append(third)
    assert [[id(p) for p in each] for each in optimizer._tie.params] == [
        [id(first), id(third)],
        [id(second)],
    ]
