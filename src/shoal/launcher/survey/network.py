"""What stands between the hosts: names, routes, ports, links and clocks. Pure; each finding has its repair."""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shoal.launcher.doctor import Finding
from shoal.launcher.survey.channel import Survey
from shoal.launcher.survey.messages import HostFacts, SurveyedLink
from shoal.units import plural

# Hosts by what they have in common, as text.


MOST_NAMED = 8


def groups(values: Mapping[str, object]) -> list[tuple[object, list[str]]]:
    """The hosts of each value, the most frequent value first."""
    counted = Counter(values.values())
    return [(value, [name for name, own in values.items() if own == value]) for value, _ in counted.most_common()]


def shown_groups(groups: Iterable[tuple[object, list[str]]], *, nothing: str = "not installed") -> str:
    return "; ".join(f"{nothing if value is None else value} on {listed(names)}" for value, names in groups)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


FAR_APART_S = 0.5
SLOW_SHARE = 0.5
"""Of the usual rate, the median of the hosts' best links: a link below it is slow."""
LATE_TIMES, LATE_S = 5.0, 0.001
"""A round trip so many times the usual one, and longer than this, is late."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def network_findings(survey: Survey) -> list[Finding]:
    """All of them, in the order in which a run would meet them."""
    return [
        *name_findings(survey.facts),
        *route_findings(survey.facts, master=survey.hosts[0].name),
        *port_findings(survey),
        *link_findings(survey.links),
        *clock_findings(survey),
    ]


def name_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Does every host find every host, and the same one?"""
    ill = False
    for target in facts:
        found = {asked: told.addresses.get(target, []) for asked, told in facts.items()}
        without = [asked for asked, addresses in found.items() if not addresses]
        if without:
            ill = True
            yield Finding(
                f"{target}: name",
                "problem",
                f"does not resolve on {listed(without)}",
                f"add {target} to DNS or to /etc/hosts of {listed(without)}, or give --hosts {target}=ADDRESS",
            )
        wrong = [asked for asked, addresses in found.items() if asked != target and _any_loopback(addresses)]
        if wrong and len(facts) > 1 and not all(_any_loopback(addresses) for addresses in found.values()):
            ill = True
            yield Finding(
                f"{target}: name",
                "problem",
                f"is a loopback address on {listed(wrong)}",
                f"remove {target} from the 127.0.1.1 line of /etc/hosts there",
            )
        elif len({tuple(a) for asked, a in found.items() if a and asked != target}) > 1:
            ill = True
            shown = "; ".join(f"{', '.join(a)} on {asked}" for asked, a in found.items() if asked != target)
            yield Finding(
                f"{target}: name",
                "warning",
                f"is not the same everywhere: {shown}",
                "let all hosts use one name server, or give --hosts NAME=ADDRESS",
            )
    if facts and not ill:
        yield Finding("names", "ok", f"each of {plural(len(facts), 'host')} resolves all of them")


def route_findings(facts: Mapping[str, HostFacts], *, master: str) -> Iterator[Finding]:
    """By which interface does each host reach the master, and was it told to use another?"""
    for name, told in facts.items():
        route = told.route
        if route.obstacle is not None and not told.addresses.get(master):
            continue
        if route.obstacle is not None:
            yield Finding(
                f"{name}: route",
                "problem",
                f"none to the master: {route.obstacle}",
                f"give {name} an address in the network of the master (ip address, ip route)",
            )
            continue
        for variable in INTERFACE_VARIABLES:
            chosen = told.variables.get(variable, "").lstrip("=^").split(":")[0]
            negated = told.variables.get(variable, "").startswith("^")
            if chosen and route.interface and not negated and not route.interface.startswith(chosen):
                yield Finding(
                    f"{name}: interface",
                    "warning",
                    f"{variable} is {chosen}, and the route to the master leaves by {route.interface}",
                    f"set {variable}={route.interface} on {name}, or unset it",
                )
    by_mtu = groups({name: told.route.mtu_bytes for name, told in facts.items() if told.route.mtu_bytes})
    if len(by_mtu) > 1:
        usual = by_mtu[0][0]
        shown = "; ".join(f"{mtu} on {listed(names)}" for mtu, names in by_mtu)
        odd = next(names[0] for mtu, names in by_mtu if mtu != usual)
        yield Finding(
            "packet size",
            "warning",
            f"the interfaces' MTU differs: {shown}",
            f"set one on all: ip link set {facts[odd].route.interface} mtu {usual} on {odd}",
        )
    shown = sorted({told.route.interface for told in facts.values() if told.route.interface})
    if shown:
        yield Finding("interface", "ok", f"the route to the master leaves by {', '.join(shown)}")


