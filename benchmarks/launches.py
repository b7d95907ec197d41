"""`python -m benchmarks.launches`: what a step launches on a GPU, without one.

A row is a step of a run on a simulated device (benchmarks/simulated_cuda.py), whose ranks are processes of this
machine: operators that launch, copies between host and device, what the host waited for, and operators of two streams
that nothing orders. The same steps are taken on the CPU, too: `off` is the largest relative difference of a loss.
Ranks talk over Gloo as over NCCL: in a stream of the group's own, for which the stream of the caller waits, and one
call after the other, messages to several ranks among them.

    plain        a loop as a careful person writes it: bfloat16 autocast, fused AdamW, clipping; no Shoal
    own loop     the loop of `shoal.start`, with the same calls and the same model
    train        the step of `shoal train`, with the same model
    shoal's gpt  the same step with Shoal's own model; the other rows are this one, with the keys that they are named by
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import msgspec
import torch
import typer
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.utils import _pytree
from torch.utils.data import TensorDataset

from benchmarks.command import run
from benchmarks.host_overhead import CLIP_NORM, adamw, loss_of, own_step
from benchmarks.own_gpt import build
from benchmarks.simulated_cuda import Watch, on_host, simulated
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.bench.training_job import ENDLESS, LR, Training, training_job
from shoal.comm import mesh
from shoal.comm.c10d_forms import open_gloo
from shoal.config.named import GIVEN
from shoal.data.inputs import AsInputs
from shoal.engine.loop import take_step
from shoal.errors import UsageError
from shoal.gradients.script_writes import COMPARED_FIRST
from shoal.launcher.environment import Place
from shoal.own_loop.loop import Training as OwnLoop
from shoal.runfile.run_file import RunFile

PLAIN, OWN, TRAIN = "plain", "own loop", "train"
WARM_STEPS, STEPS = COMPARED_FIRST + 3, 3
"""Buffers and written weights are compared in the first steps, small reads by the loop itself begin after some, and
codecs measure what they leave out in the first of ten steps."""
VOCABULARY, TOKENS, ROWS = 64, 16, 256
RANK_S = 120.0
"""A rank takes some seconds. One that hangs prints where its threads are, and ends."""

MOE = {"kind": "moe", "experts": 4, "top_k": 2}
CASES: Mapping[str, tuple[int, dict[str, Any]]] = {
    PLAIN: (1, {}),
    OWN: (1, {}),
    TRAIN: (1, {}),
    "shoal's gpt": (1, {}),
    "float32": (1, {"precision": {"kind": "float32"}}),
    "float16": (1, {"precision": {"kind": "float16"}}),
    "masters": (1, {"precision": {"kind": "bfloat16_params"}}),
    "microbatches": (1, {"batch": {"micro_samples": 2}}),
    "recompute": (1, {"memory": {"recompute": "full"}}),
    "recompute, some": (1, {"memory": {"recompute": "selective"}}),
    "loss in chunks": (1, {"memory": {"loss_chunks": 4}}),
    "dropout": (1, {"model": {"dropout": 0.1}}),
    "replicated": (2, {"layout": {"replicate": 2}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    "ZeRO-3, masters": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}, "precision": {"kind": "bfloat16_params"}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "tensor, sequence parallel": (2, {"layout": {"tensor": 2, "sequence_parallel": True}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "pipeline of four": (4, {"layout": {"pipeline": 4}, "batch": {"micro_samples": 1}}),
    "context": (2, {"layout": {"context": 2}}),
    "experts": (2, {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}, "model": MOE}),
    "int8 gradients": (2, {"layout": {"replicate": 2}, "codec": {"kind": "blockwise"}}),
    "top-k gradients": (2, {"layout": {"replicate": 2}, "codec": {"kind": "top_k"}}),
    "low-rank gradients": (2, {"layout": {"replicate": 2}, "codec": {"kind": "power_sgd"}}),
    "alternating gradients": (2, {"layout": {"replicate": 2}, "codec": {"kind": "acp_sgd"}}),
    "frequencies of gradients": (2, {"layout": {"replicate": 2}, "codec": {"kind": "dct_top_k"}}),
    "ZeRO-3, tensor": (4, {"layout": {"shard": 2, "tensor": 2}, "memory": {"zero": 3}}),
    "replicated, pipeline": (4, {"layout": {"replicate": 2, "pipeline": 2}}),
    "ZeRO-2, context": (4, {"layout": {"shard": 2, "context": 2}, "memory": {"zero": 2}}),
    "eight ranks": (8, {"layout": {"replicate": 2, "shard": 2, "tensor": 2}, "memory": {"zero": 1}}),
    "local steps": (2, {"layout": {"replicate": 2}, "sync": {"kind": "local", "period": 2}}),
    "gossip": (2, {"layout": {"replicate": 2}, "sync": {"kind": "gossip"}}),
    "8-bit AdamW": (1, {"optimizer": {"kind": "adamw_8bit"}}),
    "Muon": (1, {"optimizer": {"kind": "muon"}}),
    "SOAP": (1, {"optimizer": {"kind": "soap"}}),
    "Shampoo": (1, {"optimizer": {"kind": "shampoo"}}),
    "Adafactor": (1, {"optimizer": {"kind": "adafactor"}}),
    "LAMB": (1, {"optimizer": {"kind": "lamb"}}),
    "LAMB, ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}, "optimizer": {"kind": "lamb"}}),
    "Adafactor, ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}, "optimizer": {"kind": "adafactor"}}),
    "1-bit Adam": (2, {"layout": {"replicate": 2}, "optimizer": {"kind": "one_bit_adam", "exact_steps": 2}}),
    "1-bit LAMB": (2, {"layout": {"replicate": 2}, "optimizer": {"kind": "one_bit_lamb", "exact_steps": 2}}),
    "schedule-free": (1, {"optimizer": {"kind": "schedule_free_adamw"}}),
    "K-FAC": (1, {"optimizer": {"kind": "kfac"}}),
    "Lion": (1, {"optimizer": {"kind": "lion"}}),
    "averages": (1, {"optimizer": {"average": {"kind": "ema", "decay": 0.9}}}),
    "masks": (1, {"sparsity": {"kind": "magnitude", "density": 0.5, "schedule": {"shape": "one_shot"}}}),
    "optimizer on the host": (1, {"memory": {"offload": {"optimizer": "host"}}}),
    "activations on the host": (1, {"memory": {"offload": {"activations": "host"}}}),
}
"""Ranks, and tables of the run file beside those of `tables`."""


@dataclass(frozen=True)
class Size:
    """Of the model, a GPT of Shoal's or, of the first three rows, a user's own."""

    layers: int = 2
    width: int = 32
    samples: int = 8


@dataclass
class Row:
    """What a step of one rank did on the device."""

    case: str
    ranks: int
    launched: float = 0.0
    copies: float = 0.0
    waits: dict[str, int] = field(default_factory=dict)
    races: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    off: float = 0.0
    failed: str = ""


class SimulatedNccl:
    """`gloo`, a group of processes of the CPU, as one over NCCL that is connected when it opens: its collectives are of
    tensors of the device, and in a stream of their own. A thread makes its calls, each when the one before has ended.
    Its ranks connect in the first call of a kind, which holds up the one who makes it, as NCCL's does.
    """

    WRITES: Mapping[str, int] = {
        **dict.fromkeys(("allreduce", "broadcast", "reduce", "recv", "allgather", "_allgather_base"), 0),
        **dict.fromkeys(("_reduce_scatter_base", "alltoall_base", "gather", "scatter"), 0),
        "send": -1,
    }
    """Which argument it writes; -1: none."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._stream, self._connected = gloo, torch.Stream("cuda"), set[Any]()
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[None]]] = SimpleQueue()
        threading.Thread(target=_one_by_one, args=(self._calls,), daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._gloo, name)
        return partial(self._launched, name, call) if name in self.WRITES else call

    def _launched(self, name: str, call: Callable[..., Any], *given: Any) -> Any:
        tensors = [_tensors(each) for each in given]
        at = self.WRITES[name]
        written = tensors[at] if at >= 0 else []
        read = [tensor for place, each in enumerate(tensors) for tensor in each if place != at] or written
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            torch.ops.simulated_cuda.collective(read, written, name)
        done: Future[None] = Future()
        self._calls.put((partial(call, *_pytree.tree_map_only(Tensor, on_host, given)), done))
        kind = name, given[1] if name in ("send", "recv") else None
        if kind not in self._connected:
            self._connected.add(kind)
            done.result()
        return SimulatedWork(done, self._stream, given)


