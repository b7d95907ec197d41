"""What `shoal bench link` measures over slow links that the machine plays itself: all-reduces, the order of ranks,
training.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.bench.groups import CPU, gathered, interleaved, join_group, join_store, slowest, while_counting
from shoal.bench.ranks import rank_folder
from shoal.bench.report import Check, Result, Turns, check, ratios, told
from shoal.bench.training_job import corpus_file, gpt_run_file, start_training, training_job
from shoal.collectives import algorithms
from shoal.collectives.table import CollectiveTable, relabelled
from shoal.comm.algorithms import execute
from shoal.comm.algorithms.choose import bytes_between, tree_order, walk_s
from shoal.comm.algorithms.group import probe
from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry, Ledger
from shoal.comm.volume import HEADER_BYTES, bytes_sent, wire_bytes
from shoal.engine.loop import Job, take_step
from shoal.gradients.config import FAR_BUCKET_BYTES, NEAR_BUCKET_BYTES, GradientsConfig
from shoal.gradients.gradients import Gradients
from shoal.launcher.environment import Place
from shoal.launcher.lab.lab_file import MBIT_BYTES, Lab
from shoal.models.config import GPTConfig
from shoal.optim.config import AdamW
from shoal.parallel.config import PipelineConfig
from shoal.topology.config import LayoutConfig
from shoal.topology.links import SLOW, Links, best_order, pace, slow_links
from shoal.units import byte_size

# All-reduces over slow links: how much of a link's rate they get, and a ring beside a hierarchy of two levels.
#
# The rate: a large all-reduce of S bytes among n ranks sends 2 (n-1)/n S bytes each way. Headers alone cost 1 -
# 1448/1514 = 4.4 % of the rate. Gloo's ring works in segments of at most 1 MiB, the first of which must arrive before
# another can come back: with 50 segments that costs some 2 %, with 12 more than 5 %.
#
# Two levels: over a host's link go, each way, of S bytes, with n ranks on m hosts numbered host by host,
#
#     ring         2 (n-1)/n S       one rank of the host has its neighbour on another host
#     two levels   2 (m-1)/m S       the host's sum, in a ring over hosts
#     ratio        m (n-1) / n (m-1) = 3/2 for 2 x 2
#
# Where the link is slow, the times have the same ratio. It is measured twice: between the backends (Gloo's ring, and
# shared memory inside hosts with leaders between them), and between the tables of `shoal.collectives` over one backend.


RATE_SECONDS, RATE_TURNS, RATE_SHARE = 2.5, 3, 0.9
LEVELS_SECONDS, LEVELS_TURNS = 1.5, 3
SECONDS_WITHIN, BYTES_WITHIN = 0.15, 0.03
PEERS = {"hierarchical": "gloo", "hierarchical table": "ring table"}
TAG = 7


def measure_rate(lab: Lab, place: Place, *, name: str) -> Result | None:
    """One row: all-reduces that take some seconds each."""
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    group = join_group("measured", place, store, transport="gloo")
    mbit = lab.rate_mbit(0, 1)
    rate = mbit * MBIT_BYTES
    tensor = torch.zeros(int(rate * RATE_SECONDS / 4))
    turns = told(range(RATE_TURNS + 1), f"all-reduces of {byte_size(tensor.nbytes)}", total=RATE_TURNS + 1)
    times = [slowest(lambda: group.all_reduce(tensor).wait(), clock) for _ in turns][1:]
    if place.rank != 0:
        return None
    sent = bytes_sent("all_reduce", tensor.nbytes, size=group.size, backend="gloo")
    share = sent / statistics.median(times) / rate
    row = {
        "part": "rate",
        "mbit": mbit,
        "bytes": tensor.nbytes,
        "seconds": round(statistics.median(times), 4),
        "all_seconds": [round(seconds, 4) for seconds in times],
        "share_of_rate": round(share, 4),
        "share_with_headers": round(share * wire_bytes(sent) / sent, 4),
    }
    return {"rows": [row], "checks": [check(f"share of {mbit:g} Mbit/s that arrives", share, RATE_SHARE)]}


def measure_levels(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each side; checks of times and bytes against the closed forms."""
    store, hosts, ranks = join_store(place), len(lab.hosts), lab.ranks
    clock, ledger = join_group("clock", place, store, transport="gloo"), Ledger()
    gloo = join_group("gloo", place, store, transport="gloo", ledger=ledger)
    levels = join_group("levels", place, store, transport="hierarchical", ledger=ledger)
    tensor = torch.zeros(int(lab.rate_mbit(0, 1) * MBIT_BYTES * LEVELS_SECONDS / 4))
    tables = {
        "ring table": algorithms.all_reduce_by_ring(ranks),
        "hierarchical table": algorithms.hierarchical(ranks // hosts, hosts),
    }
    sides: dict[str, Callable[[], Any]] = {
        "gloo": lambda: gloo.all_reduce(tensor).wait(),
        "hierarchical": lambda: levels.all_reduce(tensor).wait(),
        "ring table": lambda: execute.all_reduce(tensor, tables["ring table"], gloo, tag=TAG),
        "hierarchical table": lambda: execute.all_reduce(tensor, tables["hierarchical table"], gloo, tag=TAG),
    }
    turns = interleaved(sides, clock, pairs=LEVELS_TURNS, always=tuple(sides))
    counts = {}
    for side, step in sides.items():
        ledger.take()
        interface = while_counting(clock, step)
        ledger_bytes = sum(entry.between_bytes for entry in ledger.take().values())
        counts[side] = gathered(clock, [ledger_bytes, interface.bytes_sent])
    if place.rank != 0:
        return None
    forms = {side: closed_form(side, tensor.nbytes, ranks=ranks, hosts=hosts) for side in sides}
    rows = [_levels_row(side, turns, counts[side], forms[side], lab, tensor.nbytes) for side in sides]
    return {"rows": rows, "checks": _levels_checks(turns, rows, forms)}


def closed_form(side: str, size_bytes: int, *, ranks: int, hosts: int) -> float:
    """Bytes that leave one host."""
    n = hosts if side.startswith("hierarchical") else ranks
    return 2 * (n - 1) / n * size_bytes


def _levels_row(
    side: str, turns: Turns, counts: list[list[float]], form: float, lab: Lab, size_bytes: int
) -> dict[str, Any]:
    first = lab.hosts[0]
    return {
        "part": "levels",
        "side": side,
        "bytes": size_bytes,
        "seconds": round(statistics.median(turn[side] for turn in turns), 4),
        "closed_form_bytes": int(form),
        "ledger_bytes": int(sum(counts[rank][0] for rank in first.ranks)),
        "interface_bytes": int(counts[first.ranks.start][1]),
    }


def _levels_checks(turns: Turns, rows: list[dict[str, Any]], forms: Mapping[str, float]) -> list[Check]:
    checks = []
    for side, peer in PEERS.items():
        gained, form = statistics.median(ratios(turns, side, peer=peer)), forms[peer] / forms[side]
        name = f"{side} beside {peer}: {gained:.3f} times as fast, the bytes' ratio is {form:.3f}; distance"
        checks.append(check(name, abs(gained / form - 1), SECONDS_WITHIN, at_most=True))
    for row in rows:
        off = max(abs(row[key] / row["closed_form_bytes"] - 1) for key in ("ledger_bytes", "interface_bytes"))
        name = f"{row['side']}: bytes between hosts against the closed form"
        checks.append(check(name, off, BYTES_WITHIN, at_most=True))
    return checks


# Planted topologies: does the probe find them, and does it order the ring well?
#
# Ranks are renumbered at random, so that their numbers say nothing about their hosts. The probe sees only messages, and
# what it finds is compared with the lab's file. The order of the ring is compared with the best of all orders: by the
# seconds that the planted links would take (`pace`), and with few ranks by the measured time of an all-reduce in each;
# that of a tree by the seconds of a broadcast (`walk_s`). Links say which ranks share a host where one has two.


PROBE_BYTES, REPEATS = 256 << 10, 7
RING_BYTES, TURNS = 2 << 20, 3
INNER_BYTES_S = 1e9
ORDER_WITHIN, ORDER_BYTES_WITHIN = 1.05, 0.03
FEW_RANKS = 4


def measure_topology(lab: Lab, place: Place, *, name: str) -> Result | None:
    """One row a lab.

    In the lab "detour" the link between two hosts is so slow that a ring should pass through the third host twice.
    """
    store, numbers = join_store(place), shuffled(lab.ranks)
    mine = numbers[place.rank]
    clock = join_group("clock", place, store, transport="gloo", rank=mine)
    group = join_group("measured", place, store, transport="gloo", rank=mine)
    planted = planted_links(lab, numbers)
    found = probe(group, device=CPU, size_bytes=PROBE_BYTES, repeats=REPEATS)
    order = best_order(found, size=RING_BYTES / lab.ranks)
    timed = _times_by_order(group, clock) if lab.ranks <= FEW_RANKS else {}
    sent = _bytes_ratio(order, group, clock, planted, leads=place.local_rank == 0)
    if len(set(planted.hosts)) == planted.ranks:
        found = replace(found, hosts=planted.hosts)
    return _result(name, planted, found, order, timed, sent) if place.rank == 0 else None


def shuffled(ranks: int) -> list[int]:
    """The new number of each rank; all ranks draw the same."""
    numbers = list(range(ranks))
    random.Random(1).shuffle(numbers)
    return numbers


def planted_links(lab: Lab, numbers: Sequence[int]) -> Links:
    """The lab's rates between ranks under their new `numbers`. Hosts are numbered by first appearance."""
    lab_host = [lab.host_of[numbers.index(number)] for number in range(lab.ranks)]
    known = {host: index for index, host in enumerate(dict.fromkeys(lab_host))}
    bytes_s = lab.bytes_s()
    rates = tuple(tuple(INNER_BYTES_S if a == b else bytes_s[a][b] for b in lab_host) for a in lab_host)
    nothing = tuple((0.0,) * lab.ranks for _ in range(lab.ranks))
    return Links(nothing, rates, tuple(known[host] for host in lab_host))


def _times_by_order(group: Collective, clock: Collective) -> dict[tuple[int, ...], float]:
    """The median seconds of a ring all-reduce in every order."""
    tensor = torch.zeros(RING_BYTES // 4)
    orders = [(0, *rest) for rest in permutations(range(1, group.size))]
    tables = {order: relabelled(algorithms.all_reduce_by_ring(group.size), order) for order in orders}
    sides = {str(order): _all_reduce(tensor, table, group) for order, table in tables.items()}
    turns = interleaved(sides, clock, pairs=TURNS, always=tuple(sides))
    return {order: statistics.median(turn[str(order)] for turn in turns) for order in orders}


def _all_reduce(tensor: torch.Tensor, table: CollectiveTable, group: Collective) -> Callable[[], None]:
    return lambda: execute.all_reduce(tensor, table, group, tag=7)


def _bytes_ratio(order: Sequence[int], group: Collective, clock: Collective, planted: Links, *, leads: bool) -> float:
    """Payload that the kernel counted between hosts in a ring of this order, over the closed form.

    One rank of each host `leads`: it contributes what the host's interfaces counted.
    """
    tensor, table = torch.zeros(RING_BYTES // 4), relabelled(algorithms.all_reduce_by_ring(group.size), order)
    counted = while_counting(clock, _all_reduce(tensor, table, group))
    payload = counted.bytes_sent - HEADER_BYTES * counted.packets_sent
    whole = sum(row[0] for row in gathered(clock, [payload if leads else 0.0]))
    return whole / bytes_between(table, tensor.nbytes, planted.hosts)


def _result(
    name: str, planted: Links, found: Links, order: Sequence[int], timed: dict[tuple[int, ...], float], sent: float
) -> Result:
    paces = {o: pace(planted, o, size=RING_BYTES / planted.ranks)[0] for o in _orders(planted.ranks)}
    ratio = paces[tuple(order)] / min(paces.values())
    row = {
        "part": "topology",
        "topology": name,
        "ranks": planted.ranks,
        "hosts_planted": list(planted.hosts),
        "hosts_found": list(found.hosts),
        "slow_planted": slow_links(planted),
        "slow_found": slow_links(found),
        "order": list(order),
        "pace_to_best": round(ratio, 4),
        "pace_worst_to_best": round(max(paces.values()) / min(paces.values()), 4),
        "kernel_to_closed_form": round(sent, 4),
    }
    row["tree_to_best"] = round(tree := tree_to_best(found, planted), 4)
    same = row["hosts_planted"] == row["hosts_found"] and row["slow_planted"] == row["slow_found"]
    checks = [
        check(f"{name}: hosts and slow links found (slow: less than 1/{SLOW:g} of the best)", float(same), 1.0),
        check(f"{name}: the ring's order against the best of all", ratio, ORDER_WITHIN, at_most=True),
        check(f"{name}: the tree's order against the best of all", tree, ORDER_WITHIN, at_most=True),
        check(f"{name}: bytes between hosts against the closed form", abs(sent - 1), ORDER_BYTES_WITHIN, at_most=True),
    ]
    if timed:
        measured = timed[tuple(order)] / min(timed.values())
        row["seconds_by_order"] = {" ".join(map(str, o)): round(seconds, 4) for o, seconds in timed.items()}
        checks.append(
            check(f"{name}: measured time of that order against the best", measured, ORDER_WITHIN, at_most=True)
        )
    return {"rows": [row], "checks": checks}


def tree_to_best(found: Links, planted: Links) -> float:
    """Seconds of a broadcast on the planted links, by a binomial tree in the order that is found on the measured ones,
    over those in the best of all orders.
    """
    ranks = planted.ranks
    (tree,) = (table for table in algorithms.tables("broadcast", ranks) if table.name == "binomial")
    order = tree_order(tree, RING_BYTES, found, begun=[tuple(range(ranks))])
    seconds = {o: walk_s(relabelled(tree, o), RING_BYTES, planted) for o in _orders(ranks)}
    return seconds[order] / min(seconds.values())


def _orders(ranks: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in permutations(range(1, ranks))]


# Training over one slow link: the ledger beside the kernel's counters, and gradients that leave by priority.
#
# The ledger: a small GPT trains in one layout after the other. The bytes to other hosts in the ledger of each rank's
# steps are compared with those that the interface counted, headers included (66 bytes of each packet) and not.
#
# Priority: in the backward, both schedules hide the sums of gradients. Afterwards, the ordered one waits for the rest,
# while the prioritised one goes on with the forward, which waits for each layer alone. With F and B the seconds of
# forward and backward, and W those of the wire, a step takes at best
#
#     in order       F + max(B, W)
#     by priority    max(F + B, W)
#
# Large buckets are those of one host; buckets as small as partitions are between order and priority. Over real links
# the processors that compute also carry the traffic; in a throttled lab they carry little, and the wire is what counts.


LEDGER_STEPS, LEDGER_WARM_UP, LEDGER_TOKENS = 3, 2, 1024
TOLERANCE = 0.03
MODEL = GPTConfig(layers=2, width=128, heads=4)
LAYOUTS = {
    "replicate": LayoutConfig(replicate=2),
    "zero-3": LayoutConfig(shard=2),
    "tensor": LayoutConfig(tensor=2),
    "pipeline": LayoutConfig(pipeline=2),
}
PRIORITY_STEPS, PRIORITY_TURNS, PRIORITY_TOKENS = 8, 10, 512
PARTITION_BYTES = 1 << 20
SCHEDULES = {
    "order": GradientsConfig(bucket_bytes=FAR_BUCKET_BYTES),
    "order, large buckets": GradientsConfig(bucket_bytes=NEAR_BUCKET_BYTES),
    "order, small buckets": GradientsConfig(bucket_bytes=PARTITION_BYTES),
    "priority": GradientsConfig(schedule="priority", partition_bytes=PARTITION_BYTES),
}


def measure_ledger(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each layout and rank."""
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    rows: list[dict[str, Any]] = []
    for layout in told(LAYOUTS, "bytes of each layout", total=len(LAYOUTS)):
        counts = gathered(clock, _count(layout, place, PrefixStore(layout, store), clock))
        rows += [_ledger_row(layout, rank, lab, *own) for rank, own in enumerate(counts)]
    if place.rank != 0:
        return None
    worst = {
        layout: max(abs(row["interface_to_ledger"] - 1) for row in rows if row["layout"] == layout)
        for layout in LAYOUTS
    }
    checks = [
        check(f"{layout}: interface against ledger, worst rank", off, TOLERANCE, at_most=True)
        for layout, off in worst.items()
    ]
    return {"rows": rows, "checks": checks}


def measure_priority(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each schedule, and no checks.

    A turn is several steps in a row, so that the sums of one can hide behind the forward of the next. It ends when all
    parameters are updated.
    """
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    exposed: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    with ExitStack() as stack:
        folder = stack.enter_context(rank_folder())
        run_file = gpt_run_file(folder, corpus_file(folder), PRIORITY_TOKENS)
        run_file = msgspec.structs.replace(run_file, optimizer=AdamW(clip_norm=float("inf")))
        sides: dict[str, Callable[[], Any]] = {}
        for schedule, gradients in SCHEDULES.items():
            own = msgspec.structs.replace(run_file, gradients=gradients)
            training = start_training(own, place, stack, store=PrefixStore(schedule, store))
            job = training_job(training, folder, stack)
            sides[schedule] = partial(_steps, job, training.run.generation.gradients, exposed[schedule])
        turns = interleaved(sides, clock, pairs=PRIORITY_TURNS, always=tuple(sides))
    counted_steps = PRIORITY_STEPS * PRIORITY_TURNS
    waited = gathered(clock, [statistics.median(seconds[-counted_steps:]) for seconds in exposed.values()])
    if place.rank != 0:
        return None
    rows = [
        {
            "part": "priority",
            "lab": name,
            "schedule": schedule,
            "mbit": lab.rate_mbit(0, 1),
            "step_ms": round(1e3 * statistics.median(turn[schedule] for turn in turns) / PRIORITY_STEPS, 2),
            "exposed_ms": round(1e3 * max(rank[number] for rank in waited), 2),
            "times_as_fast_as_order": round(statistics.median(ratios(turns, schedule, peer="order")), 4),
            "turns": len(turns),
        }
        for number, schedule in enumerate(SCHEDULES)
    ]
    return {"rows": rows, "checks": []}


def _count(layout: str, place: Place, store: Store, clock: Collective) -> list[float]:
    """Bytes of the ledger to other hosts, bytes and packets of the interface, in some steps of this rank."""
    with ExitStack() as stack:
        folder = stack.enter_context(rank_folder())
        run_file = msgspec.structs.replace(
            gpt_run_file(folder, corpus_file(folder), LEDGER_TOKENS),
            model=MODEL,
            layout=LAYOUTS[layout],
            pipeline=PipelineConfig(schedule="1F1B", microbatches=4),
        )
        job = training_job(start_training(run_file, place, stack, store=store), folder, stack)
        for _ in range(LEDGER_WARM_UP):
            take_step(job)
        ledger_bytes: list[int] = []

        def steps() -> None:
            for _ in range(LEDGER_STEPS):
                ledger_bytes.append(sum(entry.between_bytes for entry in take_step(job).wire.values()))

        interface = while_counting(clock, steps)
    return [sum(ledger_bytes), interface.bytes_sent, interface.packets_sent]


def _ledger_row(
    layout: str, rank: int, lab: Lab, ledger_bytes: float, interface_bytes: float, packets: float
) -> dict[str, Any]:
    return {
        "part": "ledger",
        "layout": layout,
        "rank": rank,
        "mbit": lab.hosts[0].rate_mbit,
        "steps": LEDGER_STEPS,
        "ledger_bytes": int(ledger_bytes),
        "interface_bytes": int(interface_bytes),
        "interface_packets": int(packets),
        "interface_to_ledger": round(interface_bytes / ledger_bytes, 4),
        "without_headers_to_ledger": round((interface_bytes - HEADER_BYTES * packets) / ledger_bytes, 4),
    }


def _steps(job: Job, gradients: Gradients, exposed: list[float]) -> None:
    """A turn; appends the seconds that each step waited for the wire."""
    for _ in range(PRIORITY_STEPS):
        exposed.append(sum(take_step(job).wire.values(), Entry()).exposed_s)
    gradients.settle()
