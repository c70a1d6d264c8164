"""Nothing that happens to the process or the disk costs more than a line, or stops the training."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gradscale import SettingError
from gradscale.runlog import Run, RunLog, encode, read, writer

ROOT = Path(__file__).parents[2]
NAME = "rank-0.jsonl"


def step(number: int, **more: Any) -> dict[str, Any]:
    one = {"optimizer": 0, "applied": number % 7 != 0}
    return {"kind": "step", "step": number, "scale": 8.0, "steps": [one], "moves": [], **more}


def write_all(log: RunLog, numbers: Iterable[int], flush: bool = False) -> None:
    for number in numbers:
        log.write(step(number))
        if flush:
            log.flush()


def read_quietly(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read(path)


def numbers(path: Path) -> list[int]:
    return [line["step"] for line in read_quietly(path).steps]


def test_log_that_is_cut_anywhere_lacks_its_last_line_only(tmp_path: Path) -> None:
    lines = [encode(step(number, culprits=[["a\nb", 0, 1, 2]])) for number in range(1, 5)]
    text, file = b"".join(lines), tmp_path / NAME
    ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    for cut in range(len(text) + 1):
        file.write_bytes(text[:cut])
        whole = sum(end - 1 <= cut for end in ends[1:])  # the end of a line is no part of it
        assert numbers(tmp_path) == list(range(1, whole + 1))
        torn = cut > 0 and cut - 1 not in [end - 1 for end in ends] and cut + 1 not in ends
        assert read_quietly(tmp_path).skipped_lines == torn
        if cut % 16 == 0:  # a thread each
            log = RunLog(tmp_path)
            log.write(step(9))
            log.close()
            assert numbers(tmp_path) == [*range(1, whole + 1), 9]


PROGRAM = """
import sys
from gradscale.runlog import RunLog
log = RunLog(sys.argv[1], max_steps=int(sys.argv[2]))
print(flush=True)
number = log.last_step
while True:
    number += 1
    one = {"optimizer": 0, "applied": number % 7 != 0}
    log.write({"kind": "step", "step": number, "scale": 8.0, "steps": [one], "moves": []})
    if number % 64 == 0:
        log.flush()  # else the queue would be full
