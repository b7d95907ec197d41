"""`python -m benchmarks.local`: replicas that take steps of their own, beside replicas that sum every gradient.

All train recipes/stdlib-gpt.toml on the same samples with the same schedule, one after the other in one run. Bytes are
those of the ledger, rank 0's, over all steps; evaluations are left out. The peak is that of all steps but the last, in
which every strategy agrees on the whole model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from shoal.bench.groups import join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Row, check, print_report
from shoal.bench.training_job import start_training
from shoal.codec.config import BlockwiseConfig, CodecConfig, NoCodec
from shoal.launcher.environment import Place
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.sync.config import AllReduceConfig, EASGDConfig, GossipConfig, LocalConfig, StreamingConfig, SyncConfig

RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-gpt.toml"
LOSS_BOUND, FEWER_BYTES, FEWER_BYTES_INT8, LOWER_PEAK = 0.03, 45.0, 180.0, 4.0
STRATEGIES: Mapping[str, tuple[SyncConfig, CodecConfig]] = {
    "allreduce": (AllReduceConfig(), NoCodec()),
    "diloco": (LocalConfig(), NoCodec()),
    "diloco-int8": (LocalConfig(), BlockwiseConfig()),
    "streaming": (StreamingConfig(), NoCodec()),
    "easgd": (EASGDConfig(), NoCodec()),
    "gossip": (GossipConfig(), NoCodec()),
}


def local(
    strategies: Annotated[str, typer.Option(help="Which, with commas; allreduce first.")] = ",".join(STRATEGIES),
    steps: Annotated[int, typer.Option(help="Steps of each run.", min=1)] = 300,
    processes: Annotated[int, typer.Option(help="Replicas.", min=2)] = 4,
    as_json: AsJson = False,
) -> None:
    """Held-out loss and bytes of strategies that agree seldom, beside all-reduce in every step.

    Example: python -m benchmarks.local --strategies allreduce,diloco
    """
    names = strategies.split(",")
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or names[0] != "allreduce":
        raise typer.BadParameter(f"{strategies}; begin with allreduce, and choose of {', '.join(STRATEGIES)}")
    if is_rank():
        run_as_rank(lambda place: measure(place, names=names, steps=steps))
        return
    command = ["benchmarks.local", "--strategies", strategies, "--steps", str(steps), "--processes", str(processes)]
    print_report("local", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, names: list[str], steps: int) -> Result | None:
    """Rows and checks; None on all ranks but rank 0."""
    store = join_store(place)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        rows = [trained(name, place, PrefixStore(name, store), Path(folder), steps=steps) for name in names]
    return result_of(rows) if place.rank == 0 else None


def trained(name: str, place: Place, store: Store, folder: Path, *, steps: int) -> Row:
    """One training, from the recipe's first step to its evaluation."""
    base: RunFile = load_run(RECIPE)
    sync, codec = STRATEGIES[name]
    own = msgspec.structs.replace(
        base.run, name=name, steps=steps, processes=place.world_size, directory=str(folder / name)
    )
    run_file = msgspec.structs.replace(base, run=own, sync=sync, codec=codec)
    with ExitStack() as stack:
        training = start_training(run_file, place, stack, store=store)
        training.run.mesh.ledger.take()
        begin_s, sent = time.perf_counter(), []
        for number in range(1, steps + 1):
            sent.append(training.take_step(lr=training.run.rate(number)).bytes_sent)
        train_s = time.perf_counter() - begin_s
        loss = training.run.evaluate()["loss/eval"]
    return {
        "strategy": name,
        "loss": round(loss, 4),
        "sent_mb": round(sum(sent) / 1e6, 3),
        "largest_step_kb": round(max(sent[:-1], default=0) / 1e3, 1),
        "train_s": round(train_s, 1),
    }


def result_of(rows: list[Row]) -> Result:
    """Every row beside the first one, and the promised figures."""
    found = {row["strategy"]: row for row in rows}
    peer = found["allreduce"]
    for row in rows:
        row["loss_above"] = round(row["loss"] / peer["loss"] - 1, 4)
        row["fewer_bytes"] = round(peer["sent_mb"] / row["sent_mb"], 1)
    checks = []
    for name, fewer in (("diloco", FEWER_BYTES), ("diloco-int8", FEWER_BYTES_INT8)):
        if name in found:
            checks.append(check(f"{name}: loss above all-reduce", found[name]["loss_above"], LOSS_BOUND, at_most=True))
            checks.append(check(f"{name}: fewer bytes", found[name]["fewer_bytes"], fewer))
    if {"diloco", "streaming"} <= found.keys():
        ratio = found["diloco"]["largest_step_kb"] / found["streaming"]["largest_step_kb"]
        checks.append(check("streaming: lower peak than diloco", ratio, LOWER_PEAK))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(local)
