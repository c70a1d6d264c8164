"""Kernels write and fold the words of ranks as the list of fields says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads.fields import REPORT, SUMMARY, offset
from gradscale.torch.grads.packed import LOSS_FLAG, LOSS_OFF, LOSS_RAW
from rank_reports import ROWS, Rows, check_fold, check_norms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=30 if HERE == "cpu" else 100)  # test_fold.py has the rules themselves
@given(ROWS)
def test_every_word_is_folded_by_its_rule(rows: Rows) -> None:
    check_fold(kernels.module("consensus").fold, rows, HERE)


def test_the_norm_of_all_is_that_of_their_norms() -> None:
    check_norms(kernels.module("consensus").fold, HERE)


@pytest.mark.parametrize(
    ("loss", "kind", "bad"),
    [
        (None, LOSS_OFF, 0.0),
        (True, LOSS_FLAG, 0.0),
        (False, LOSS_FLAG, 1.0),
        (3.0, LOSS_RAW, 0.0),
        (-math.inf, LOSS_RAW, 1.0),
        (math.nan, LOSS_RAW, 1.0),
    ],
)
@pytest.mark.parametrize("non_finite", [0.0, 1.0])
def test_a_rank_reports_what_it_measured(
    loss: bool | float | None, kind: int, bad: float, non_finite: float
) -> None:
    told = dict.fromkeys([field.name for field in SUMMARY], 0.0)
    told.update(non_finite=non_finite, fits=1.0, amax=2.0, norm=5.0)
    summary = torch.tensor(list(told.values()), dtype=torch.float32, device=HERE)
    dtype = torch.bool if isinstance(loss, bool) else torch.float32
    words = kernels.module("consensus").report(
        summary,
        summary[offset(SUMMARY, "norm")] * 2,
        loss=None if loss is None else torch.tensor(loss, dtype=dtype, device=HERE),
        loss_kind=kind,
        checksum=torch.tensor(7.0, dtype=torch.float32, device=HERE) if bad else None,
        rank=3,
    )
    found = dict(zip([field.name for field in REPORT], words[0].tolist(), strict=True))
    assert found == {
        "non_finite": non_finite,
        "unfit": 0.0,
        "loss_non_finite": bad,
        "penalty_non_finite": 0.0,
        "has_gradients": 1.0,
        "has_common_loss": 1.0,
        "amax": 2.0,
        "norm": 10.0,
        "checksum": 7.0 if bad else 0.0,
        "bad_rank": 3.0 if non_finite else math.inf,
    }