def _one_by_one(calls: SimpleQueue[tuple[Callable[[], Any], Future[None]]]) -> None:
    while True:
        call, done = calls.get()
        try:
            call().wait()
        except Exception as error:  # whoever waits for it raises it
            done.set_exception(error)
        else:
            done.set_result(None)


class SimulatedWork:
    """A collective in `stream`: who waits is the stream of the caller. `given` is kept until then, as NCCL does."""

    def __init__(self, work: Future[None], stream: torch.Stream, given: Any) -> None:
        self._work, self._done, self._given = work, stream.record_event(), given

    def wait(self, *_: Any) -> bool:
        self._work.result()
        self._given = None
        torch.accelerator.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._work.done()


def _tensors(given: Any) -> list[Tensor]:
    return [each for each in _pytree.tree_leaves(given) if isinstance(each, Tensor)]


def open_nccl(store: Any, rank: int, size: int, timeout_s: float, **_: Any) -> SimulatedNccl:
    """In the place of `shoal.comm.mesh.open_nccl`."""
    return SimulatedNccl(open_gloo(store, rank, size, timeout_s=timeout_s))


@dataclass(frozen=True)
class Setting:
    """One rank of one case on one device."""

    case: str
    place: Place
    store: Any
    device: str
    size: Size
    folder: Path
    stack: ExitStack

    def model(self) -> nn.Module:
        """A user's own, the same weights everywhere."""
        torch.manual_seed(0)
        width = self.size.width
        return build(
            vocabulary=VOCABULARY, sequence=TOKENS, width=width, heads=max(1, width // 16), layers=self.size.layers
        )

    def data(self) -> Tensor:
        return torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def run_file(self) -> RunFile:
        """The run of the case: the base tables, with its own keys in them."""
        (folder := self.folder / self.device).mkdir(exist_ok=True)
        given: dict[str, Any] = {"kind": "python", "build": GIVEN}
        ours = {"kind": "gpt", "layers": self.size.layers, "width": self.size.width, "vocabulary": VOCABULARY}
        ours |= {"heads": max(1, self.size.width // 16)}
        own = {"name": "launches", "steps": ENDLESS, "directory": str(folder), "device": self.device}
        optimizer = {"kind": "adamw", "lr": LR, "clip_norm": CLIP_NORM}
        tables: dict[str, Any] = {
            "run": own | {"processes": self.place.world_size},
            "model": given if self.case.startswith(OWN) or self.case == TRAIN else ours,
            "data": given,
            "batch": {"global_samples": self.size.samples, "sequence": TOKENS},
            "precision": {"kind": "bfloat16"},
            "optimizer": optimizer,
            "checkpoint": {"every_steps": 0},
        }
        for name, more in CASES[self.case][1].items():
            tables[name] = tables.get(name, {}) | more
        return msgspec.convert(tables, RunFile)

    def training(self, objects: UserObjects) -> Training:
        opened = open_run(self.run_file(), self.place, objects, store=self.store)
        self.stack.callback(opened.generation.gradients.close)
        return Training(opened, self.stack.enter_context(opened.feed()))


def plain(setting: Setting) -> Callable[[], float]:
    """The peer, without Shoal."""
    device = torch.device(setting.device)
    model, rows, number = setting.model().to(device), setting.data(), 0
    rows = rows.pin_memory() if device.type == "cuda" else rows
    optimizer, parameters, samples = adamw(model), list(model.parameters()), setting.size.samples

    def step() -> Any:
        nonlocal number
        batch = rows[number * samples % ROWS :][:samples].to(device, non_blocking=True)
        number += 1
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def own_loop(setting: Setting) -> Callable[[], Any]:
    """The loop of `shoal.start`."""
    model = setting.model()
    optimizer, data = adamw(model), TensorDataset(setting.data())
    training = setting.training(UserObjects(model=model, data=(AsInputs(data), None), optimizers=[optimizer]))
    job = training_job(training, setting.folder / setting.device, setting.stack)
    loop = setting.stack.enter_context(OwnLoop(training.run, replace(job, rate=lambda number: None), ExitStack()))
    return own_step(loop, model, optimizer)


def trained(setting: Setting) -> Callable[[], float]:
    """The body of the loop of `shoal train`."""
    rows = setting.data()
    data = TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    model = setting.model() if setting.case == TRAIN else None
    training = setting.training(UserObjects(model=model, data=data))
    step = partial(take_step, training_job(training, setting.folder / setting.device, setting.stack))
    return lambda: step().loss


SIDES = {PLAIN: plain, OWN: own_loop}


def measured(case: str, place: Place, stores: Mapping[str, Any], size: Size) -> Row:
    """A step of `case` on this rank: on the device, and on the CPU."""
    found = Row(case, place.world_size)
    losses: dict[str, list[float]] = {}
    for device in ("cuda", "cpu"):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
            side = SIDES.get(OWN if case.startswith(OWN) else case, trained)
            step = side(Setting(case, place, stores[device], device, size, folder, stack))
            before = [step() for _ in range(WARM_STEPS)]
            with Watch() as watch:
                after = [step() for _ in range(STEPS)]
            losses[device] = [float(loss) for loss in before + after]
        if device == "cuda":
            found.launched, found.copies = watch.launched / STEPS, watch.copies.total() / STEPS
            found.waits, found.races, found.launches = dict(watch.waits), dict(watch.races), dict(watch.launches)
            found.collectives, found.copied = dict(watch.collectives), dict(watch.copies)
    found.losses = losses["cuda"]
    found.off = max(abs(here - there) / abs(there) for here, there in zip(*losses.values(), strict=True))
    return found


def _rank(case: str, rank: int, ports: Mapping[str, int], size: Size, answers: Any) -> None:
    world = CASES[case][0]
    faulthandler.dump_traceback_later(RANK_S, exit=True)
    torch.set_num_threads(1)
    mesh.open_nccl = open_nccl
    place = Place(rank=rank, world_size=world, local_rank=0, local_world_size=1, node_rank=rank, launcher="shoal")
    try:
        limit = timedelta(seconds=60)
        stores = {device: TCPStore("127.0.0.1", port, is_master=False, timeout=limit) for device, port in ports.items()}
        answers.send(measured(case, place, stores, size))
    except BaseException:
        answers.send(Row(case, world, failed=traceback.format_exc()))


def on_ranks(case: str, size: Size) -> list[Row]:
    """`measured` on each of the case's ranks, processes that this one forks: it has computed nothing yet."""
    stores = {device: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for device in ("cuda", "cpu")}
    ports = {device: store.port for device, store in stores.items()}
    started, context = [], multiprocessing.get_context("fork")
    for rank in range(CASES[case][0]):
        here, there = context.Pipe()
        process = context.Process(target=_rank, args=(case, rank, ports, size, there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    rows = []
    for process, here in started:
        try:
            rows.append(here.recv())
        except EOFError:
            process.join()
            rows.append(Row(case, CASES[case][0], failed=f"ended with exit code {process.exitcode}"))
    return rows


def launches(
    cases: Annotated[str, typer.Option(help='Some of the rows, with ";" between them. Default: all.')] = "",
    layers: Annotated[int, typer.Option(help="Blocks of the model.", min=1)] = 12,
    width: Annotated[int, typer.Option(help="Of the model. What is launched does not depend on it.", min=16)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="All that was counted, of each rank.")] = False,
) -> None:
    """Launches, copies, waits and races of a step on a simulated GPU.

    Example: python -m benchmarks.launches --cases "plain;train;ZeRO-3"
    """
    if not simulated():  # in this process PyTorch has looked for its GPUs
        command = [sys.executable, "-m", "benchmarks.simulated_cuda", "benchmarks.launches", *sys.argv[1:]]
        os.execv(sys.executable, command)
    wanted = [name.strip() for name in cases.split(";")] if cases else list(CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        raise UsageError(f"--cases names {', '.join(unknown)}; there are: {'; '.join(CASES)}")
    rows: list[Row] = []
    if not as_json:
        print(f"{'a step of rank 0':26} ranks launches copies collectives waits    off")
    for case in wanted:
        own = on_ranks(case, Size(layers, width))
        rows += own
        if not as_json:
            print("\n".join(_lines(own[0])), flush=True)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


def _lines(row: Row) -> list[str]:
    if row.failed:
        return [f"{row.case:26} {row.failed.strip().splitlines()[-1]}"]
    waits, calls = sum(row.waits.values()) / STEPS, sum(row.collectives.values()) / STEPS
    first = (
        f"{row.case:26} {row.ranks:5} {row.launched:8.1f} {row.copies:6.1f} {calls:11.1f} {waits:5.1f} {row.off:6.0e}"
    )
    asked = [f"    waits {times / STEPS:.1f} times for {what}" for what, times in row.waits.items()]
    return [first, *asked, *(f"    race: {what}" for what in row.races)]


if __name__ == "__main__":
    run(launches)
