"""Text from outside cannot steer a terminal."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from shoal.standard_output import escape_controls

OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@given(st.text())
def test_nothing_a_terminal_obeys_is_left(text: str) -> None:
    """Whatever comes, only line feeds and tabs are controls of the result; it can be encoded."""
    shown = escape_controls(text)
    assert not [c for c in shown if unicodedata.category(c) in OBEYED and c not in "\n\t"]
    shown.encode()


@given(st.text())
def test_any_encoding_can_write_it(text: str) -> None:
    """What a stream's encoding does not have is escaped, also where the encoding is unknown."""
    escape_controls(text, encoding="ascii").encode("ascii")
    escape_controls(text, encoding="latin-1").encode("latin-1")
    escape_controls(text, encoding="no-such-code").encode("ascii")


def test_ordinary_text_stays_as_it_is() -> None:
    """Letters of any script, emoji, line feeds and tabs."""
    text = "def f():\n\treturn 'caf\u00e9 \u4f60\u597d \U0001f41f'"
    assert escape_controls(text) == text
    assert escape_controls("a\x1b[2Jb\rc") == "a\\x1b[2Jb\\rc"
