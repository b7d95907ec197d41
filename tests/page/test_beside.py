"""`observe.page = true`: the launcher serves the page of the run that it starts."""

from __future__ import annotations

import http.cookiejar
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import Project, project
from tests.waiting import HANG_S

pytest.importorskip("starlette", reason="pip install 'shoal[page]'")
pytest.importorskip("uvicorn", reason="pip install 'shoal[page]'")
KEYS = ("train", "run.toml", "observe.page=true", "run.processes=1")


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


def snapshot(address: str) -> dict[str, Any]:
    """What the page shows, opened as a browser does: by its address, then by its cookie."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    opener.open(address, timeout=HANG_S).read()
    return json.loads(opener.open(address.partition("?")[0] + "snapshot", timeout=HANG_S).read())


@pytest.mark.slow
def test_the_page_is_served_while_the_run_trains_and_no_longer(own: Project) -> None:
    """The address is printed once; without its token nothing is shown; the page knows the run and its steps; a run that
    has ended has no page."""
    running = own.start(*KEYS, "run.steps=1000000", "model.arguments={pause=0.05}", "checkpoint.every_steps=1000")
    own.wait_for_step(3)
    addresses = re.findall(r"live page: (http://127\.0\.0\.1:\d+/\?token=\S+)", own.said())
    assert len(addresses) == 1
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(addresses[0].partition("?")[0], timeout=HANG_S)
    shown = snapshot(addresses[0])["runs"][0]
    while shown["step"] == 0:  # the page reads every other second
        assert running.poll() is None, own.said()
        shown = snapshot(addresses[0])["runs"][0]
    assert (shown["name"], shown["state"]) == ("own", "running")
    running.terminate()
    assert running.wait(HANG_S) == 75, own.said()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(addresses[0], timeout=HANG_S)


def test_a_port_that_is_taken_is_refused_before_any_rank_starts(own: Project) -> None:
    """One sentence, exit 3."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = own.shoal(*KEYS, f"observe.page_port={taken.getsockname()[1]}")
    assert done.returncode == 3
    assert "nothing can listen at" in done.stderr
    assert not (own.folder / "used.jsonl").exists()
