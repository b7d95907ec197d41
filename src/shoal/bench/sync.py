"""`shoal bench sync`: how long each way to agree takes to a fixed loss, on even workers, with a slow one, and over a
slow link.

All strategies train the same multilayer perceptron on the digits with the same optimizer, SGD, from the same first
weights and in the same order of samples. Workers are paced (`bench.training_job`): a sample takes the same time on
each, and `--slow` times as long on one, so that cores which ranks share change nothing. All replicas agree every
`PERIOD` steps; there the clock stands still, the loss on held-out samples is taken, and a run ends when it is low
enough. The time and the samples at the loss are interpolated between two evaluations.

Behind a slow link even workers are on two hosts of a lab (`launcher.lab`): network namespaces with a shaped link, or,
where this user may make none, ranks that wait as long as their messages would take.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.bench.options import AsJson, names
from shoal.bench.ranks import is_rank, on_ranks, rank_folder, run_as_rank
from shoal.bench.report import Result, Row, check, merged, print_report
from shoal.data.config import BatchConfig, Digits
from shoal.launcher.lab.lab_file import Lab, lab_from
from shoal.launcher.lab.network import why_not
from shoal.models.config import MLPConfig
from shoal.optim.config import SGD, Schedule
from shoal.runfile.run_file import RunConfig, RunFile
from shoal.sync.config import (
    AllReduceConfig,
    EASGDConfig,
    GossipConfig,
    HogwildConfig,
    LocalConfig,
    ServerConfig,
    StreamingConfig,
    SyncConfig,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.launcher.environment import Place

PERIOD, GLOBAL_SAMPLES, LR = 10, 64, 0.2
SOONER = 1.5
"""Times as soon as all-reduce that strategies for uneven workers reach the loss, with one slow worker."""
STRATEGIES: Mapping[str, SyncConfig] = {
    "allreduce": AllReduceConfig(),
    "local": LocalConfig(period=PERIOD, outer_lr=1.0, outer_momentum=0.0),
    "streaming": StreamingConfig(period=PERIOD, fragments=2, delay=2, outer_lr=1.0, outer_momentum=0.0),
    "easgd": EASGDConfig(period=PERIOD),
    "gossip": GossipConfig(meet_every=PERIOD),
    "server-sync": ServerConfig(period=PERIOD),
    "server-bounded": ServerConfig(admission="bounded", bound=1, period=PERIOD),
    "server-backup": ServerConfig(admission="backup", backup=1, period=PERIOD),
    "server-async": ServerConfig(admission="async", period=PERIOD),
    "hogwild": HogwildConfig(period=PERIOD),
}
DIVIDED = ("allreduce", "local", "server-bounded", "server-async")
"""Those that are measured with work divided by speed too, as `allreduce+by_speed`."""
ALL = (*STRATEGIES, *(f"{name}+by_speed" for name in DIVIDED))
HERE, SLOW_LINK = ("even", "one-slow"), "slow-link"
"""The machines that are this one as it is, and the one that is a lab."""
ONE_HOST = ("hogwild",)
"""Strategies whose replicas share memory: there is no link between them."""
PROMISED = ("allreduce+by_speed", "local+by_speed", "server-bounded+by_speed", "server-backup")


def sync(
    strategies: Annotated[str, typer.Option(help=f"Several with commas, of {', '.join(ALL)}; default: all.")] = "",
    machines: Annotated[
        str, typer.Option(help="Of even, one-slow and slow-link; several, with commas; default: all.")
    ] = "",
    link_mbit: Annotated[float, typer.Option(help="Rate of the slow link between two hosts, Mbit/s.", min=0.1)] = 2.0,
    slow: Annotated[float, typer.Option(help="Times as long for a sample on the slow worker.", min=1)] = 4.0,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds for a sample on the others.", min=0.01)] = 1.0,
    loss: Annotated[float, typer.Option(help="Held-out loss at which a run ends.", min=1e-6)] = 0.3,
    steps: Annotated[int, typer.Option(help="Most steps of a run.", min=PERIOD)] = 600,
    processes: Annotated[int, typer.Option(help="Workers of one thread.", min=2, max=GLOBAL_SAMPLES)] = 4,
    picture: Annotated[Path | None, typer.Option(help="Draw loss over time to this PNG, SVG or PDF.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time and samples to a fixed loss, for every way to agree: on even workers, with a slow one, over a slow link.

    Example: shoal bench sync --strategies allreduce,server-backup --machines one-slow
    """
    chosen, on = names(strategies, "--strategies", ALL), names(machines, "--machines", (*HERE, SLOW_LINK))
    if is_rank():
        options = {"sample_s": sample_ms / 1e3, "slow": slow, "loss": loss, "steps": steps}
        run_as_rank(lambda place: measure(place, chosen, on, **options))
        return
    from shoal.bench.pictures import picture_path

    path = picture_path(picture)
    options = ["--slow", str(slow), "--sample-ms", str(sample_ms), "--loss", str(loss), "--steps", str(steps)]
    apart = [name for name in chosen if name not in ONE_HOST]
    if not apart and SLOW_LINK in on:
        raise typer.BadParameter(f"{strategies} on {SLOW_LINK}: its processes share the memory of one host")
    groups: list[tuple[list[str], list[str], Lab | None, str]] = [
        ([one for one in on if one in HERE], chosen, None, "")
    ]
    if SLOW_LINK in on:
        groups.append(([SLOW_LINK], apart, two_hosts(processes, link_mbit), f" behind {link_mbit:g} Mbit/s"))
    results = []
    for where, names_there, lab, said in groups:
        command = ["shoal", "bench", "sync", "--strategies", ",".join(names_there), "--machines", ",".join(where)]
        part = f"strategies on {processes} workers{said}"
        if where:
            results.append(on_ranks([*command, *options], processes=processes, lab=lab, part=part))
    result = merged(results)
    if path is not None:
        from shoal.bench.pictures import write_sync_picture

        write_sync_picture(result["rows"], path, loss=loss)
    if not as_json:
        result["rows"] = [{key: value for key, value in row.items() if key != "curve"} for row in result["rows"]]
    print_report("sync", result, as_json=as_json)


