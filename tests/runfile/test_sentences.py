"""A value that a key does not take is refused in words that say what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.runfile.load import load_run

RUN = """
[run]
name = "own"
steps = 3
[model]
kind = "convnet"
[data]
kind = "digits"
[batch]
global_samples = 4
"""


def refusal(folder: Path, *overrides: str, content: bytes = RUN.encode()) -> str:
    path = folder / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return str(caught.value)


def test_a_pattern_is_told_in_words(tmp_path: Path) -> None:
    """What the key is and which characters it takes, without a regular expression."""
    said = refusal(tmp_path, "run.name=a b/c")
    assert "letters, digits" in said
    assert "regex" not in said
    assert "^[" not in said


@pytest.mark.parametrize(
    ("override", "repair"),
    [
        ('gradients.bucket_bytes="25MB"', "the number of bytes alone"),
        ('wire.timeout_s="60s"', "the number of seconds alone"),
    ],
)
def test_a_number_with_a_unit_is_told_its_unit(tmp_path: Path, override: str, repair: str) -> None:
    """Found, and what to write: the unit is in the key's name."""
    assert repair in refusal(tmp_path, override)


def test_bytes_that_are_no_text_are_placed(tmp_path: Path) -> None:
    """Which byte is not UTF-8, and no words of a codec."""
    said = refusal(tmp_path, content=b'[run]\nname = "\xff"\n')
    assert "byte 15 (0xff) is not UTF-8" in said
    assert "codec" not in said


def test_a_byte_order_mark_is_taken(tmp_path: Path) -> None:
    """Some editors begin every file with one."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RUN.encode())
    assert load_run(path, ()).run.name == "own"
