"""What is measured is on disk at once, whole, and read back as it was."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import EnvironmentFault
from shoal.observe.events import Event, EventWriter, events_path, read_events, scan_events, series
from tests.waiting import wait_until

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
LINES = st.lists(st.tuples(st.integers(0, 10**12), st.dictionaries(st.text(), NUMBERS, min_size=1, max_size=4)))


def event(step: int, generation: int = 0, **values: float) -> Event:
    return Event(step=step, time_s=float(step), generation=generation, values=dict(values))


@settings(max_examples=50, deadline=None)
@given(LINES)
def test_what_is_written_is_read(lines: list[tuple[int, dict[str, float]]]) -> None:
    """Steps, names and finite values survive the file exactly, and every other value comes back as NaN."""
    with TemporaryDirectory() as folder:
        with EventWriter(Path(folder), rank=3, generation=2) as writer:
            for step, values in lines:
                writer.write(step, values, time_s=1.5)
        found = read_events(Path(folder), rank=3)
    assert [(one.step, one.time_s, one.generation) for one in found] == [(step, 1.5, 2) for step, _ in lines]
    for one, (_, values) in zip(found, lines, strict=True):
        for name, value in values.items():
            read = one.get(name)
            assert read is not None
            assert read == value if math.isfinite(value) else math.isnan(read)


def test_the_file_is_the_contract(tmp_path: Path) -> None:
    """A line holds exactly step, time, generation and values, as strict JSON; what is not finite is null."""
    with EventWriter(tmp_path, rank=0) as writer:
        writer.write(12, {"loss/train": 2.5, "grad/norm": math.inf}, time_s=1760000000.25)
    line = (tmp_path / "events" / "rank-00000.jsonl").read_text(encoding="utf-8")
    assert line.endswith("}\n")
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 12,
        "time": 1760000000.25,
        "generation": 0,
        "values": {"loss/train": 2.5, "grad/norm": None},
    }


def test_a_reader_sees_a_line_while_the_writer_lives(tmp_path: Path) -> None:
    """A line is on disk when `write` returns, with the file still open."""
    writer = EventWriter(tmp_path, rank=0)
    writer.write(1, {"lr": 0.1}, time_s=0.0)
    assert [one.step for one in read_events(tmp_path)] == [1]
    writer.close()
    writer.close()


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    """A line cut in the middle is left out and counted, and the next writer begins a line of its own."""
    with EventWriter(tmp_path, rank=0) as writer:
        writer.write(1, {"lr": 0.1}, time_s=0.0)
        writer.write(2, {"lr": 0.2}, time_s=0.0)
    path = events_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-9])
    assert [one.step for one in read_events(tmp_path)] == [1]
    with EventWriter(tmp_path, rank=0) as writer:
        writer.write(2, {"lr": 0.3}, time_s=0.0)
    events, unreadable = scan_events(tmp_path)
    assert ([one.step for one in events], unreadable) == ([1, 2], 1)
    assert series(events, "lr") == ([1, 2], [0.1, 0.3])


@pytest.mark.parametrize(
    "line",
    [b"[]", b"\xff\xfe", b'{"step": -1, "time": 0}', b'{"step": 1e400, "time": 0}', b'{"step": 1}', b"[" * 10**5],
)
def test_a_foreign_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    """Lines that are no event are counted, never raised; unknown keys are no fault."""
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(line + b'\n{"step": 7, "time": 1, "values": {"lr": 1}, "host": "a"}\n')
    events, unreadable = scan_events(tmp_path)
    assert ([one.step for one in events], unreadable) == ([7], 1)


def test_kill_9_leaves_whole_lines(tmp_path: Path) -> None:
    """A process killed while it writes as fast as it can leaves consecutive, whole lines, but for the last: the system
    may end a write between two pages of the file."""
    program = (
        "from pathlib import Path; from shoal.observe.events import EventWriter; import itertools, sys\n"
        "writer = EventWriter(Path(sys.argv[1]), rank=0)\n"
        "for step in itertools.count(1): writer.write(step, {'loss/train': step / 3}, time_s=0.0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": "src"})
    path = events_path(tmp_path, 0)
    wait_until(lambda: path.exists() and path.stat().st_size > 20_000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    events, unreadable = scan_events(tmp_path)
    assert unreadable == (not path.read_bytes().endswith(b"\n"))
    assert len(events) > 100
    assert [one.step for one in events] == list(range(1, len(events) + 1))


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """On a device that is always full, a line is given up, the fault is said once, and without `warn` it is raised."""
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    said: list[str] = []
    with EventWriter(tmp_path, rank=0, warn=said.append) as writer:
        writer.write(1, {"lr": 1.0}, time_s=0.0)
        writer.write(2, {"lr": 1.0}, time_s=0.0)
        assert writer.lost_lines == 2
    assert len(said) == 1
    assert "No space left" in said[0]
    with EventWriter(tmp_path, rank=0) as writer, pytest.raises(OSError, match="No space left"):
        writer.write(1, {"lr": 1.0}, time_s=0.0)


def test_a_directory_that_cannot_be_made_is_an_environment_fault(tmp_path: Path) -> None:
    """Where a file stands in the way of the directory, the sentence names the path and the repair."""
    (tmp_path / "run").write_text("")
    with pytest.raises(EnvironmentFault, match=r"rank-00000\.jsonl.*run\.directory"):
        EventWriter(tmp_path / "run", rank=0)


def test_a_later_life_supersedes_the_tail() -> None:
    """After a return to step 3, steps 3 and later count only as computed the second time."""
    first = [event(step, loss=1.0 * step) for step in (1, 2, 3, 4, 5)]
    second = [event(step, loss=10.0 * step) for step in (3, 4)]
    assert series(first + second, "loss") == ([1, 2, 3, 4], [1.0, 2.0, 30.0, 40.0])


def test_a_resume_voids_what_was_not_computed_again(tmp_path: Path) -> None:
    """With sparse lines, a resume after step 12 removes step 20 of the old life although the new one wrote none yet."""
    with EventWriter(tmp_path, rank=0) as writer:
        for step in (10, 20):
            writer.write(step, {"loss": 1.0}, time_s=0.0)
        writer.resume(12, time_s=0.0)
    assert series(read_events(tmp_path), "loss") == ([10], [1.0])


def test_two_lines_of_a_step_complete_each_other() -> None:
    """An evaluation written after its step's own line takes nothing away from it."""
    events = [event(1, loss=1.0), event(1, held=2.0), event(2, loss=3.0)]
    assert series(events, "loss") == ([1, 2], [1.0, 3.0])
    assert series(events, "held") == ([1], [2.0])


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=40))
def test_a_series_is_strictly_ascending_and_ends_in_the_last_word(lines: list[tuple[int, bool]]) -> None:
    """Whatever the order of the lines, steps ascend, and each value is the last that was written for its step."""
    events = [
        Event(step=step, time_s=0.0, values={"x" if has else "y": float(at)}) for at, (step, has) in enumerate(lines)
    ]
    steps, values = series(events, "x")
    assert steps == sorted(set(steps))
    for step, value in zip(steps, values, strict=True):
        assert value == max(at for at, (other, has) in enumerate(lines) if other == step and has)
