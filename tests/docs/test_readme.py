"""README, followed by somebody who has just cloned the repository: each line does something, and ends well."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.errors import VerificationFailed
from shoal.runfile.load import load_run
from shoal.verification.verdict import Verdict
from tests.cli.project import Project
from tests.cli.warm_scripts import compare_script, run_script
from tests.docs.test_pages import commands

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_DEMO = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
DEMO = re.findall(r"^\t@?\$\(BIN\)/(shoal .*)$", _DEMO, flags=re.MULTILINE)
"""What `make demo` runs."""
LONGEST_S = 1200
"""For one line, on a machine that does other work too."""


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), flags=re.DOTALL)


def lines() -> list[str]:
    """The commands of the start but those of `make`, without their comments."""
    found = [shlex.join(shlex.split(line, comments=True)) for line in "".join(blocks("Start", "sh")).splitlines()]
    return [line for line in found if not line.startswith("make ")]


def test_no_run_finds_that_another_line_has_trained_it() -> None:
    """Every line that trains has a run directory of its own; `make demo` has come before them."""
    assert [line.split()[:3] for line in DEMO] == [
        ["shoal", "train", "recipes/stdlib-gpt.toml"],
        ["shoal", "plan", "recipes/stdlib-gpt.toml"],
    ]
    words = [shlex.split(line.partition("shoal ")[2]) for line in [*DEMO, *lines()]]
    trained = [load_run(ROOT / one[1], one[2:]).run.name for one in words if one[0] == "train"]
    assert len(trained) > 7
    assert sorted(trained) == sorted(set(trained))


def run_in_order(folder: Path, line: str, number: int) -> str:
    """What `line` said, and how it failed if it did."""
    words, out = shlex.split(line), folder / f"{number:02}.txt"
    with out.open("wb") as said:
        process = subprocess.Popen(words, cwd=folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            if words[1] == "watch":  # a server, until Ctrl-C
                while "http://" not in out.read_text() and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            code = process.wait(LONGEST_S)
        finally:
            process.kill()
    text = out.read_text()
    if code != (VerificationFailed.exit_code if words[1] == "diff" else 0):  # two runs that the page has made differ
        return f"{line}: exit {code}: {text[-2000:]}"
    return f"{line}: {text}" if "nothing to train" in text or not text.strip() else ""


@pytest.mark.stress
@pytest.mark.timeout(4 * 3600)
def test_every_line_does_something_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, after those of `make demo`, as README and Makefile have them: exit 0, and no work was done
    already."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    failed = [run_in_order(tmp_path, line, number) for number, line in enumerate([*DEMO, *lines()])]
    assert [one for one in failed if one] == []


@pytest.mark.stress
@pytest.mark.timeout(2 * 3600)
def test_the_first_ten_minutes_are_as_the_page_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of Shoal's, in its order and in one folder, with the run file that the reader saves."""
    page = ROOT / "docs/first-ten-minutes.md"
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (run_file,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "mine.toml").write_text(run_file)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    given = [shlex.join(["shoal", *words]) for words in commands(page)]
    assert len(given) > 7
    failed = [run_in_order(tmp_path, line, number) for number, line in enumerate(given)]
    assert [one for one in failed if one] == []
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits", "digits-2", "four", "mine"}


def test_the_script_of_the_first_screen_trains_and_is_the_same_model(tmp_path: Path) -> None:
    """As it stands, and as `shoal verify` of the line above it finds it."""
    (script,) = re.findall(r"```python\n(.*?)```", README.partition("\n## ")[0], flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(script)
    assert run_script(tmp_path / "mine.py", tmp_path, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    assert (tmp_path / "runs/first/report.html").exists()
    verdict = compare_script(tmp_path / "mine.py", tmp_path, "layout.shard=2", "memory.zero=3", world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())


@pytest.mark.slow
def test_the_script_of_ones_own_model_trains(tmp_path: Path) -> None:
    """`python mine.py`, as it stands."""
    script, _ = blocks("Your own model", "python")
    (tmp_path / "mine.py").write_text(script)
    done = Project(tmp_path).python("mine.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/checkpoints/step-00000200/manifest.json").exists()


@pytest.mark.slow
def test_the_loop_of_ones_own_trains(tmp_path: Path) -> None:
    """The loop that README shows, over the model and data of the script above it."""
    script, loop = blocks("Your own model", "python")
    before = script.partition("config = ")[0] + (
        "import torch.nn.functional as F\nmodel = model()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    (tmp_path / "loop.py").write_text(before + loop)
    done = Project(tmp_path).python("loop.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/report.html").exists()
