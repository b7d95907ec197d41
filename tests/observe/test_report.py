"""One page shows the run, needs nothing beside itself, and is written whatever the directory holds."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.observe.events import EventWriter, events_path
from shoal.observe.facts import facts_path, write_facts
from shoal.observe.report import write_report
from shoal.observe.sink import Ending, write_ending
from tests.observe.synthetic import START_S, write_run


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open; collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def report(directory: Path) -> str:
    return write_report(directory).read_text(encoding="utf-8")


def test_the_page_shows_the_run(tmp_path: Path) -> None:
    """The figures of a known run are on its page, the slowest rank by name, the restart and the skipped step."""
    write_run(tmp_path, stop_at=20, ranks=3)
    write_facts(tmp_path, {"baseline": {"name": "bigram", "loss": 2.5}, "samples": [{"step": 40, "text": "def f():"}]})
    text = re.sub(r"\s+", " ", Balanced(report(tmp_path)).text)
    for expected in (
        "tiny", "finished", "2.000", "20 % below bigram 2.500", "97.50 %", "20.5k", "912,384",
        "Rank 2 is the slowest", "started 2 times; 5 of its steps", "changed no weight: 7", "def f():", "steps = 40",
    ):  # fmt: skip
        assert expected in text


def test_the_page_is_whole(tmp_path: Path) -> None:
    """No script, no link, no address: the page is one file, and its policy forbids the rest. loss.png is a picture."""
    write_run(tmp_path)
    page = report(tmp_path)
    found = Balanced(page)
    assert found.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not [name for name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    """A tag in a name, a fact, its key, a sample or the run file stays text."""
    evil = "<script>alert('&')</script>"
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(f'[run]\nname = "{evil}"\nsteps = 50\n')
    names = ("torch", "device", "state", "loss_unit", evil)
    samples = [{"prompt": evil, "text": evil}]
    write_facts(tmp_path, dict.fromkeys(names, evil) | {"baseline": {"name": evil, "loss": 1.0}, "samples": samples})
    page = report(tmp_path)
    assert "<script" not in page
    assert page.count(html.escape("<script>")) >= 8
    Balanced(page)


def test_damage_still_gives_a_page(tmp_path: Path) -> None:
    """Torn events, broken facts, a run file that is no TOML: the page says what it could not read."""
    write_run(tmp_path)
    path = events_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-30] + b"\n\x00\x00\n")
    facts_path(tmp_path).write_text("{")
    (tmp_path / "run.toml").write_bytes(b"\xff[run")
    text = Balanced(report(tmp_path)).text
    for expected in ("2 lines of rank 0", "facts.json", "run.toml is not TOML", "step 40"):
        assert expected in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    """Rank, exit code and cause are on the page, escaped, and the badge says failed."""
    write_run(tmp_path, steps=7)
    write_ending(tmp_path, Ending("failed", "ArithmeticError: <b>a mistake</b>", rank=1, exit_code=1))
    page = report(tmp_path)
    text = re.sub(r"\s+", " ", Balanced(page).text)
    assert "failed at step 7 of 40" in text
    assert "Rank 1 failed with exit code 1:" in text
    assert "ArithmeticError: <b>a mistake</b>" in text
    assert "<b>a mistake" not in page


def test_a_run_that_failed_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    """A run file and an ending are enough; and a killed run is called killed."""
    (tmp_path / "run.toml").write_text('[run]\nname = "own"\nsteps = 9\n')
    assert "killed at step 0 of 9" in Balanced(report(tmp_path)).text
    write_ending(tmp_path, Ending("failed", "the loss is a number", exit_code=2))
    text = Balanced(report(tmp_path)).text
    assert "failed at step 0 of 9" in text
    assert "the loss is a number" in text


def test_communication_and_memory_are_shown(tmp_path: Path) -> None:
    """Bytes and seconds of each kind of collective in a mean step, and the peak memory of every rank."""
    for rank in range(2):
        with EventWriter(tmp_path, rank=rank) as writer:
            for step in (1, 2):
                values = {"time/step": 0.1, "memory/peak_bytes": (rank + 1) * 2**20 * 100.0,
                          "wire/all_reduce/bytes_sent": 2e6 * step, "wire/all_reduce/exposed_s": 0.01,
                          "wire/all_reduce/hidden_s": 0.03}  # fmt: skip
                writer.write(step, values, time_s=float(step))
    text = re.sub(r"\s+", " ", Balanced(report(tmp_path)).text)
    assert "all-reduce 3 MB 10.0 ms 30.0 ms" in text
    assert "100 MiB" in text
    assert "200 MiB" in text


def test_a_rank_that_sends_nothing_has_no_curve_of_it(tmp_path: Path) -> None:
    """One rank alone, whose curve would be a line at 0 bytes."""
    for name, sent in (("alone", 0.0), ("one of two", 12_000.0)):
        with EventWriter(tmp_path / name, rank=0) as writer:
            for step in (1, 2):
                writer.write(step, {"time/step": 0.1, "wire/bytes_sent": sent}, time_s=float(step))
        assert ("Sent by rank 0" in report(tmp_path / name)) == (sent > 0)


def test_what_masks_freezing_and_tiers_did_is_drawn(tmp_path: Path) -> None:
    """Where it was recorded: shares in percent, what was moved in bytes, and the wait for it."""
    recorded = {"sparsity/density": 0.5, "freeze/share": 0.25, "memory/exposed_s": 0.025,
                "memory/to_host_bytes": 2e6, "memory/to_device_bytes": 0.0}  # fmt: skip
    with EventWriter(tmp_path, rank=0) as writer:
        for step in (1, 2):
            writer.write(step, {"time/step": 0.1, **recorded}, time_s=float(step))
    text = re.sub(r"\s+", " ", Balanced(report(tmp_path)).text)
    for said in ("Weights that masks keep", "50 %", "Parameters that were frozen", "25 %", "Moved by memory.offload",
                 "2 MB", "Stood still for these moves ms a step"):  # fmt: skip
        assert said in text
    assert "to device" not in text


def test_the_loss_is_drawn_by_step_tokens_and_time(tmp_path: Path) -> None:
    """Each has a tab, without a script; restarts are marked in each."""
    write_run(tmp_path, stop_at=20)
    page = report(tmp_path)
    for label in ("by step", "by tokens", "by time"):
        assert f">{label}</label>" in page
    assert page.count('class="mark"') >= 3
    assert "seconds of training" in page


def test_facts_are_in_words(tmp_path: Path) -> None:
    """Known keys have a name and a unit, unknown ones lose their underscores, lists are joined."""
    write_run(tmp_path)
    write_facts(tmp_path, {"data": {"train/bytes": 3_650_000}, "own": {"tuning_runs": [1, 2]}, "compiled": True})
    changes = ("", "3 of 4 replicas; rank 2 lost after step 120", "4 of 4 replicas; rank 3 joined after step 200")
    write_facts(tmp_path, {"membership": [{"generation": i, "change": change} for i, change in enumerate(changes)]})
    text = re.sub(r"\s+", " ", Balanced(report(tmp_path)).text)
    for expected in ("Training text 3.65 MB", "Own: tuning runs 1, 2", "Compiled yes", "Trained parameters 912,384"):
        assert expected in text
    assert f"Replicas lost and joined {changes[1]}. {changes[2]}" in text


def test_many_ranks_are_shown_by_their_slowest(tmp_path: Path) -> None:
    """Of 30 ranks 24 have a row, the slowest among them."""
    write_run(tmp_path, steps=3, ranks=30)
    page = report(tmp_path)
    text = re.sub(r"\s+", " ", Balanced(page).text)
    assert '<tr><th data-label="rank">29</th>' in page
    assert page.count('<td data-label=""><div class="bar">') == 24
    assert "Rank 29 is the slowest" in text
    assert "The 24 with the most work of 30 are shown" in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_short_run_has_a_page(tmp_path: Path, steps: int) -> None:
    """No step, one step, two steps: nothing divides by zero, and the page says what is missing."""
    write_run(tmp_path, steps=steps, ranks=1)
    text = Balanced(report(tmp_path)).text
    assert f"step {steps} of 40" in text
    assert ("No step has been recorded" in text) == (steps == 0)
    assert (tmp_path / "loss.png").exists() == (steps > 0)


def test_a_step_without_times_or_losses_has_a_page(tmp_path: Path) -> None:
    """Measurements that nobody made are said to be missing; values that are not finite draw nothing."""
    with EventWriter(tmp_path, rank=4) as writer:
        writer.write(1, {"loss/train": float("nan"), "lr": 1e308, "own/measure": 1.0}, time_s=0.0)
    text = Balanced(report(tmp_path)).text
    for expected in ("Not measured", "No step has its time measured", "There is no run.toml"):
        assert expected in text
    assert not (tmp_path / "loss.png").exists()


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    """An empty directory, and one that is not there, are a usage error that names what is needed."""
    with pytest.raises(UsageError, match=r"holds no run.*events/"):
        write_report(tmp_path)
    with pytest.raises(UsageError, match="is not there"):
        write_report(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    """Where the page cannot replace what is there, the sentence names the file."""
    write_run(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(EnvironmentFault, match=r"report\.html"):
        write_report(tmp_path)


def test_the_room_needs_no_torch(tmp_path: Path) -> None:
    """A report is written in a process that never imports torch."""
    write_run(tmp_path, ranks=1)
    program = (
        "import sys; from pathlib import Path; from shoal.observe.report import write_report\n"
        "import shoal.observe.sinks, shoal.observe.terminal\n"
        "write_report(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": "src"})
    assert done.returncode == 0


def test_the_page_shows_what_saves_took(tmp_path: Path) -> None:
    """A row a checkpoint, with the stall of the step after it; a run that saved nothing has no such section."""
    write_run(tmp_path, steps=20, ranks=1)
    assert "Checkpoints" not in Balanced(report(tmp_path)).text
    figures = {"saved_step": 20, "save_s": 1.5, "state_bytes": 4e6, "written_bytes": 2.5e6, "reused_bytes": 5e5}
    with EventWriter(tmp_path, rank=0) as writer:
        writer.write(21, {"time/checkpoint_stall": 0.007}, time_s=START_S + 21)
        writer.write(22, {f"checkpoint/{name}": value for name, value in figures.items()}, time_s=START_S + 22)
    text = re.sub(r"\s+", " ", Balanced(report(tmp_path)).text)
    assert "20 7.00 ms 1.50 s 2.5 MB 500 kB 75 %" in text
