"""Text from outside (a sample, a user's error, a file), made safe to show on a terminal. Pure.

A terminal obeys what it prints: `ESC ] 0 ; ...` renames the window, `ESC [ 2 J` clears it, a right-to-left override
shows another text than is there. Such characters are shown as Python writes them, `\\x1b`.
"""

from __future__ import annotations

import unicodedata

_SHOWN = "\n\t"
_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's general categories of controls, formats, surrogates, private and unassigned characters, and separators."""


def escape_controls(text: str, *, encoding: str = "utf-8") -> str:
    """`text` with every character escaped that a terminal would obey, hide or, in its `encoding`, not know.

    Line feeds and tabs stay. An unknown encoding counts as ASCII.
    """
    shown = "".join(map(_shown, text)) if not text.isascii() or not text.isprintable() else text
    try:
        return shown.encode(encoding, errors="backslashreplace").decode(encoding)
    except LookupError:
        return shown.encode("ascii", errors="backslashreplace").decode("ascii")


def _shown(character: str) -> str:
    if character in _SHOWN or unicodedata.category(character) not in _ESCAPED:
        return character
    return character.encode("unicode_escape").decode("ascii")
