from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_graph import CpuGraph
from gradscale.torch.telemetry.graph_log import WIDTH, Fetched, GraphLog, append, new_log

CPU = torch.device("cpu")
ONE_ROW = WIDTH - 1


def prepared() -> GraphLog:
    log = GraphLog()
    log.prepare(CPU)
    return log


def captured(log: GraphLog, numbers: Tensor, kind: str) -> CpuGraph:
    """A graph that logs `numbers`, replayed once."""
    graph = CpuGraph()
    with graph:
        log.log(numbers, kind)
    return graph


def entries(fetched: Fetched | None) -> list[tuple[Any, list[int]]]:
    assert fetched is not None
    assert fetched.lost == 0
    return [tuple(entry) for entry in fetched.entries]  # type: ignore[misc]


@pytest.mark.parametrize("wait", [False, True])
def test_every_replay_comes_back_once_and_in_order(wait: bool) -> None:
    log, numbers = prepared(), torch.tensor([1, -5], dtype=torch.int32)
    graph = captured(log, numbers, "a")
    numbers[0] = 2
    graph.replay()
    assert entries(log.fetch(wait)) == [("a", [1, -5]), ("a", [2, -5])]
    assert entries(log.fetch(wait)) == []
    numbers[0] = 3
    graph.replay()
    assert entries(log.fetch(wait)) == [("a", [3, -5])]


@pytest.mark.parametrize("size", [1, ONE_ROW, ONE_ROW + 1, 2 * ONE_ROW, 2 * ONE_ROW + 1])
def test_graphs_of_different_kinds_and_sizes_share_the_log(size: int) -> None:
    log, few = prepared(), torch.tensor([7], dtype=torch.int32)
    many = torch.arange(size, dtype=torch.int32)
    first = captured(log, few, "few")
    second = captured(log, many, "many")
    for graph in (first, second, second, first):
        graph.replay()
    wide = ("many", list(range(size)))
    expected = [("few", [7]), wide, ("few", [7]), wide, wide, ("few", [7])]
    assert entries(log.fetch(wait=True)) == expected


def test_one_kind_may_come_in_two_sizes() -> None:
    log = prepared()
    for size in (1, 2, 1):
        log.log(torch.ones(size, dtype=torch.int32), "a")
    expected = [("a", [1]), ("a", [1, 1]), ("a", [1])]
    assert entries(log.fetch(wait=True)) == expected


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """A log of fewer rows, which is full sooner."""
    monkeypatch.setattr("gradscale.torch.telemetry.graph_log.ROWS", 50)
    return 50


def test_a_full_log_keeps_the_newest_and_counts_the_others(rows: int) -> None:
    log, number = prepared(), torch.zeros(1, dtype=torch.int32)
    graph = captured(log, number, "a")
    for _ in range(rows + 2):
        number += 1
        graph.replay()
    entries_, lost = log.fetch(wait=True) or Fetched([], 0)
    assert lost == 3
    assert [numbers[0] for _, numbers in entries_] == list(range(3, rows + 3))
    number += 1
    graph.replay()
    assert entries(log.fetch(wait=True)) == [("a", [rows + 3])]


def test_an_entry_that_lost_its_beginning_is_lost(rows: int) -> None:
    log = prepared()
    log.log(torch.zeros(3 * ONE_ROW, dtype=torch.int32), "wide")
    for _ in range(rows - 1):  # over two of its three rows
        log.log(torch.ones(1, dtype=torch.int32), "narrow")
    fetched = log.fetch(wait=True)
    assert fetched == Fetched([("narrow", [1])] * (rows - 1), 1)


def test_forgetting_happens_in_place_and_graphs_go_on() -> None:
    log, number = prepared(), torch.zeros(1, dtype=torch.int32)
    graph = captured(log, number, "a")
    graph.replay()
    log.fetch()
    graph.replay()
    log.forget()
    assert entries(log.fetch(wait=True)) == []
    number.fill_(9)
    graph.replay()
    assert entries(log.fetch(wait=True)) == [("a", [9])]


def test_the_log_is_made_once_and_before_a_capture() -> None:
    log = GraphLog()
    log.forget()
    assert log.fetch() == Fetched([], 0)
    with pytest.raises(RuntimeError, match=r"prepare\(\)"):
        log.log(torch.zeros(1, dtype=torch.int32), "a")
    log.prepare(CPU)
    captured(log, torch.zeros(1, dtype=torch.int32), "a")
    log.prepare(CPU)
    assert entries(log.fetch()) == [("a", [0])]


def test_a_log_that_inference_made_can_be_written_to() -> None:
    with torch.inference_mode():
        log = new_log(CPU)
    append(log, torch.ones(1, dtype=torch.int32), 0)
    assert log[1, :2].tolist() == [0, 1]


@pytest.mark.gpu
def test_a_look_at_the_log_without_waiting(no_sync: Any) -> None:
    log, number = GraphLog(), torch.zeros(1, dtype=torch.int32, device="cuda")
    log.prepare(number.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number += 1
        log.log(number, "a")
    with no_sync():
        for _ in range(5):
            graph.replay()
        fetched = log.fetch()
    torch.cuda.synchronize()
    if fetched is None:  # as a rule
        fetched = log.fetch()
    assert entries(fetched) == [("a", [i]) for i in range(1, 6)]