def port_findings(survey: Survey) -> Iterator[Finding]:
    """Can each host reach each other's port, both ways? Where the name has no address, `name_findings` says so."""
    master = survey.hosts[0].name
    if master in survey.facts and (fault := survey.facts[master].port_fault) is not None:
        yield Finding(
            f"{master}: port {survey.port}",
            "problem",
            fault,
            f"end who holds it (ss -ltnp 'sport = :{survey.port}' shows), or start runs with another MASTER_PORT",
        )
    blocked = {
        (source, target): link.obstacle
        for (source, target), link in survey.links.items()
        if link.obstacle is not None and survey.facts[source].addresses.get(target)
    }
    for target in survey.facts:
        sources = [source for source, to in blocked if to == target]
        if not sources:
            continue
        others = [source for source, to in survey.links if to == target]
        who = "no host reaches it" if len(sources) == len(others) > 1 else f"{listed(sources)} cannot reach it"
        back = [source for source in sources if (target, source) in survey.links and (target, source) not in blocked]
        one_way = f"; {target} reaches {listed(back)}, so a firewall is likely" if back else ""
        reason = blocked[sources[0], target]
        yield Finding(
            f"{target}: ports",
            "problem",
            f"{who} at port {survey.facts[target].port}: {reason}{one_way}",
            f"allow TCP between the hosts on {target}, all ports (ufw allow from NETWORK, or the security "
            "group), or name the network that they share by GLOO_SOCKET_IFNAME",
        )
    if survey.links and all(link.obstacle is None for link in survey.links.values()):
        yield Finding("ports", "ok", f"{plural(len(survey.links), 'connection')}, both ways, all open")


def link_findings(links: Mapping[tuple[str, str], SurveyedLink]) -> Iterator[Finding]:
    """Is a link much slower than the others?"""
    open_links = {pair: link for pair, link in links.items() if link.obstacle is None}
    if not open_links:
        return
    # One slow host among three has most of the links: so of each host the best link counts.
    rate = statistics.median(
        _best(open_links, lambda link: -link.bytes_per_s, host).bytes_per_s for host in _ends(open_links)
    )
    trip = statistics.median(
        _best(open_links, lambda link: link.round_trip_s, host).round_trip_s for host in _ends(open_links)
    )
    slow = [pair for pair, link in open_links.items() if link.bytes_per_s < SLOW_SHARE * rate]
    late = [pair for pair, link in open_links.items() if link.round_trip_s > max(LATE_TIMES * trip, LATE_S)]
    if slow:
        shown = "; ".join(f"{a} to {b} {_rate(open_links[a, b].bytes_per_s)}" for a, b in slow[:MOST_NAMED])
        yield Finding(
            "bandwidth",
            "warning",
            f"{plural(len(slow), 'link')} below half of the usual {_rate(rate)}: {shown}",
            f"look at {_culprit(slow)}: cable, port and duplex (ethtool), and who else uses the network",
        )
    if late:
        shown = "; ".join(f"{a} to {b} {open_links[a, b].round_trip_s * 1e3:.2f} ms" for a, b in late[:MOST_NAMED])
        yield Finding(
            "latency",
            "warning",
            f"the usual round trip is {trip * 1e3:.2f} ms, and longer are: {shown}",
            f"look at {_culprit(late)}: its path (tracepath), power saving and interrupt coalescing",
        )
    if not slow and not late:
        yield Finding("links", "ok", f"{_rate(rate)} and {trip * 1e3:.2f} ms there and back, none far from it")


