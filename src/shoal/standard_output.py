"""The standard output of a verb that was asked for JSON: one object, and nothing else, whatever libraries print.

Libraries print when they are imported, from Python and from C; a program that reads our object must not meet that. So
a process with `--json` among its arguments moves descriptor 1 to standard error before it imports anything of others,
and keeps the old one for its own answer. Ranks that it starts get the old one as their descriptor 1, and do the same.

Which descriptor that is, and of which process, is in the environment, as for everything that a process is told.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import MutableMapping, Sequence
from contextlib import suppress

KEPT = "SHOAL_STANDARD_OUTPUT"
"""The number of the process, and the descriptor of what was its standard output."""
TAKES_ARGUMENTS_OF_OTHERS = ("launch",)
"""Verbs whose arguments are a script's, `--json` among them."""


def keep_for_json(arguments: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """From here on, what prints goes to standard error, if `arguments`, those of the process, ask for JSON."""
    if "--json" not in arguments or arguments[0] in TAKES_ARGUMENTS_OF_OTHERS:
        return
    with suppress(OSError):  # one of the two is closed
        kept = os.dup(1)
        os.dup2(2, 1)
        environ[KEPT] = f"{os.getpid()} {kept}"


def kept_descriptor(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """What was standard output, of a process that keeps it for its answer; None of any other."""
    pid, _, descriptor = environ.get(KEPT, "").partition(" ")
    return int(descriptor) if pid == str(os.getpid()) else None


def answer(text: str) -> None:
    """Prints the answer of the process, a line, on what is standard output to those who started it."""
    descriptor = kept_descriptor()
    if descriptor is None:
        print(text, flush=True)
        return
    left = memoryview((text + "\n").encode(sys.stdout.encoding or "utf-8"))
    with suppress(BrokenPipeError):  # a reader that has left, as `head` does
        while left:
            left = left[os.write(descriptor, left) :]


# Text from outside (a sample, a user's error, a file), made safe to show on a terminal. Pure.
#
# A terminal obeys what it prints: `ESC ] 0 ; ...` renames the window, `ESC [ 2 J` clears it, a right-to-left override
# shows another text than is there. Such characters are shown as Python writes them, `\x1b`.


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
