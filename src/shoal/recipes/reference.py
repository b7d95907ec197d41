"""The reference of the run file: `python -m shoal.recipes.reference docs/reference/run-file.md` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.config.reference import markdown
from shoal.recipes.run_file import RunFile

TITLE = "The run file"


def reference() -> str:
    """The whole page."""
    return markdown(RunFile, title=TITLE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