"""


def kill_again_and_again(folder: Path, max_steps: int, times: int) -> None:
    """Kills a process that logs, at random moments, and has another one continue."""
    chance = random.Random(str(folder))
    before = 0
    for _ in range(times):
        command = [sys.executable, "-c", PROGRAM, str(folder), str(max_steps)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            time.sleep(chance.uniform(0.0, 0.06))
            process.kill()
        run = read_quietly(folder)
        found = [line["step"] for line in run.steps]
        last = max(found, default=0)
        assert last >= before
        before = last
        kept = set(found)
        missing = set(range(1, last + 1)) - kept
        if max_steps > last:
            assert not missing
        assert all(number % 7 for number in missing)  # skips are all there
        assert len(found) == len(kept)
        assert sum(number % 7 > 0 for number in found) <= max_steps
    assert read_quietly(folder).skipped_lines <= times
    assert before > 0


@pytest.mark.parametrize(
    ("max_steps", "times"),
    [(10**6, 3), (100, 3), *(pytest.param(n, 100, marks=pytest.mark.soak) for n in (10**7, 100))],
)
def test_killed_process_loses_at_most_a_line(tmp_path: Path, max_steps: int, times: int) -> None:
    for first in range(0, times, 20):  # files stay short, since each is read after every kill
        kill_again_and_again(tmp_path / str(first), max_steps, min(times - first, 20))


def test_step_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    slow, write = threading.Event(), os.write

    def stall(file: int, text: bytes) -> int:
        slow.wait(10)
        return write(file, text)

    monkeypatch.setattr(writer.os, "write", stall)
    monkeypatch.setattr(writer, "_WAITING", 10)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="is incomplete: the disk is too slow"):
        write_all(log, range(1, 40))
    assert time.perf_counter() - start < 5
    slow.set()
    log.close()
    assert numbers(tmp_path) in ([*range(1, 11)], [*range(1, 12)])  # one may be on its way


def test_full_disk_is_one_warning_and_the_log_goes_on(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(step(1))
    log.flush()
    file = log._writer._file
    kept = os.dup(file)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        write_all(log, (2, 3), flush=True)
    assert len(caught) == 1
    os.dup2(kept, file)
    os.close(kept)
    os.close(full)
    log.write(step(4))
    log.close()
    assert numbers(tmp_path) == [1, 4]


def test_line_that_is_written_in_part_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = RunLog(tmp_path), os.write
    monkeypatch.setattr(writer.os, "write", lambda file, text: write(file, text[:20]))
    log.write(step(1))
    with pytest.warns(UserWarning, match="No space left on device"):
        log.flush()
    monkeypatch.undo()
    log.write(step(2))
    log.close()
    assert numbers(tmp_path) == [2]


def test_folder_that_vanishes_is_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = RunLog(folder)
    log.write(step(1))
    log.flush()
    (folder / NAME).unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="the file was removed") as caught:
        write_all(log, range(2, 9), flush=True)
    assert len(caught) == 1
    log.close()


def test_line_that_cannot_be_encoded_is_one_warning(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(step(1, loss=object()))
    with pytest.warns(UserWarning, match="cannot be encoded"):
        log.flush()
    log.write(step(2))
    log.close()
    log.write(step(3))  # ignored
    assert numbers(tmp_path) == [2]


def test_file_has_one_writer(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    with pytest.raises(SettingError, match="one writer"):
        RunLog(tmp_path)
    program = "import sys; from gradscale.runlog import RunLog; RunLog(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "SettingError: A run log can have only one writer" in done.stderr
    log.close()
    RunLog(tmp_path).close()


def test_log_that_nobody_refers_to_is_closed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(step(1))
    held: list[Any] = [log]
    held.append(held)  # only the collector finds it
    del log, held
    other = RunLog(tmp_path)
    assert numbers(tmp_path) == [1]
    other.write(step(2))
    del other
    gc.collect()
    assert numbers(tmp_path) == [1, 2]


class Collecting(dict[str, Any]):
    """Encoding it collects garbage, as encoding anything may."""

    def items(self) -> Any:
        time.sleep(0.2)  # until its log is garbage
        gc.collect()
        return super().items()


def test_log_that_is_collected_by_its_own_thread_is_closed(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.me, self.log = self, RunLog(tmp_path)

    trainer = Trainer()
    trainer.log.write({"kind": "other", "x": Collecting(a=1)})
    write_all(trainer.log, range(1, 6))
    thread = trainer.log._writer._thread
    del trainer
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    RunLog(tmp_path).close()  # nobody has the file any more


def test_line_after_the_end_does_not_stop_flush(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.close()
    log._writer._queue.append(step(1))  # by a thread that was about to, when another one closed it
    log.flush()
    assert numbers(tmp_path) == []


def test_findings_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    finding = {"kind": "stuck", "where": "", "evidence": "e", "remedy": "r"}
    for bad in (True, False):
        log = RunLog(tmp_path)
        log.write({"kind": "run", "version": 1})
        log.write(step(1))
        if bad:
            log.write({"kind": "finding", "step": 1, "finding": finding})
        log.close()
        assert [each.kind for each in read(tmp_path).findings] == ["stuck"] * bad


@pytest.mark.parametrize("wrong", [{"where": [1]}, {"remedy": None}, {"step": "a"}])
def test_finding_of_another_type_is_a_line_that_cannot_be_read(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    finding = {"kind": "stuck", "where": "", "evidence": "e", "remedy": "r", "step": 1}
    lines = [
        {"kind": "finding", "finding": finding},
        {"kind": "finding", "finding": finding | wrong},
    ]
    (tmp_path / "rank-0.jsonl").write_bytes(b"".join(map(encode, lines)))
    run = read_quietly(tmp_path)
    assert (len(run.findings), run.skipped_lines) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "a"},
        {"format": {}},
        {"tensors": [{"name": "w", "kind": "weight_grad", "numel": 1, "counts": 1}]},
        {"tensors": [{"name": "w", "kind": 1, "numel": 1}]},
        {"tensors": [{"name": "w", "kind": "weight_grad", "numel": 1, "infs": "many"}]},
        {"first_nonfinite": []},
        {"facts": [["scale", "", "x"]]},
    ],
)
def test_sample_of_another_type_is_a_line_that_cannot_be_read(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    tensor = {"name": "w", "kind": "weight_grad", "numel": 1, "low": 2, "counts": [1]}
    sample = {"kind": "sample", "step": 1, "format": "float16", "tensors": [tensor]}
    (tmp_path / "rank-0.jsonl").write_bytes(b"".join(map(encode, [sample, sample | wrong])))
    run = read_quietly(tmp_path)
    assert (len(run.samples), run.skipped_lines) == (1, 1)


def test_settings_that_are_none_are_a_line_that_cannot_be_read(tmp_path: Path) -> None:
    header = {"kind": "run", "version": 1, "settings": "none"}
    (tmp_path / "rank-0.jsonl").write_bytes(encode(header))
    run = read_quietly(tmp_path)
    assert (run.settings, run.headers, run.skipped_lines) == ({}, [], 1)


def test_end_of_the_interpreter_writes_what_waits(tmp_path: Path) -> None:
    program = (
        "import sys; from gradscale.runlog import RunLog; log = RunLog(sys.argv[1])\n"
        "for n in range(1, 301): log.write({'kind': 'step', 'step': n, 'steps': []})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    assert numbers(tmp_path) == list(range(1, 301))


def test_forked_process_writes_nothing_and_frees_the_file(tmp_path: Path) -> None:
    program = """