def measure(
    place: Place, strategies: list[str], machines: list[str], *, sample_s: float, slow: float, loss: float, steps: int
) -> Result | None:
    """Rows and checks at rank 0, None elsewhere."""
    from torch._C._distributed_c10d import PrefixStore

    from shoal.bench.groups import join_store
    from shoal.bench.report import tell

    store, rows, runs = join_store(place), [], len(machines) * len(strategies)
    with rank_folder() as folder:
        for machine in machines:
            factor = slow if machine == "one-slow" and place.rank == place.world_size - 1 else 1.0
            for name in strategies:
                tell(f"{name}, {machine}", done=len(rows), total=runs)
                run_file = run_file_of(name, folder / machine / name, processes=place.world_size, steps=steps)
                meeting = PrefixStore(f"{machine}-{name}", store)
                curve = trained(run_file, place, meeting, sample_s=sample_s * factor, loss=loss)
                rows.append({"machine": machine, "strategy": name, **row_of(curve, loss), "curve": curve})
    return result_of(rows) if place.rank == 0 else None


def two_hosts(processes: int, rate_mbit: float) -> Lab:
    """Workers on two hosts with a link of that rate: of the kernel where this user may shape one, else waited for."""
    ranks = [processes - processes // 2, processes // 2]
    network = "kernel" if why_not() is None else "throttle"
    table = {"hosts": 2, "ranks_per_host": ranks, "rate_mbit": rate_mbit, "network": network, "buffer_ms": 1000}
    return lab_from({"lab": table, "link": []}, file="shoal bench sync")


def run_file_of(name: str, folder: Path, *, processes: int, steps: int) -> RunFile:
    """The run of strategy `name`."""
    base, _, division = name.partition("+")
    return RunFile(
        run=RunConfig(name="sync", steps=steps, processes=processes, directory=str(folder), device="cpu"),
        model=MLPConfig(inputs=64, hidden=(64,), outputs=10),
        data=Digits(),
        batch=BatchConfig(global_samples=GLOBAL_SAMPLES, division="by_speed" if division else "even"),
        optimizer=SGD(lr=LR, clip_norm=None),
        schedule=Schedule(kind="constant", warmup_steps=0),
        sync=STRATEGIES[base],
    )


def trained(run_file: RunFile, place: Place, store: Store, *, sample_s: float, loss: float) -> list[list[float]]:
    """[seconds, samples, held-out loss] at every agreement until the loss is reached; the seconds are rank 0's."""
    from shoal.assembly.metering import replica_speeds
    from shoal.bench.training_job import pace, start_training, training_job
    from shoal.engine.loop import take_step

    curve: list[list[float]] = []
    with ExitStack() as stack:
        training = start_training(run_file, place, stack, store=store)
        run = training.run
        pace(run.step.context, sample_s)
        job = training_job(training, Path(str(run_file.run.directory)), stack)
        job = replace(job, rate=run.rate, speeds=replica_speeds(run, training.feed, job.sinks))
        seconds = 0.0
        run.mesh.world.barrier().wait()
        begin_s = time.perf_counter()
        while job.progress.step < run_file.run.steps:
            result = take_step(job)
            if result.agreed is None or job.progress.step % PERIOD:
                continue
            run.mesh.world.barrier().wait()
            seconds += time.perf_counter() - begin_s
            curve.append([seconds, float(job.progress.samples), run.evaluate()["loss/eval"]])
            if curve[-1][2] <= loss:
                break
            run.mesh.world.barrier().wait()
            begin_s = time.perf_counter()
        run.mesh.world.barrier().wait()
    return curve


def row_of(curve: list[list[float]], loss: float) -> dict[str, Any]:
    """Seconds and samples at which the curve crosses `loss`, interpolated; None where it does not."""
    last = curve[-1]
    if last[2] > loss:
        return {"seconds": None, "samples": None, "loss": round(last[2], 4)}
    before = curve[-2] if len(curve) > 1 else last
    part = (before[2] - loss) / (before[2] - last[2]) if before[2] > last[2] else 1.0
    seconds, samples = (before[k] + part * (last[k] - before[k]) for k in (0, 1))
    return {"seconds": round(seconds, 3), "samples": round(samples), "loss": loss}


def result_of(rows: list[Row]) -> Result:
    """Every row beside all-reduce on the same machine, and the promised figures."""
    peers = {row["machine"]: row["seconds"] for row in rows if row["strategy"] == "allreduce"}
    for row in rows:
        peer = peers.get(row["machine"])
        row["times_as_soon"] = round(peer / row["seconds"], 3) if peer and row["seconds"] else None
    checks = [
        check(f"{row['strategy']}, one slow worker: times as soon as all-reduce", row["times_as_soon"] or 0.0, SOONER)
        for row in rows
        if row["machine"] == "one-slow" and row["strategy"] in PROMISED and peers.get("one-slow")
    ]
    return {"rows": rows, "checks": checks}
