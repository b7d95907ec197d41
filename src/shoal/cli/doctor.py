"""`shoal doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal import units
from shoal.cli.arguments import AsJson, output_file
from shoal.errors import EnvironmentFault, UsageError
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.launcher.doctor import Finding

TRIED_S = 60.0
"""What importing PyTorch and a GPU's first kernels may take."""
MARKS = {"ok": "ok", "warning": "!!", "problem": "XX"}


def doctor(
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster", metavar="OUT.toml", help="Write the cluster file of this machine.", callback=output_file
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B=ADDRESS|ranks",
            help="Look at several hosts and the network between them; the first is the master. 'ranks': the hosts of "
            "the processes that srun or torchrun has started.",
        ),
    ] = None,
    shell: Annotated[
        str, typer.Option(help="How hosts are reached: ssh, srun, or a command ('docker exec -i {host}').")
    ] = "ssh",
    python: Annotated[
        str, typer.Option(help="The interpreter on the hosts.", show_default="this one")
    ] = sys.executable,
    folder: Annotated[
        str | None, typer.Option(help="Where runs are to be started, on every host; default: here.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="MASTER_PORT of the runs, tried on the master.")] = 29500,
    as_json: AsJson = False,
) -> None:
    """Checks versions, devices, memory, interfaces and ports, here or on several hosts; each finding has its repair.

    Example: shoal doctor
    """
    from shoal.launcher.doctor import attention_finding, findings

    if hosts is not None:
        if cluster is not None:
            raise UsageError("--cluster writes the file of this machine: call it without --hosts")
        _several(hosts, shell=shell, python=python, folder=folder, port=port, as_json=as_json)
        return
    with busy("looking at this machine"):
        assumed = _write_cluster(cluster) if cluster is not None else ()  # first, as the disk may be full
        found = [*findings(os.environ), attention_finding(*_attention_kernels())]
    if as_json:
        result = {"findings": [dataclasses.asdict(finding) for finding in found]}
        answer(json.dumps(result if cluster is None else result | {"cluster": str(cluster), "assumed": list(assumed)}))
    else:
        print_findings(found)
        for sentence in assumed:
            print(f"assumed  {sentence}")
        if cluster is not None:
            print(f"Written: {cluster}")
    raise typer.Exit(_exit_code(found))


def _attention_kernels() -> tuple[str, dict[str, str]]:
    """The device and its kernels, tried by a process of its own: a driver that is broken may end it."""
    command = [sys.executable, "-m", "shoal.observe.profile.first_step"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIED_S)
        said = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return "", {}
    return said["device"], said["kernels"]


def _several(hosts: str, *, shell: str, python: str, folder: str | None, port: int, as_json: bool) -> None:
    from shoal.launcher.environment import place_from
    from shoal.launcher.survey import across, channel, network

    if hosts == "ranks":
        place = place_from(os.environ)
        if place is None:
            raise UsageError(
                "--hosts ranks is for processes that a launcher has started: put srun --ntasks-per-node=1 or torchrun "
                "in front, or name the hosts (--hosts n1,n2)"
            )
        with busy("comparing the hosts of these ranks") if place.rank == 0 else nullcontext():
            found = across.survey_of_ranks(place, os.environ)
        if found is None:
            return
    else:
        named = channel.hosts_from(hosts)
        with busy(f"asking {units.plural(len(named), 'host')}"):
            found = channel.survey(named, shell=shell, python=python, folder=folder or str(Path.cwd()), port=port)
    judged = across.findings(found)
    if as_json:
        links = [{"from": a, "to": b, **msgspec.to_builtins(link)} for (a, b), link in found.links.items()]
        facts = {name: msgspec.to_builtins(told) for name, told in found.facts.items()}
        answer(json.dumps({"findings": [dataclasses.asdict(one) for one in judged], "hosts": facts, "links": links}))
    else:
        print_findings(judged)
        for line in network.matrix(found):
            print(line)
    raise typer.Exit(_exit_code(judged))


def print_findings(found: Sequence[Finding]) -> None:
    """A line for each, with its repair, and how many need one."""
    for finding in found:
        print(f"{MARKS[finding.status]}  {finding.name}: {finding.found}")
        if finding.repair:
            print(f"      {finding.repair}")
    counts = [(sum(finding.status == status for finding in found), status) for status in ("problem", "warning")]
    wrong = [units.plural(count, status) for count, status in counts if count]
    print(f"{' and '.join(wrong)}: each repair stands below its line" if wrong else "nothing to repair")


def _exit_code(found: Sequence[Finding]) -> int:
    return EnvironmentFault.exit_code if any(finding.status == "problem" for finding in found) else 0


def _write_cluster(path: Path) -> tuple[str, ...]:
    """What was assumed."""
    from shoal.launcher.devices import cores, gpu_names, memory_limit
    from shoal.planning.calibration import calibration_here
    from shoal.planning.cluster_here import Facts, describe

    limit = memory_limit()
    memory_bytes = limit.total_bytes if limit is not None else 4 * cores() << 30
    described = describe(
        Facts(platform.node() or "here", cores(), memory_bytes, gpu_names(os.environ)), calibration_here(os.environ)
    )
    path.write_text(described.text, encoding="utf-8")
    return described.assumed
