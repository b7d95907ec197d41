"""`shoal doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated

import typer

MARKS = {"ok": "ok", "warning": "!!", "problem": "XX"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Checks versions, devices, memory, interfaces and ports; each finding has its repair.

    Example: shoal doctor
    """
    from shoal.launch.doctor import findings

    found = findings(os.environ)
    if as_json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in found]}))
    else:
        for finding in found:
            print(f"{MARKS[finding.status]}  {finding.name}: {finding.found}")
            if finding.repair:
                print(f"      {finding.repair}")
    raise typer.Exit(3 if any(finding.status == "problem" for finding in found) else 0)
