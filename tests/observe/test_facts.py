"""Facts are merged, and replaced as a whole."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.observe import facts as facts_module
from shoal.observe.facts import facts_path, read_facts, write_facts


def test_facts_are_merged(tmp_path: Path) -> None:
    """Later facts replace their own keys and no others; the file is strict JSON without NaN."""
    run = tmp_path / "new"
    assert read_facts(run) == {}
    write_facts(run, {"world": 2, "torch": "2.13"})
    write_facts(run, {"world": 4, "evaluation": {"loss": math.nan}})
    assert read_facts(run) == {"world": 4, "torch": "2.13", "evaluation": {"loss": None}}
    json.loads(facts_path(run).read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_write_that_fails_leaves_the_old_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in the middle leaves the old file and no draft beside it."""
    write_facts(tmp_path, {"world": 2})

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(facts_module.os, "fsync", fail)
    with pytest.raises(OSError, match=r"no space: .*facts.json"):
        write_facts(tmp_path, {"world": 4})
    assert read_facts(tmp_path) == {"world": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": ', "[" * 10**5])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    """Facts that are no JSON object are refused by name, never overwritten in silence."""
    facts_path(tmp_path).write_text(content)
    with pytest.raises(UsageError, match=r"facts\.json"):
        write_facts(tmp_path, {"world": 2})
    assert facts_path(tmp_path).read_text() == content
