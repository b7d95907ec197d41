"""What stands in the way of a run on several hosts: pure judgements on what the hosts told. Each has its repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.launch.doctor import GIB, Finding
from shoal.launch.survey.grouping import MOST_NAMED, groups, listed, shown_groups
from shoal.launch.survey.messages import HostFacts
from shoal.launch.survey.network import INTERFACE_VARIABLES, network_findings
from shoal.launch.survey.visit import Survey
from shoal.units import plural

LITTLE_DISK_BYTES = 10 * GIB


def findings(survey: Survey) -> list[Finding]:
    """What was found, across the hosts first, then on each alone. What is well is one line."""
    across = [
        *silent_findings(survey.silent),
        *network_findings(survey),
        *version_findings(survey.facts),
        *variable_findings(survey.facts),
        *limit_findings(survey.facts),
        *folder_findings(survey.facts),
        *leftover_findings(survey.facts),
    ]
    return [*across, *host_findings(survey.facts)]


def silent_findings(silent: Mapping[str, str]) -> Iterator[Finding]:
    """Who told nothing, and why."""
    for name, why in silent.items():
        repair = (
            f"make 'ssh {name} python -m shoal --help' work without a password (or the like of your --shell); "
            "--python names the interpreter there"
        )
        yield Finding(f"{name}: probe", "problem", why, repair)


def version_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Is the same installed everywhere?"""
    ill = False
    for package in sorted({package for told in facts.values() for package in told.versions}):
        by_version = groups({name: told.versions.get(package) for name, told in facts.items()})
        if len(by_version) == 1:
            continue
        ill = True
        usual, shown = by_version[0][0], shown_groups(by_version)
        odd = [name for version, names in by_version if version != usual for name in names]
        needed = package in ("Python", "torch", "machine")
        if package == "machine":
            repair = "start the run on hosts of one kind, or compare with 'shoal verify' first"
        elif package == "Python" or usual is None:
            repair = f"install the same {package} on {listed(odd if usual else list(facts))}"
        else:
            repair = f"pip install '{package}=={usual}' on {listed(odd)}"
        yield Finding(f"version of {package}", "problem" if needed else "warning", shown, repair)
    by_code = groups({name: told.code for name, told in facts.items()})
    if len(by_code) > 1:
        ill = True
        odd = [name for code, names in by_code[1:] for name in names]
        yield Finding(
            "code of Shoal",
            "problem",
            f"is not the same: {shown_groups(by_code)}",
            f"install on {listed(odd)} what {by_code[0][1][0]} has",
        )
    if facts and not ill:
        told = next(iter(facts.values()))
        yield Finding(
            "versions",
            "ok",
            f"the same on all: Python {told.versions.get('Python')}, torch "
            f"{told.versions.get('torch')}, Shoal's code {told.code}",
        )


def variable_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Do variables differ that change how ranks compute or talk? Interfaces may be called otherwise on each host."""
    for variable in sorted({name for told in facts.values() for name in told.variables} - {*INTERFACE_VARIABLES}):
        by_value = groups({name: told.variables.get(variable) for name, told in facts.items()})
        if len(by_value) > 1:
            yield Finding(
                f"variable {variable}",
                "warning",
                shown_groups(by_value, nothing="not set"),
                "set it alike on every host, or for the whole job (--env of 'shoal submit')",
            )


def limit_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Does a host allow less than the others?"""
    flags = {"open files": "-n", "processes": "-u", "locked memory": "-l"}
    for limit in flags:
        values = {name: told.limits[limit] for name, told in facts.items() if limit in told.limits}
        by_value = groups({name: "unlimited" if value < 0 else f"{value:,}" for name, value in values.items()})
        if len(by_value) > 1:
            least = min(values, key=lambda name: (values[name] < 0, values[name]))
            yield Finding(
                f"limit of {limit}",
                "warning",
                shown_groups(by_value),
                f"raise it on {least}: ulimit {flags[limit]}, /etc/security/limits.conf",
            )


def folder_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Is the folder of the run there, with room?"""
    for name, told in facts.items():
        if told.folder_free_bytes is None:
            yield Finding(
                f"{name}: folder",
                "problem",
                f"{told.folder} is not there",
                "mount the folder that all hosts share, or start where there is one; --folder names it",
            )
        elif told.folder_free_bytes < LITTLE_DISK_BYTES:
            yield Finding(
                f"{name}: disk",
                "warning",
                f"{told.folder_free_bytes / GIB:.1f} GiB free at {told.folder}",
                "delete what nobody needs (old runs' checkpoints), or use another run.directory",
            )


def leftover_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Do processes of other runs hold a host's cores, memory and ports?"""
    for name, told in facts.items():
        if told.leftovers:
            shown = ", ".join(
                f"{one.pid} ({one.command}, {one.age_s / 3600:.1f} h)" for one in told.leftovers[:MOST_NAMED]
            )
            kill = " ".join(str(one.pid) for one in told.leftovers[:MOST_NAMED])
            yield Finding(
                f"{name}: leftovers",
                "warning",
                f"{plural(len(told.leftovers), 'process', 'processes')} of runs: {shown}",
                f"wait for them; where nobody does, on {name}: kill {kill}",
            )


def host_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """What each host found of itself; what is well, counted."""
    well = 0
    for name, told in facts.items():
        for finding in told.findings:
            if finding.status == "ok":
                well += 1
            else:
                yield Finding(f"{name}: {finding.name}", finding.status, finding.found, finding.repair)
    if well:
        yield Finding("each host", "ok", f"{plural(well, 'check')} of single hosts found nothing to repair")
