"""How processes end: a verb that is done, whatever its threads are doing, and a rank whose spill disk fails it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from tests.cli.project import Project, project, ranks_of
from tests.waiting import HANG_S

PROGRAM = """
import atexit, sys, threading
import torch.distributed as dist
from shoal.__main__ import main

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)

def ask():
    while True:
        store.check(["nothing"])  # in C++, without the interpreter's lock

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
atexit.register(print, "registered for the end")
sys.argv = ["shoal", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_threads_inside_cpp_do_not_take_the_process_along(tmp_path: Path) -> None:
    """The interpreter's teardown would: "terminate called without an active exception", and SIGABRT."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments, code in ((["--version"], 0), (["plan", "nowhere.toml"], 2)):
        command = [sys.executable, "program.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert (done.returncode, "terminate" in done.stderr) == (code, False)
        assert "registered for the end" in done.stdout


MODEL = "model.arguments={width=4096%s}"
"""Its state is large enough to leave the device."""
OFFLOADED = {
    "optimizer": ["memory.offload.optimizer=disk", "memory.offload.pool=4KiB"],
    "parameters": ["memory.offload.optimizer=disk", "memory.offload.parameters=disk", "memory.zero=3"],
}
WHOLE = "newest checkpoint is whole"
Losses = Callable[[str], dict[int, float]]


def made(folder: Path) -> Project:
    (folder / "spill").mkdir()
    return project(folder)


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return made(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of a run that nothing strikes, by home."""

    @functools.cache
    def losses(home: str) -> dict[int, float]:
        own = made(tmp_path_factory.mktemp("plain"))
        done = own.shoal(*keys(home, "plain"))
        assert done.returncode == 0, done.stderr
        return own.losses("plain")

    return losses


def keys(home: str, run: str, *, hold: bool = False) -> list[str]:
    """Of a run that stops before its fifth step, if it is to `hold`, until there is a file `go`."""
    common = [
        MODEL % (", hold_at=5" if hold else ""),
        f"run.directory={run}",
        f"memory.offload.folder={os.curdir}/spill",
    ]
    return ["train", "run.toml", "run.processes=1", *common, *OFFLOADED[home]]


def held(own: Project, home: str) -> tuple[subprocess.Popen[bytes], int]:
    """A run in its fifth step, and its rank's process."""
    launcher = own.start_anew(*keys(home, "struck", hold=True))
    own.wait_for_step(4, "struck")
    (rank,) = ranks_of(launcher)
    return launcher, rank


def spilled(rank: int) -> list[Path]:
    """The rank's spill files, which have no names elsewhere. Its threads open and close others meanwhile."""
    found = []
    for link in Path(f"/proc/{rank}/fd").iterdir():
        with suppress(OSError):
            if "/spill/" in os.readlink(link):
                found.append(link)
    return found


def require_the_run_goes_on(own: Project, home: str, plain: Losses) -> None:
    """To the losses of a run that nothing struck, and nothing is left of its files."""
    assert own.here("checkpoint", "verify", "struck").returncode == 0
    done = own.shoal(*keys(home, "struck"))
    assert done.returncode == 0, done.stderr
    assert own.losses("struck") == plain(home)
    assert not list((own.folder / "spill").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("home", OFFLOADED)
def test_a_killed_rank_leaves_no_spill_file(own: Project, home: str, plain: Losses) -> None:
    """And the launcher says how far it came, as the rank itself cannot."""
    launcher, rank = held(own, home)
    assert spilled(rank)
    os.kill(rank, signal.SIGKILL)
    assert launcher.wait(HANG_S) == 128 + signal.SIGKILL
    assert "\nfailed at step 4 of " in own.said()
    require_the_run_goes_on(own, home, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "code"), [("optimizer", EnvironmentFault.exit_code), ("parameters", 128 + signal.SIGBUS)]
)
def test_a_disk_that_cannot_be_read_ends_the_run_with_a_sentence(
    own: Project, home: str, code: int, plain: Losses
) -> None:
    """Its files are cut off in mid-run: what was written is not there any more, as on a disk with errors. A read says
    so; touching mapped parameters kills the rank, and the launcher says what that means.
    """
    launcher, rank = held(own, home)
    for path in spilled(rank):
        os.truncate(path, 0)
    (own.folder / "go").touch()
    assert launcher.wait(HANG_S) == code, own.said()
    assert own.said().count(WHOLE) == 1, own.said()
    assert "Fatal Python error" not in own.said()
    require_the_run_goes_on(own, home, plain)


@pytest.mark.slow
@pytest.mark.parametrize("home", OFFLOADED)
def test_a_full_disk_ends_the_run_with_a_sentence(own: Project, home: str, plain: Losses) -> None:
    """A file system of 64 KiB, on which the run would go on from its checkpoint."""
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=64k tmpfs spill"
    if subprocess.run([*mounted, mount], cwd=own.folder, capture_output=True, check=False).returncode:
        pytest.skip("a mount of one's own takes user namespaces, which this kernel does not give")
    launcher, rank = held(own, home)
    os.kill(rank, signal.SIGKILL)
    launcher.wait(HANG_S)
    command = [sys.executable, "-m", "shoal", *keys(home, "struck")]
    full = subprocess.run(
        [*mounted, f'{mount} && exec "$@"', "sh", *command],
        cwd=own.folder, env=own.environ(), capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert full.returncode == EnvironmentFault.exit_code, full.stderr
    assert "No space left on device" in full.stderr
    assert full.stderr.count(WHOLE) == 1, full.stderr
    require_the_run_goes_on(own, home, plain)
