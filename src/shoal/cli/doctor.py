"""`shoal doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.busy import busy
from shoal.cli.output import output_file

MARKS = {"ok": "ok", "warning": "!!", "problem": "XX"}


def doctor(
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster", metavar="OUT.toml", help="Write the cluster file of this machine.", callback=output_file
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Checks versions, devices, memory, interfaces and ports; each finding has its repair.

    Example: shoal doctor
    """
    from shoal.launch.doctor import findings

    with busy("looking at this machine"):
        found = findings(os.environ)
        assumed = _write_cluster(cluster) if cluster is not None else ()
    if as_json:
        result = {"findings": [dataclasses.asdict(finding) for finding in found]}
        print(json.dumps(result if cluster is None else result | {"cluster": str(cluster), "assumed": list(assumed)}))
    else:
        for finding in found:
            print(f"{MARKS[finding.status]}  {finding.name}: {finding.found}")
            if finding.repair:
                print(f"      {finding.repair}")
        for sentence in assumed:
            print(f"assumed  {sentence}")
        if cluster is not None:
            print(f"Written: {cluster}")
    raise typer.Exit(3 if any(finding.status == "problem" for finding in found) else 0)


def _write_cluster(path: Path) -> tuple[str, ...]:
    """What was assumed."""
    from shoal.launch.devices import gpu_names, memory_limit
    from shoal.planning.cluster_here import Facts, describe
    from shoal.planning.operators import calibration_here, cores

    limit = memory_limit()
    memory_bytes = limit.total_bytes if limit is not None else 4 * cores() << 30
    described = describe(
        Facts(platform.node() or "here", cores(), memory_bytes, gpu_names(os.environ)), calibration_here(os.environ)
    )
    path.write_text(described.text, encoding="utf-8")
    return described.assumed