import os, sys, time, warnings
from gradscale.runlog import RunLog
log = RunLog(sys.argv[1])
for n in range(1, 200): log.write({'kind': 'step', 'step': n, 'steps': []})
child = os.fork()
if not child:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.write({'kind': 'step', 'step': 1000, 'steps': []})
        log.close()
    print(len(caught), caught[0].message, flush=True)
    time.sleep(0.5)  # longer than the parent needs to open it anew
    sys.exit()  # by way of atexit
log.close()
log = RunLog(sys.argv[1])
log.write({'kind': 'step', 'step': 200, 'steps': []})
log.close()
sys.exit(os.waitpid(child, 0)[1])
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("1 The run log")
    assert "was forked" in done.stdout
    assert numbers(tmp_path) == list(range(1, 201))


@pytest.mark.parametrize("value", [0, 1, True, 2.5, None])
def test_bound_must_be_a_number(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingError, match="max_steps must be a whole number >= 2, got"):
        RunLog(tmp_path, max_steps=value)


def test_thinning_keeps_skips_and_all_other_lines(tmp_path: Path) -> None:
    other = {"kind": "novelty", "text": '{"kind":"step","step":3,'}
    for first in (1, 501):  # the second time it is continued
        log = RunLog(tmp_path, max_steps=64)
        log.write({"kind": "run", "version": 1, "settings": {}})
        log.write(other)
        for number in range(first, first + 500):
            log.write(step(number))
            log.write({"kind": "event", "step": number, "name": "skip", "scale": 1.0})
        log.close()
    run = read(tmp_path)
    skipped = [line["step"] for line in run.steps if not line["steps"][0]["applied"]]
    applied = [line["step"] for line in run.steps if line["steps"][0]["applied"]]
    assert skipped == list(range(7, 1001, 7))
    assert applied == [number for number in range(16, 1001, 16) if number % 7]
    assert len(run.events) == 1000
    assert len(run.headers) == 2
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert lines.count(other) == 2
    assert sum(line["kind"] == "thinned" for line in lines) == 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_log_is_thinned_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log = RunLog("run", max_steps=10)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for number in range(1, 101):
        log.write(step(number))
    log.close()
    assert len([line for line in read(tmp_path / "run").steps if line["step"] % 7]) <= 10


def test_steps_with_equal_numbers_do_not_stop_the_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_steps=4)
    for _ in range(40):
        log.write(step(8))
    log.close()
    assert len(read(tmp_path).steps) == 40


def test_file_that_cannot_be_thinned_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path, max_steps=4)

    def fail(old: Any, new: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer.os, "replace", fail)
    for number in range(1, 7):
        log.write(step(number))
    with pytest.warns(UserWarning, match="grows beyond max_steps: Input/output error"):
        log.flush()
    log.close()
    assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
