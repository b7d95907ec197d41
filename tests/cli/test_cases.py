"""Bad input by the table in `cases/refusals.toml`: one sentence and its exit code, at once, for no process is started
and torch is not imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import OWN, RUN, project

CASES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "cases/refusals.toml").read_text())["case"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['command']} {case.get('environ', '')}".strip())
def test_bad_input_gets_its_sentence(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on standard error, and nothing else but the command's usage. Nothing is written."""
    own = project(tmp_path)
    if "file" in case:
        file = case["file"]
        content = bytes.fromhex(file["hex"]) if "hex" in file else file["text"].encode()
        (tmp_path / file["name"]).write_bytes(content)
    for name, value in case.get("environ", {}).items():
        monkeypatch.setenv(name, value)
    before = sorted(tmp_path.rglob("*"))
    done = own.here(*case["command"].split()[1:])
    assert done.returncode == case["code"], done.stderr
    assert done.stderr.count(case["says"]) == 1, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(("shoal:", "Error:"))] == [
        done.stderr.splitlines()[-1]
    ]
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


ALL = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from shoal.cli.main import main

sys.modules["torch"] = None  # who imports it fails
cases, files, folder = json.load(sys.stdin)
environ, wrong, started = dict(os.environ), [], []

def heard(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
        started.append(event)

sys.addaudithook(heard)
for number, case in enumerate(cases):
    here = Path(folder, str(number))
    here.mkdir()
    for name, text in files.items():
        (here / name).write_text(text)
    if "file" in case:
        file = case["file"]
        (here / file["name"]).write_bytes(bytes.fromhex(file["hex"]) if "hex" in file else file["text"].encode())
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environ | case.get("environ", {}))
    sys.argv, code = case["command"].split(), 0
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except ImportError as missing:
            code = str(missing)
    if started or code != case["code"]:
        wrong.append([case["command"], code, started.copy()])
        started.clear()
json.dump(wrong, sys.stdout)
"""


NEED_TORCH = ("doctor --cluster /dev/full", "plan run.toml memory.offload.delay_update_after=0")
"""Commands that are refused what they write, after their work, or what no plan prices, when it is made."""


@pytest.mark.slow
def test_no_other_refusal_needs_torch_and_none_a_process(tmp_path: Path) -> None:
    """All of them in one interpreter, in which torch cannot be imported: what would take seconds does not happen."""
    asked = json.dumps([CASES, {"own.py": OWN, "run.toml": RUN}, str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", ALL], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout)
    assert [command for command, _, started in wrong if started] == []
    need_torch = tuple(f"shoal {command}" for command in NEED_TORCH)
    assert [row for row in wrong if not row[0].startswith(need_torch)] == []
