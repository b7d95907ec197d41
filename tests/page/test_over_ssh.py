"""`shoal watch HOST:RUN_DIR`: the page of a run on another host, through a real sshd, and what stands in its way."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import msgspec
import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.page.over_ssh import Remote, forwarded, newest_run, remote_of
from tests.page.runs import write_run
from tests.services import sshd
from tests.waiting import HANG_S, wait_until

SOURCE = Path(__file__).parents[2] / "src"


def test_a_path_that_is_there_is_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOST:RUN_DIR is taken apart; a folder of this machine with a colon in its name is none."""
    monkeypatch.chdir(tmp_path)
    assert remote_of("me@gpu-1.site:runs/a") == Remote("me@gpu-1.site", "runs/a")
    assert remote_of("gpu1:") == Remote("gpu1", "")
    assert remote_of("[fd00::1]:/runs/a") == Remote("fd00::1", "/runs/a")
    assert remote_of("runs/a") is None
    (tmp_path / "a:b").mkdir()
    assert remote_of("a:b") is None


def test_the_newest_run_is_the_one_written_last(tmp_path: Path) -> None:
    """By the time of its run file; a folder without one is no run."""
    with pytest.raises(UsageError, match="holds no run"):
        newest_run(tmp_path)
    for number, name in enumerate(("second", "first")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text("")
        os.utime(tmp_path / name / "run.toml", (100 - number, 100 - number))
    (tmp_path / "none").mkdir()
    assert newest_run(tmp_path).name == "second"


@pytest.mark.parametrize(
    ("ssh", "words"),
    [
        ("sh -c 'echo nobody: Permission denied >&2; exit 255' ssh", "Permission denied"),
        ("false", "no word"),
        ("no-such-program", "could not be started"),
    ],
)
def test_an_ssh_that_fails_is_a_sentence(ssh: str, words: str) -> None:
    """Refused, silent, or not installed: with ssh's own words, and what to try."""
    with pytest.raises(EnvironmentFault, match=words), forwarded(Remote("gpu1", "runs/a"), ssh=ssh):
        pass


@pytest.mark.stress
@pytest.mark.skipif(sshd.why_not() is not None, reason=str(sshd.why_not()))
def test_the_page_of_another_host_opens_here(tmp_path: Path) -> None:
    """A real sshd: the address works here, by its token alone, and knows the run; a run that is not there is refused
    in its own words; the page there ends with the command here."""
    pytest.importorskip("uvicorn", reason="pip install 'shoal[page]'")
    write_run(tmp_path / "runs/tiny")
    python = f"env PYTHONPATH={SOURCE} {sys.executable}"
    with sshd.sshd(tmp_path) as ssh:
        words = ["--ssh", ssh, "--python", python]
        command = [sys.executable, "-m", "shoal", "watch", f"127.0.0.1:{tmp_path}/runs/tiny", *words]
        environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        try:
            assert watching.stdout is not None
            address = watching.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            assert b"<title>" in browser.open(address, timeout=HANG_S).read()
            where = address.partition("?")[0]

            def shown() -> dict:
                return msgspec.json.decode(browser.open(where + "snapshot", timeout=HANG_S).read())

            wait_until(lambda: [run["name"] for run in shown()["runs"]] == ["tiny"])
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(where + "snapshot", timeout=HANG_S)
            there = _watching_there(tmp_path)
            assert there
        finally:
            watching.terminate()
            watching.wait(HANG_S)
        wait_until(lambda: not _watching_there(tmp_path), lambda: str(_watching_there(tmp_path)))
        done = subprocess.run(
            [*command[:4], f"127.0.0.1:{tmp_path}/runs/none", *words],
            capture_output=True, text=True, timeout=HANG_S, env=environ, check=False,
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        assert "runs/none" in done.stderr


def _watching_there(folder: Path) -> list[int]:
    """The pids of `shoal watch --with-input` of runs in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "--with-input" in words and any(word.startswith(str(folder)) for word in words):
            found.append(int(path.parent.name))
    return found
