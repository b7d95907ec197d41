"""How a start grows to 4,096 ranks: the job's store with as many real clients, and what a launcher says at the end.

    python -m benchmarks.thousand_ranks --ranks 64,1024,4096

Each client is a connection of its own that has proved the token. Up to 1,024 ranks are threads of a few processes
that run the code of a rank's start (`Rendezvous`, `Board`); more are coroutines that send the same requests.
Measured: seconds until all are connected and through
the first barrier, seconds of an all-gather of what hosts say, requests of a rank, memory of the process that hosts the
store. The failure of one rank among so many is reported from real records.

`--saves SHARDS`: what a save costs each rank and rank 0, but for the disk: the plan from what all ranks hold of 100
tensors in three states each, cut by rows over SHARDS ranks, and the manifest of what they have stored.

`--coordinator`: as many replicas join a coordinator, each over a connection that has proved the token, form a
generation, commit a step, lose one of them and form the next; and the hang verdict on as many ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import secrets
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint.encoding import listed
from shoal.checkpoint.manifest import Manifest, encode
from shoal.checkpoint.objects import Stored
from shoal.checkpoint.plan import Item, plan_for
from shoal.checkpoint.round import tensor_entries, writer
from shoal.comm.packing import packed, unpacked
from shoal.coordinator.client import ANSWERS, Address
from shoal.coordinator.service import Limits, coordinator_in
from shoal.launcher import frames, handshake, sockets
from shoal.launcher.environment import Place
from shoal.launcher.failure import Failure, read_failures, write_failure
from shoal.launcher.root_cause import Exit, failure_report, root_cause
from shoal.launcher.store import server as store_server
from shoal.launcher.store.connection import POLLS_A_SECOND
from shoal.launcher.store.messages import REPLIES, SERVICE, Reply, Request
from shoal.launcher.store.server import Keys, StoreServer
from shoal.resilience.events import Accept, Ended, Heartbeat, Join, Report, Restored
from shoal.resilience.hang_verdict import CodePlace, LastCall, RankReport, hang_verdict
from shoal.resilience.membership import Rules
from shoal.topology.holding import Box

TENSORS, ROWS, COLUMNS, OBJECT_BYTES = 100, 8192, 1024, 64 << 20
"""Of a model of 840 million numbers, whose state with two moments is 10 GB."""
PROCESSES = 2
TIMEOUT_S = 40.0
MOST_THREADS = 1024
"""Ranks that have threads, and run a rank's own code; more only send the same requests."""


