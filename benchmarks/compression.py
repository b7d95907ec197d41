"""`python -m benchmarks.compression`: steps of a GPT of 25 million parameters over a slow link, with codecs.

Two hosts of one rank each, 256 tokens a rank and step. In every turn, in the same processes, one after the other:

    no_communication     the same step on each rank alone
    CODEC                Shoal, gradients through the codec
    none                 Shoal, gradients as they are
    ddp                  a hand-written DDP script on Gloo
    ddp_power_sgd        the same script with PyTorch's PowerSGD hook

`none` and `ddp` take many seconds where the link is slow, and are in every third turn only. Bytes are those that the
host's interface counted in a step, headers included.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.command import run
from shoal.bench.ddp_script import Script, new_gpt
from shoal.bench.groups import Sides, gathered, interleaved, join_default_group, join_group, join_store, while_counting
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Check, Result, Turns, check, columns, merged, print_report, ratios
from shoal.bench.training_job import SEQUENCE, Training, corpus_file, gpt_run_file, start_alone, start_training
from shoal.codec.config import BlockwiseConfig, CodecConfig, NoCodec, PowerSGDConfig, SignConfig, TopKConfig
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.launcher.lab.lab_file import Lab, lab_from
from shoal.launcher.lab.network import why_not
from shoal.models.config import GPTConfig
from shoal.runfile.run_file import RunFile

MODEL = GPTConfig(layers=8, width=512, heads=8, feed_forward="gelu", feed_forward_width=2048)
TOKENS, RANK, ONE_BUCKET_MB = 256, 4, 1024
CODECS: dict[str, CodecConfig] = {
    "power_sgd": PowerSGDConfig(rank=RANK),
    "top_k": TopKConfig(fraction=0.001),
    "sign": SignConfig(),
    "int4": BlockwiseConfig(bits=4),
}
ALONE, NONE, DDP, DDP_POWER_SGD = "no_communication", "none", "ddp", "ddp_power_sgd"
SLOW_MBIT, FAST_MBIT = 100, 1000
OVER_ALONE, FEWER_BYTES, TIMES_DDP_FAST = 1.3, 50.0, 1.6
"""Promised: of a step at 100 Mbit/s, of its bytes, and of its speed at 1 Gbit/s."""


def compression(
    mbit: Annotated[str, typer.Option(help="Rates of the link, Mbit/s, several with commas.")] = "100,1000",
    codecs: Annotated[str, typer.Option(help=f"Of {', '.join(CODECS)}; several, with commas.")] = "power_sgd",
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=3)] = 9,
    as_json: AsJson = False,
) -> None:
    """Training steps over a slow link with codecs, without, without communication, and in DDP with PowerSGD's hook.

    It needs root and iproute2, as hosts are network namespaces.

    Example: python -m benchmarks.compression --mbit 100
    """
    rates, chosen = numbers(mbit, "--mbit", most=40_000), names(codecs, "--codecs", CODECS)
    if is_rank():
        run_as_rank(lambda place: measure(place, mbit=rates[0], codecs=chosen, pairs=pairs))
        return
    if reason := why_not():
        raise EnvironmentFault(f"{reason}; this benchmark has no other network")
    results = []
    for rate in rates:
        command = ["benchmarks.compression", "--mbit", str(rate), "--codecs", ",".join(chosen), "--pairs", str(pairs)]
        results.append(on_ranks(command, processes=2, lab=two_hosts(rate)))
    print_report("compression", merged(results), as_json=as_json)


class Spent(NamedTuple):
    """Seconds of one step of rank 0: waiting for the wire, encoding, decoding."""

    exposed_s: float
    encode_s: float
    decode_s: float


def two_hosts(mbit: int) -> Lab:
    """Two hosts of one rank, whose links have this rate."""
    return lab_from({"lab": {"hosts": 2, "rate_mbit": mbit}}, file="benchmarks.compression")


def measure(place: Place, *, mbit: int, codecs: list[str], pairs: int) -> Result | None:
    """A row for each side; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        join_default_group(place, store, stack)
        clock = join_group("clock", place, store, transport="gloo")
        trainings = trainings_of(place, store, folder, codecs, stack)
        spent: dict[str, list[Spent]] = {name: [] for name in trainings}
        sides: dict[str, Callable[[], Any]] = {
            name: partial(_step, one, spent[name]) for name, one in trainings.items()
        }
        sides |= _peers(place, corpus_file(folder))
        turns = interleaved(sides, clock, pairs=pairs, always=(ALONE, *codecs, DDP_POWER_SGD))
        sent = {}
        for name, step in sides.items():
            counted = while_counting(clock, lambda step=step: (step(), None)[1])
            sent[name] = max(row[0] for row in gathered(clock, [counted.bytes_sent]))
    if place.rank != 0:
        return None
    rows = [{**_row(name, turns, sent, mbit=mbit), **_spent_cells(spent.get(name, []))} for name in sides]
    return {"rows": rows, "checks": _checks(rows, codecs, mbit)}


