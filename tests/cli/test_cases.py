"""Bad input by the table in `cases/refusals.toml`: one sentence, its exit code, and in under a second, for no rank is
started and torch is not needed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import project

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