def main() -> None:
    """Prints a line for each number of ranks, or one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="64,1024,4096")
    parser.add_argument("--coordinator", action="store_true")
    parser.add_argument("--saves", type=int, metavar="SHARDS", help="a model's state is cut into so many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measure = coordinated if options.coordinator else measured
    if options.saves:
        measure = partial(saved, shards=options.saves)
    rows = [measure(int(count)) for count in options.ranks.split(",")]
    if options.json:
        print(json.dumps({"bench": "thousand_ranks", "machine": {"cores": os.cpu_count()}, "rows": rows}))
        return
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))


def measured(ranks: int) -> dict[str, float]:
    """The figures of a start of `ranks` ranks, and of the report when one of them fails."""
    count = [0]
    handle = Keys.handle

    def counted(self: Keys, request: Any, answer: Any) -> Any:
        count[0] += 1
        return handle(self, request, answer)

    store_server.Keys.handle = counted  # type: ignore[method-assign]
    before_mb = _resident_mb()
    listener, token = sockets.listen_on_loopback(), secrets.token_bytes(32)
    server = StoreServer(listener, token=token)
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(PROCESSES + 1), context.Queue()
    shares = [range(start, ranks, PROCESSES) for start in range(PROCESSES)]
    workers = [
        context.Process(
            target=_clients if ranks <= MOST_THREADS else _light_clients,
            args=(share, ranks, server.port, token, gate, answers),
        )
        for share in shares
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    begin_s = time.perf_counter()
    steps = [answers.get(timeout=4 * TIMEOUT_S) for _ in workers]
    start_s = time.perf_counter() - begin_s
    server_mb = _resident_mb() - before_mb
    gate.wait()
    for worker in workers:
        worker.join()
    server.close()
    store_server.Keys.handle = handle  # type: ignore[method-assign]
    report_s, lines = _reported(ranks)
    return {
        "ranks": ranks, "start_s": start_s, "barrier_s": max(step[0] for step in steps),
        "gather_s": max(step[1] for step in steps), "requests_a_rank": count[0] / ranks, "store_mb": server_mb,
        "report_s": report_s, "report_lines": lines,
    }  # fmt: skip


def _clients(share: range, ranks: int, port: int, token: bytes, gate: Any, answers: Any) -> None:
    from shoal.comm.board import Board
    from shoal.launcher.rendezvous import Rendezvous, connect_store

    threading.stack_size(256 << 10)
    times: list[tuple[float, float]] = []
    texts = set()

    def one(rank: int) -> None:
        place = Place(rank, ranks, rank % 8, 8, rank // 8, "shoal")
        begin_s = time.perf_counter()
        store = connect_store(place, "127.0.0.1", port, token=token, timeout_s=TIMEOUT_S)
        Rendezvous(store, place, timeout_s=TIMEOUT_S).barrier("the store")
        barrier_s = time.perf_counter() - begin_s
        board = Board(store, timeout_s=TIMEOUT_S)
        said = board.all_gather("hosts", f"boot-id-of-host-{rank // 8}/user", rank=rank, ranks=range(ranks))
        times.append((barrier_s, time.perf_counter() - begin_s - barrier_s))
        texts.add((len(said), said[0], said[-1]))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in share]
    gate.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(times) != len(share) or len(texts) != 1:
        raise RuntimeError(f"{len(share) - len(times)} of {len(share)} clients failed")
    answers.put((max(t[0] for t in times), max(t[1] for t in times)))
    gate.wait()


def _light_clients(share: range, ranks: int, port: int, token: bytes, gate: Any, answers: Any) -> None:
    """The same connections, proofs and requests without a thread for each: a few cores play thousands of ranks."""
    gate.wait()
    times = asyncio.run(_all_light(share, ranks, port, handshake.key_for(token, SERVICE)))
    answers.put((max(t[0] for t in times), max(t[1] for t in times)))
    gate.wait()


async def _all_light(share: range, ranks: int, port: int, key: bytes) -> list[tuple[float, float]]:
    return await asyncio.gather(*(_light(rank, ranks, port, key) for rank in share))


async def _light(rank: int, ranks: int, port: int, key: bytes) -> tuple[float, float]:
    """Seconds until the barrier is passed, and of the gather."""
    begin_s = time.perf_counter()
    reader, writer = await _light_connection(port, key)

    async def ask(*given: Any) -> Reply:
        writer.write(frames.encode(Request(0, *given)))
        return frames.decode(await frames.read(reader, most_bytes=1 << 26, begin_s=None, rest_s=None), REPLIES)

    await ask("set", [f"barrier/{rank}"], [b"host pid"])
    if (await ask("add", ["barrier"], [], 1)).amount == ranks:
        await ask("set", ["barrier/all"], [b""])
    while not (await ask("wait", ["barrier/all"], [], 0, ranks / POLLS_A_SECOND)).found:
        await ask("check", ["failed"])
    barrier_s = time.perf_counter() - begin_s
    await ask("set", [f"hosts/{rank}"], [b"boot-id-of-host-%d/user" % (rank // 8)])
    if rank == 0:
        values: list[bytes] = []
        names = [f"hosts/{other}" for other in range(ranks)]
        while len(values) < ranks:
            values += (await ask("get", names[len(values) :], [], 0, TIMEOUT_S)).values
        await ask("set", ["hosts/all"], [packed(values)])
    whole = (await ask("get", ["hosts/all"], [], 0, TIMEOUT_S)).values[0]
    if len(unpacked(whole)) != ranks:
        raise RuntimeError(f"rank {rank} was told of {len(unpacked(whole))} ranks")
    return barrier_s, time.perf_counter() - begin_s - barrier_s


async def _light_connection(port: int, key: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            whole = {"most_bytes": handshake.MOST_HANDSHAKE_BYTES, "begin_s": TIMEOUT_S, "rest_s": TIMEOUT_S}
            greeting = frames.decode(await frames.read(reader, **whole), handshake.HELLOS)
            proof = handshake.prove(key, greeting)
            writer.write(frames.encode(proof))
            answer = frames.decode(await frames.read(reader, **whole), handshake.WELCOMES)
            handshake.check_welcome(key, greeting, proof, answer)
            return reader, writer
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.25 + random.random() / 2)


def coordinated(replicas: int) -> dict[str, float]:
    """Seconds to the first generation, of a committed step and to the generation after a loss; the coordinator is a
    thread of this process, its members coroutines of another.
    """
    context = multiprocessing.get_context("spawn")
    answers, before_mb, begin_s = context.Queue(), _resident_mb(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        rules = Rules(1, replicas, silence_s=4 * TIMEOUT_S, start_s=4 * TIMEOUT_S)
        limits = Limits(idle_s=8 * TIMEOUT_S)  # these members send no heartbeats
        with coordinator_in(Path(folder), rules, told=lambda news: None, limits=limits) as address:
            worker = context.Process(target=_members, args=(replicas, address, answers))
            worker.start()
            formed_s, step_s, again_s = answers.get(timeout=8 * TIMEOUT_S)
            busy_s = time.process_time() - begin_s
            worker.join()
    coordinator_mb = _resident_mb() - before_mb
    verdict_s, letters = _hang_verdict(replicas)
    return {
        "replicas": replicas, "formed_s": formed_s, "step_s": step_s, "formed_again_s": again_s, "busy_s": busy_s,
        "coordinator_mb": coordinator_mb, "verdict_s": verdict_s, "verdict_letters": letters,
    }  # fmt: skip


def _members(replicas: int, address: Address, answers: Any) -> None:
    answers.put(asyncio.run(_all_members(replicas, address)))


async def _all_members(replicas: int, address: Address) -> tuple[float, float, float]:
    names = [f"replica-{number}-abcd1234" for number in range(replicas)]
    begin_s = time.perf_counter()

    async def member(name: str) -> Any:
        reader, writer = await _light_connection(address.port, address.token)

        async def ask(event: Any) -> Any:
            writer.write(frames.encode(event))
            return frames.decode(await frames.read(reader, most_bytes=1 << 26, begin_s=None, rest_s=None), ANSWERS)

        await ask(Join(name, 1, "127.0.0.1:1"))
        return ask

    asks = await asyncio.gather(*(member(name) for name in names))

    async def formed(left: list[int], generation: int, step: int | None) -> None:
        number = (await asks[left[0]](Heartbeat(names[left[0]], 0))).number
        await asyncio.gather(*(asks[i](Accept(names[i], number, generation, step)) for i in left))
        pulse = await asks[left[0]](Heartbeat(names[left[0]], 0))
        if pulse.generation != number:
            raise RuntimeError(f"generation {number} of {len(left)} replicas was not formed: {pulse}")

    await formed(list(range(replicas)), 0, None)
    formed_s = time.perf_counter() - begin_s
    await asyncio.gather(*(ask(Restored(name, 1, 0, 0)) for ask, name in zip(asks, names, strict=True)))
    begin_s = time.perf_counter()
    await asyncio.gather(*(ask(Report(name, 1, 1, 0, 8)) for ask, name in zip(asks, names, strict=True)))
    step_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
    await asks[0](Ended(names[-1], "its process ended"))
    await formed(list(range(replicas - 1)), 1, 1)
    return formed_s, step_s, time.perf_counter() - begin_s


def _hang_verdict(ranks: int) -> tuple[float, int]:
    """Rank 17 is in its own code, all others wait for it: seconds until that is said, and letters of it."""
    at, inside = CodePlace("train.py", 10), LastCall(7, "all_reduce", CodePlace("train.py", 10))
    before = LastCall(6, "all_reduce", at, ended=True)
    stuck = 17 % ranks
    reports = {
        rank: RankReport(rank, "host", {"world": before if rank == stuck else inside}, (CodePlace("mine.py", 3),))
        for rank in range(ranks)
    }
    begin_s = time.perf_counter()
    found = hang_verdict({"world": range(ranks)}, reports)
    if found.ranks != (stuck,):
        raise RuntimeError(f"the verdict names others: {found.sentence[:300]}")
    return time.perf_counter() - begin_s, len(found.sentence)


def saved(ranks: int, *, shards: int) -> dict[str, float]:
    """Seconds of a rank's plan, which it makes once, of rank 0's manifest, made in every save, and what these take."""
    rows, names = ROWS // shards, [f"{kind}/layer.{n}.weight" for kind in ("model", "m", "v") for n in range(TENSORS)]
    groups = {
        tuple(range(shard, ranks, shards)): [
            Item(name, "float32", (ROWS, COLUMNS), (Box((shard * rows, 0), (rows, COLUMNS)),)) for name in names
        ]
        for shard in range(shards)
    }
    before_mb, begin_s = _resident_mb(), time.perf_counter()
    plan = plan_for(groups, world_size=ranks, object_bytes=OBJECT_BYTES)
    plan_s, plan_mb, begin_s = time.perf_counter() - begin_s, _resident_mb() - before_mb, time.perf_counter()
    stored = [Stored(f"{number:064x}", OBJECT_BYTES, written=True) for number in range(len(plan.parcels))]
    manifest = Manifest(
        step=1, generation=1, created=time.time(), tensors=tensor_entries(plan.parcels, stored),
        objects=listed(stored, None)[0], state={}, layout={}, writer=writer(),
    )  # fmt: skip
    content = encode(manifest)
    return {
        "ranks": ranks, "shards": shards, "plan_s": plan_s, "plan_mb": plan_mb,
        "manifest_s": time.perf_counter() - begin_s, "manifest_bytes": len(content), "objects": len(stored),
        "most_objects_of_a_rank": max(map(len, plan.shares)),
    }  # fmt: skip


def _reported(ranks: int) -> tuple[float, int]:
    """Rank 17 fails, all others lose it: the seconds and lines of the launcher's report, whose first line names it."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            lost = rank != 17 % ranks
            kind, text = ("RuntimeError", "Connection closed by peer") if lost else ("ValueError", "a NaN at step 3")
            failure = Failure(
                rank=rank, host="h", pid=rank, time_ns=1 if not lost else 2, kind=kind, message=text,
                secondary=lost, exit_code=1,
            )  # fmt: skip
            write_failure(failure, Path(folder))
        exits = [Exit(rank=rank, pid=rank, code=1, time_ns=2, by_launcher=False) for rank in range(ranks)]
        begin_s = time.perf_counter()
        ends = root_cause(read_failures(Path(folder)), exits)
        text = failure_report(ends, exits, stopped={}, log_tails={})
        report_s = time.perf_counter() - begin_s
    if "a NaN at step 3" not in text.splitlines()[0] + text.splitlines()[1]:
        raise RuntimeError(f"the cause is not named first: {text[:300]}")
    return report_s, len(text.splitlines())


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