def trainings_of(place: Place, store: Store, folder: Path, codecs: list[str], stack: ExitStack) -> dict[str, Training]:
    """Shoal's sides: alone, without a codec, and with each of `codecs`. `stack` closes them."""
    corpus = corpus_file(folder)
    found = {ALONE: start_alone(_run_file(folder, corpus, TOKENS, NoCodec()), stack)}
    for name, codec in ((NONE, NoCodec()), *((name, CODECS[name]) for name in codecs)):
        run_file = _run_file(folder, corpus, TOKENS * place.world_size, codec)
        found[name] = start_training(run_file, place, stack, store=PrefixStore(name, store))
    return found


def _run_file(folder: Path, corpus: Path, tokens: int, codec: CodecConfig) -> RunFile:
    return msgspec.structs.replace(gpt_run_file(folder, corpus, tokens), model=MODEL, codec=codec)


def _peers(place: Place, corpus: Path) -> Sides:
    """DDP as it is, and with PyTorch's hook of the same rank, error feedback and warm start.

    The hook has one bucket: it starts its second all-reduce of a bucket from a callback, and over Gloo callbacks of two
    buckets come in another order on another rank, which ends the process.
    """
    sizes = {"samples": TOKENS // SEQUENCE, "sequence": SEQUENCE}
    plain = Script(new_gpt(MODEL), corpus, rank=place.rank, distributed=True, **sizes)
    hooked = Script(new_gpt(MODEL), corpus, rank=place.rank, distributed=False, **sizes)
    wrapped = DistributedDataParallel(hooked.model, gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB)
    wrapped.register_comm_hook(PowerSGDState(None, RANK, start_powerSGD_iter=2), powerSGD_hook)
    hooked.model = wrapped
    return {DDP: plain.step, DDP_POWER_SGD: hooked.step}


def _step(training: Training, spent: list[Spent]) -> None:
    result, coded = training.take_step(), training.run.generation.coded
    figures = {} if coded is None else coded.take_figures()
    spent.append(
        Spent(
            sum(entry.exposed_s for entry in result.wire.values()),
            figures.get("codec/encode_s", 0.0),
            figures.get("codec/decode_s", 0.0),
        )
    )


def _spent_cells(spent: list[Spent]) -> dict[str, Any]:
    """Medians, ms; None for the scripts, which do not say."""
    if not spent:
        return dict.fromkeys(("exposed_ms", "encode_ms", "decode_ms"))
    return {
        f"{name.removesuffix('_s')}_ms": round(1e3 * statistics.median(getattr(one, name) for one in spent), 1)
        for name in Spent._fields
    }


def _row(name: str, turns: Turns, sent: dict[str, float], *, mbit: int) -> dict[str, Any]:
    times_s, over_alone = columns(turns)[name], ratios(turns, ALONE, peer=name)
    over_ddp = ratios(turns, name, peer=DDP)
    return {
        "mbit": mbit,
        "side": name,
        "turns": len(times_s),
        "step_ms": round(1e3 * statistics.median(times_s), 1),
        "over_no_communication": round(statistics.median(over_alone), 3),
        "times_as_fast_as_ddp": round(statistics.median(over_ddp), 3),
        "interface_bytes": int(sent[name]),
        "fewer_bytes_than_ddp": round(sent[DDP] / sent[name], 1) if name != ALONE else None,
    }


def _checks(rows: list[dict[str, Any]], codecs: list[str], mbit: int) -> list[Check]:
    """Of the codec with the shortest step."""
    best = min((row for row in rows if row["side"] in codecs), key=lambda row: row["step_ms"])
    what = f"{best['side']}, {mbit} Mbit/s"
    if mbit == SLOW_MBIT:
        return [
            check(f"{what}: step over one without communication", best["over_no_communication"], OVER_ALONE,
                  at_most=True),
            check(f"{what}: times fewer bytes than DDP", best["fewer_bytes_than_ddp"], FEWER_BYTES),
        ]  # fmt: skip
    if mbit == FAST_MBIT:
        return [check(f"{what}: times as fast as DDP", best["times_as_fast_as_ddp"], TIMES_DDP_FAST)]
    return []


if __name__ == "__main__":
    run(compression)
