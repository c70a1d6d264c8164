"""Reports of ranks are combined word by word, by operations that do not wait for the device."""

from __future__ import annotations

import torch
from hypothesis import given

from gradscale.torch.distributed.consensus import Report, fold, largest
from gradscale.torch.grads.fields import REPORT
from rank_reports import ROWS, Rows, check_fold, check_norms


@given(ROWS)
def test_every_word_is_folded_by_its_rule(rows: Rows) -> None:
    check_fold(fold, rows, "cpu")


def test_the_norm_of_all_is_that_of_their_norms() -> None:
    check_norms(fold, "cpu")


def test_ranks_that_differ_are_marked() -> None:
    inf = float("inf")
    ranks = [Report(checksum=5.0, bad_rank=rank) for rank in (inf, 2.0, 1.0)]
    found = Report(*fold(torch.tensor(ranks)[:, None])[0].tolist())
    assert (found.checksum, found.bad_rank) == (5.0, 1.0)
    ranks[1] = ranks[1]._replace(checksum=6.0)
    assert Report(*fold(torch.tensor(ranks)[:, None])[0].tolist()).checksum == -1.0


def test_a_report_of_nothing_changes_nothing() -> None:
    some = Report(*[1.0] * len(REPORT))._replace(checksum=0.0)
    words = torch.tensor([[some], [Report()]])
    assert Report(*fold(words)[0].tolist()) == some


def test_without_groups_everything_stays() -> None:
    values = torch.tensor([1.0, 2.0])
    assert largest(values, []) is values
