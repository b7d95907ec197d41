"""The page of runs that train: what befalls them is told in sentences, on wide screens and on phones."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import OWN, RUN, Project, ranks_of
from tests.page.watching import watching
from tests.programs import Program
from tests.waiting import HANG_S, wait_until

pytest.importorskip("starlette", reason="pip install 'shoal[page]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
PHONE = {"width": 390, "height": 844}
SLOW = (
    r"^Rank 1 is slow: its own work takes \d+ % more than the median rank's, most of it in forward and backward, since "
    r"about step \d+\.$"
)
SPOILT = r"^1 step had a loss or a gradient norm that was not finite, and changed no weight; the last was step \d+\.$"
# A new process may take its place before the others have gone on without it.
LOST = r"^[23] of 3 replicas; rank 2 lost after step \d+(; rank 2 joined after step \d+)?\.$"
BEFALLEN = """

class Befallen(Logging):
    # A step takes 50 ms, and 50 ms more in the process that the file `slow` names; a file `nan` spoils one output.
    def forward(self, x):
        found = super().forward(x)
        if self.training:
            time.sleep(0.05 if not os.path.exists("slow") or open("slow").read() != str(os.getpid()) else 0.1)
            try:
                os.remove("nan")
            except FileNotFoundError:
                return found
            found = found * float("nan")
        return found


def befallen():
    return Befallen()
"""
ELASTIC = """
[elastic]
min = 1
max = 3
silence_s = 10
accept_s = 40
wait_s = 60
"""


def befallen(folder: Path, more: str = "") -> Project:
    """A project whose steps can be made slow and not finite, by files."""
    (folder / "own.py").write_text(OWN + BEFALLEN)
    run = RUN.replace("own:model", "own:befallen").replace("steps = 9", "steps = 4000")
    run = run.replace("every_steps = 1\n", "every_steps = 1000\n").replace("global_samples = 5", "global_samples = 6")
    (folder / "run.toml").write_text(run + more)
    return Project(folder)


@contextmanager
def training(own: Project, *arguments: str) -> Iterator[Program]:
    """`shoal train` in its first steps; it ends with the block."""
    running = own.start("train", "run.toml", *arguments)
    try:
        own.wait_for_step(5)
        yield running
    finally:
        running.terminate()
        running.wait(HANG_S)


def pids_by_rank(own: Project, pids: list[int]) -> dict[int, int]:
    """Which process writes the events of which rank."""
    found = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                match = re.search(r"events/rank-(\d+)\.jsonl", os.readlink(link))
            except OSError:
                continue
            if match:
                found[int(match[1])] = pid
    return found


def photographed(page: Any, folder: Path, name: str) -> None:
    """A picture of the whole page, which is no wider than its window."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
    picture = page.screenshot(path=folder / f"{name}.png", full_page=True)
    assert len(picture) > 20_000, name


@pytest.mark.slow
def test_a_run_that_trains_tells_of_its_slow_rank_its_lost_rank_and_its_nan(tmp_path: Path, opened: Any) -> None:
    """`observe.page` of an elastic run of three replicas: one is slowed down, one step is spoilt, one rank is killed;
    each is a sentence on the page, while the run goes on. Pictures of it are in the test's folder."""
    own, expect = befallen(tmp_path, ELASTIC), playwright.expect
    with training(own, "observe.page=true") as running:
        ranks: dict[int, int] = {}
        wait_until(lambda: len(ranks.update(pids_by_rank(own, ranks_of(running))) or ranks) == 3, own.said)
        address = re.findall(r"live page: (http://\S+)", own.said())[0]
        page = opened(address, viewport={"width": 1280, "height": 900})
        notices = page.locator("#notices .notice span")
        expect(page.locator(".run .state")).to_have_text("running")
        expect(page.locator("#ranks .lead")).to_contain_text("The ranks are even now")

        (tmp_path / "slow").write_text(str(ranks[1]))
        slow = re.compile(SLOW)
        expect(notices.filter(has_text=slow)).to_have_count(1)
        expect(page.locator("#ranks .lead")).to_contain_text("Rank 1 is the slowest now")

        (tmp_path / "nan").touch()
        spoilt = re.compile(SPOILT)
        expect(notices.filter(has_text=spoilt)).to_have_count(1)

        os.kill(ranks[2], signal.SIGKILL)
        lost = re.compile(LOST)
        expect(notices.filter(has_text=lost)).to_have_count(1)
        expect(page.locator(".run .state")).to_have_text("running")
        photographed(page, tmp_path, "wide-light")
        for name, options in {
            "wide-dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
            "phone-light": {"color_scheme": "light", "viewport": PHONE},
            "phone-dark": {"color_scheme": "dark", "viewport": PHONE},
        }.items():
            other = opened(address, **options)
            expect(other.locator("#notices .notice span").filter(has_text=spoilt)).to_have_count(1)
            photographed(other, tmp_path, name)
    assert running.returncode == 75, own.said()


@pytest.mark.slow
def test_shoal_watch_beside_a_run_tells_whose_loss_ended_it(tmp_path: Path, opened: Any) -> None:
    """Two ranks that cannot do without each other, one killed: the run's state, and who it was."""
    own, expect = befallen(tmp_path), playwright.expect
    with training(own, "run.processes=2") as running, watching(tmp_path / "runs/own") as (address, _):
        page = opened(address, viewport=PHONE)
        expect(page.locator(".run .state")).to_have_text("running")
        ranks = pids_by_rank(own, ranks_of(running))
        os.kill(ranks[1], signal.SIGKILL)
        expect(page.locator(".run .state")).to_have_text("failed")
        said = re.compile(r"^Rank 1 failed with exit code 137: ")
        expect(page.locator("#notices .notice.failure span").filter(has_text=said)).to_have_count(1)
        photographed(page, tmp_path, "phone-failed")
    assert running.returncode == 137
