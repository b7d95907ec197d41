"""kill -9 at any point of a save: the next start finds the newest verified checkpoint, and nothing else is left."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import TEMPORARY, Places
from tests.checkpoint.killed_saver import ENDS, HALVES, bury_all, deaths, folder_of
from tests.checkpoint.states import leftovers, same, save, saver_for, state_of
from tests.forkserver import forkserver
from tests.waiting import HANG_S

COMMITTED_FROM = deaths().index("commit/rename.after")


@pytest.fixture(
    scope="module", params=["none", *(pytest.param(way, marks=pytest.mark.slow) for way in ("deltas", "disk"))]
)
def graves(request, tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A run directory for each death, and how each process ended: children of one that has no threads yet."""
    root = tmp_path_factory.mktemp("killed")
    process = forkserver().Process(target=bury_all, args=(root, request.param))
    process.start()
    assert process.pid is not None
    try:
        process.join(HANG_S)
    finally:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 0
    return root, json.loads((root / ENDS).read_text())


@pytest.mark.parametrize("death", deaths())
def test_a_kill_at_any_point_costs_at_most_the_save_it_struck(graves, death):
    """The save counts from the rename on; before it the previous one is there; each is whole and has its own bits."""
    root, ends = graves
    assert ends[death] == -signal.SIGKILL, "the save never passed this point"
    directory = folder_of(root, death)
    manifest, problems = newest_verified(directory)
    assert manifest is not None
    assert (manifest.step, problems) == (200 if deaths().index(death) >= COMMITTED_FROM else 100, [])
    assert same(read_all(manifest, directory), state_of(manifest.step))
    assert Places(directory).latest.read_text().split()[0] in [path.name for path in Places(directory).root.iterdir()]


@pytest.mark.parametrize("death", deaths())
def test_the_next_start_leaves_nothing_behind_and_can_save(graves, death, tmp_path):
    """Unfinished files and unnamed objects are gone once a saver has started, and the next save is whole."""
    directory = folder_of(graves[0], death)
    saver = saver_for(directory, keep=1)
    assert leftovers(directory) == []
    report = save(saver, 300)
    assert (report.committed, report.error) == (True, None)
    manifest, problems = newest_verified(directory)
    assert manifest is not None
    assert (manifest.step, problems, leftovers(directory)) == (300, [], [])


def test_halves_of_files_were_really_left(tmp_path):
    """The deaths in the middle of a write leave a file that is not whole: the tests above saw real damage."""
    root = tmp_path / "again"
    for half in HALVES:
        child = os.fork()
        if child == 0:
            from tests.checkpoint.killed_saver import save_and_die

            save_and_die(folder_of(root, half), half)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = [path for path in folder_of(root, half).rglob("*") if path.is_file()]
        assert any(TEMPORARY in str(path) for path in found)