def clock_findings(survey: Survey) -> Iterator[Finding]:
    """Do the hosts agree on the time? Against that of most of them; of two, the master is right."""
    ahead = _ahead_of_master(survey)
    if len(ahead) < 2:
        return
    agree = sum(abs(seconds) <= FAR_APART_S for seconds in ahead.values())
    usual = 0.0 if 2 * agree >= len(ahead) else statistics.median_low(ahead.values())
    far = {name: seconds - usual for name, seconds in ahead.items() if abs(seconds - usual) > FAR_APART_S}
    for name, skew in far.items():
        yield Finding(
            f"{name}: clock",
            "warning",
            f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}",
            f"start a time service on {name} (timedatectl set-ntp true, or chronyd)",
        )
    if not far:
        apart = max(ahead.values()) - min(ahead.values())
        yield Finding("clocks", "ok", f"at most {apart * 1e3:.2f} ms apart")


def _ahead_of_master(survey: Survey) -> dict[str, float]:
    """By how much each host's clock is ahead of the master's, along open links from host to host."""
    steps: dict[str, dict[str, float]] = {name: {} for name in survey.facts}
    for (source, target), link in survey.links.items():
        if link.obstacle is None:
            steps[source][target] = link.ahead_s
            steps[target].setdefault(source, -link.ahead_s)
    found = {survey.hosts[0].name: 0.0} if survey.hosts[0].name in steps else {}
    waiting = list(found)
    while waiting:
        source = waiting.pop(0)
        for target, seconds in steps[source].items():
            if target not in found:
                found[target] = found[source] + seconds
                waiting.append(target)
    return found


def matrix(survey: Survey) -> list[str]:
    """Rates in Gbit/s and round trips in ms, a row for each host that sends, as lines of text; none for one host."""
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    if len(names) < 2:
        return []
    width = max(8, *(len(name) + 2 for name in names))
    found = []
    for title, shown in (("Gbit/s", _gigabits), ("round trip, ms", _milliseconds)):
        found.append(f"{title} from (row) to (column):")
        found.append(" " * width + "".join(name.rjust(width) for name in names))
        for source in names:
            cells = (shown(survey.links.get((source, target))) if source != target else "-" for target in names)
            found.append(source.rjust(width) + "".join(cell.rjust(width) for cell in cells))
    return found


def _gigabits(link: SurveyedLink | None) -> str:
    return "." if link is None else "closed" if link.obstacle else f"{link.bytes_per_s * 8e-9:.3g}"


def _milliseconds(link: SurveyedLink | None) -> str:
    return "." if link is None else "closed" if link.obstacle else f"{link.round_trip_s * 1e3:.3g}"


def _ends(links: Mapping[tuple[str, str], SurveyedLink]) -> list[str]:
    return list(dict.fromkeys(name for pair in links for name in pair))


def _best(
    links: Mapping[tuple[str, str], SurveyedLink], key: Callable[[SurveyedLink], float], host: str
) -> SurveyedLink:
    return min((link for pair, link in links.items() if host in pair), key=key)


def _culprit(pairs: Sequence[tuple[str, str]]) -> str:
    """The host that is an end of most of them; of a single pair, both."""
    ends = Counter(name for pair in pairs for name in pair).most_common(2)
    return f"{ends[0][0]} and {ends[1][0]}" if ends[0][1] == ends[1][1] else ends[0][0]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s"


def _any_loopback(addresses: Sequence[str]) -> bool:
    return any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
