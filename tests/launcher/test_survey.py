"""Judgements on what several hosts told, on invented facts; each fault names its host and has its repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shoal.errors import UsageError
from shoal.launcher.doctor import GIB, Finding
from shoal.launcher.survey.across import findings
from shoal.launcher.survey.channel import MOST_ROUNDS, Survey, hosts_from, remote_command, rounds
from shoal.launcher.survey.messages import Host, HostFacts, Leftover, Route, SurveyedLink
from shoal.launcher.survey.network import matrix

NAMES = ("n1", "n2", "n3")
WELL = HostFacts(
    host_name="n",
    port=29500,
    port_fault=None,
    route=Route("10.0.0.2", "eth0", 1500, 10_000),
    addresses={name: [f"10.0.0.{index + 1}"] for index, name in enumerate(NAMES)},
    versions={"Python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.0"},
    code="abc",
    folder="/runs",
    folder_free_bytes=100 * GIB,
    limits={"open files": 1 << 20, "locked memory": -1},
    variables={"NCCL_DEBUG": "INFO"},
    leftovers=[],
    findings=[Finding("memory", "ok", "enough")],
)
LINK = SurveyedLink(round_trip_s=1e-4, bytes_per_s=1.25e9, ahead_s=0.0)


def told(change: dict[str, Any], name: str = "n3") -> Survey:
    """Three hosts of which one differs from the others."""
    facts = dict.fromkeys(NAMES, WELL) | {name: msgspec.structs.replace(WELL, **change)}
    return Survey(tuple(Host(name, name) for name in NAMES), 29500, facts, {}, links({}))


def links(change: dict[tuple[str, str], SurveyedLink]) -> dict[tuple[str, str], SurveyedLink]:
    """All links between the hosts, some of them other than `LINK`."""
    return {(a, b): change.get((a, b), LINK) for a in NAMES for b in NAMES if a != b}


def of_links(change: dict[tuple[str, str], SurveyedLink]) -> Survey:
    """Hosts that are well, and links of which some are not."""
    return Survey(tuple(Host(name, name) for name in NAMES), 29500, dict.fromkeys(NAMES, WELL), {}, links(change))


def test_hosts_that_are_well_have_nothing_to_repair() -> None:
    """No finding but ok, and a line for each kind of check."""
    found = findings(told({}))
    assert {finding.status for finding in found} == {"ok"}
    assert [finding.name for finding in found] == [
        "names", "interface", "ports", "links", "clocks", "versions", "each host"
    ]  # fmt: skip


ILL = [
    (told({"versions": WELL.versions | {"torch": "2.12.1"}}), "version of torch", "pip install 'torch==2.13.0' on n3"),
    (told({"versions": WELL.versions | {"Python": "3.12.1"}}), "version of Python", "install the same Python on n3"),
    (told({"versions": {"Python": "3.11.7", "torch": "2.13.0"}}), "version of numpy", "'numpy==2.4.0' on n3"),
    (told({"code": "abd"}), "code of Shoal", "install on n3 what n1 has"),
    (told({"addresses": WELL.addresses | {"n1": []}}), "n1: name", "/etc/hosts of n3"),
    (told({"addresses": WELL.addresses | {"n1": ["127.0.1.1"]}}), "n1: name", "127.0.1.1 line"),
    (told({"addresses": WELL.addresses | {"n1": ["192.168.0.1"]}}), "n1: name", "one name server"),
    (told({"route": Route(obstacle="network is unreachable")}), "n3: route", "ip route"),
    (told({"variables": WELL.variables | {"GLOO_SOCKET_IFNAME": "eth1"}}), "n3: interface", "GLOO_SOCKET_IFNAME=eth0"),
    (told({"route": Route("10.0.0.3", "eth0", 9000)}), "packet size", "ip link set eth0 mtu 1500 on n3"),
    (told({"port_fault": "address already in use", "port": 4000}, "n1"), "n1: port 29500", "MASTER_PORT"),
    (told({"variables": {"NCCL_DEBUG": "WARN"}}), "variable NCCL_DEBUG", "alike on every host"),
    (told({"limits": WELL.limits | {"open files": 256}}), "limit of open files", "on n3: ulimit -n"),
    (told({"limits": WELL.limits | {"locked memory": 65536}}), "limit of locked memory", "on n3: ulimit -l"),
    (told({"folder_free_bytes": None}), "n3: folder", "mount"),
    (told({"folder_free_bytes": GIB}), "n3: disk", "run.directory"),
    (told({"leftovers": [Leftover(41, "shoal train x.toml", 7200.0)]}), "n3: leftovers", "on n3: kill 41"),
    (told({"findings": [Finding("memory", "warning", "1 GiB", "end others")]}), "n3: memory", "end others"),
    (of_links({("n1", "n3"): SurveyedLink("no answer")}), "n3: ports", "allow TCP"),
    (of_links({("n1", "n3"): msgspec.structs.replace(LINK, bytes_per_s=1e8)}), "bandwidth", "look at n1 and n3"),
    (of_links({(a, "n2"): msgspec.structs.replace(LINK, round_trip_s=0.02) for a in ("n1", "n3")}), "latency", "n2"),
    (of_links({pair: msgspec.structs.replace(LINK, ahead_s=s) for pair, s in
               {("n1", "n3"): 5.0, ("n2", "n3"): 5.0, ("n3", "n1"): -5.0, ("n3", "n2"): -5.0}.items()}),
     "n3: clock", "time service on n3"),
]  # fmt: skip


@pytest.mark.parametrize(("survey", "name", "repair"), ILL, ids=[f"{name}, {repair}" for _, name, repair in ILL])
def test_what_one_host_has_otherwise_is_the_only_finding(survey: Survey, name: str, repair: str) -> None:
    """One fault, one finding that is not ok, on the right host, with its repair."""
    ill = [finding for finding in findings(survey) if finding.status != "ok"]
    assert [finding.name for finding in ill] == [name]
    assert ill[0].repair is not None
    assert repair in ill[0].repair


def test_a_firewall_is_told_from_a_dead_host() -> None:
    """Who reaches others and is not reached itself is behind a firewall; who reaches none either is not."""
    both = {("n1", "n3"): SurveyedLink("no answer"), ("n2", "n3"): SurveyedLink("no answer")}
    (one_way,) = (f for f in findings(of_links(both)) if f.status == "problem")
    assert one_way.found == (
        "no host reaches it at port 29500: no answer; n3 reaches n1, n2, so a firewall is likely"
    )  # fmt: skip
    dead = both | {("n3", "n1"): SurveyedLink("no answer"), ("n3", "n2"): SurveyedLink("no answer")}
    found = [f.found for f in findings(of_links(dead)) if f.name == "n3: ports"]
    assert found == ["no host reaches it at port 29500: no answer"]


def test_a_silent_host_is_named_with_what_its_shell_said() -> None:
    survey = Survey((Host("n1", "n1"), Host("n9", "n9")), 29500, {"n1": WELL}, {"n9": "Permission denied"}, {})
    ill = [finding for finding in findings(survey) if finding.status != "ok"]
    assert [(finding.name, finding.found) for finding in ill] == [("n9: probe", "Permission denied")]


@pytest.mark.parametrize("count", [1, 2, 3, 8, MOST_ROUNDS + 1, 200])
def test_no_host_is_in_two_measurements_of_one_way(count: int) -> None:
    """In a round each host measures once and is measured once; pairs are met both ways; all of them where they fit."""
    names = [str(index) for index in range(count)]
    found = rounds(names)
    for pairs in found:
        assert sorted(source for source, _ in pairs) == sorted(target for _, target in pairs) == sorted(names)
        assert all(source != target for source, target in pairs)
    every: Sequence[tuple[str, str]] = [pair for pairs in found for pair in pairs]
    assert len(set(every)) == len(every) == count * min(count - 1, MOST_ROUNDS)
    assert {(b, a) for a, b in every} == set(every)


def test_the_matrix_has_a_row_for_each_sender() -> None:
    lines = matrix(of_links({("n1", "n3"): SurveyedLink("no answer")}))
    assert lines[1].split() == ["n1", "n2", "n3"]
    assert lines[2].split() == ["n1", "-", "10", "closed"]
    assert lines[9].split() == ["n3", "0.1", "0.1", "-"]


def test_how_a_host_is_reached() -> None:
    """ssh gets words quoted for its shell; a command with {host} gets them as they are."""
    probe = ["-m", "shoal.launcher.survey.probe"]
    assert remote_command("ssh -p 22", "n1", "'a b'/python") == ["ssh", "-p", "22", "n1", "'a b/python'", *probe]
    assert remote_command("docker exec -i {host}", "n1", "'a b'/python") == [
        "docker", "exec", "-i", "n1", "a b/python", *probe
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "-oProxyCommand=x", "a b"])
def test_hosts_that_cannot_be_are_refused(text: str) -> None:
    """Also a name that a shell would take for an option."""
    with pytest.raises(UsageError, match="--hosts"):
        hosts_from(text)


def test_a_host_may_have_a_user_and_an_address() -> None:
    assert hosts_from("me@n1, n2=10.0.0.2") == (Host("me@n1", "n1"), Host("n2", "10.0.0.2"))


@pytest.mark.parametrize("shell", ["", "'", "  "])
def test_a_shell_that_is_no_command_is_refused(shell: str) -> None:
    with pytest.raises(UsageError, match="--shell"):
        remote_command(shell, "n1", "python")
