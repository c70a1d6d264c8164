"""All ranks decide alike, with real processes, in every way to share a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shared_models
from rank_matrix import check_cells
from ranks import be_a_rank, run_check
from shared_models import Setup

ON_TWO = (
    shared_models.ddp,
    shared_models.fsdp2,
    shared_models.fsdp1,
    shared_models.by_torchs_name,
    shared_models.tensor_parallel,
    shared_models.mixed_placements,
    shared_models.pipeline,
    shared_models.zero,
    shared_models.given,
)
WITHOUT_DTENSORS = (
    shared_models.ddp,
    shared_models.fsdp1,
    shared_models.by_torchs_name,
    shared_models.zero,
)
ON_FOUR = (shared_models.hsdp, shared_models.hybrid, shared_models.grid)


def check_pairs() -> None:
    check_cells(ON_TWO, pairs_only=True)


def check_matrix() -> None:
    check_cells(ON_TWO)


def check_grid_pairs() -> None:
    check_cells(ON_FOUR, ways=("apply",), pairs_only=True)


def check_grid() -> None:
    check_cells(ON_FOUR, ways=("apply",))


def check_on_gpu() -> None:
    """Without DTensors: torch 2.11 crashes where it sends those of a GPU by gloo."""
    world = torch.distributed.get_world_size()
    check_cells(WITHOUT_DTENSORS if world == 2 else [shared_models.hybrid])


def check_faulty() -> None:
    """Raises if the comparison does not notice a rank that decides for itself."""

    def apart() -> Setup:
        return shared_models.ddp()._replace(named=None, groups=None)

    with pytest.raises(AssertionError, match="apart, fused, inf, apply"):
        check_cells([apart], ["inf"], ["apply"])

    def skewed() -> Setup:
        parts = shared_models.ddp()
        with torch.no_grad():
            parts.params[0][0, 0] += 1e-4  # ten times the bound
        return parts

    with pytest.raises(AssertionError, match="skewed, fused, none, step"):
        check_cells([skewed], ["none"], ["step"])


@pytest.mark.parametrize(
    ("check", "world"),
    [
        ("pairs", 2),
        ("grid_pairs", 4),
        ("faulty", 2),
        pytest.param("matrix", 2, marks=pytest.mark.soak),
        pytest.param("grid", 4, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_way_to_share_a_model(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("check", "world"), [("on_gpu", 2), ("on_gpu", 4)], ids=str)
def test_ranks_that_share_a_gpu(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path, RANKS_DEVICE="cuda")


if __name__ == "__main__":
    be_a_rank(globals())
