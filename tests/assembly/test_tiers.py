"""Runs whose state lies elsewhere: the same bits, less on the device, and checkpoints that go anywhere."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import signal
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.assembly import tiers
from shoal.assembly.run import open_run
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.save import Saver
from shoal.comm.board import Board
from shoal.engine.recovery import resume
from shoal.launcher.environment import Place
from shoal.models.build import build, parameter_count
from shoal.models.config import GPTConfig
from shoal.planning.mixture_prices import Prices
from shoal.planning.mixtures import AS_IT_IS
from shoal.runfile.rules import refusal
from shoal.state import parts_of
from tests.assembly.journey import Leg, travel
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of
from tests.waiting import HANG_S

MODEL = GPT | {"layers": 6, "width": 96, "feed_forward_width": 192}
ROOMY = {"simulate_device": "1 GiB"}
PART = {"part": "16 KiB", "pool": "64 KiB"}
HOMES: dict[str, dict[str, Any]] = {
    "disk": {"offload": {"optimizer": "disk", **PART}},
    "host": {"offload": {"optimizer": "host", **PART}},
    "all": {"offload": {"optimizer": "disk", "activations": "host", **PART}, "recompute": "full"},
    "parameters": {"zero": 3, "offload": {"parameters": "host", "optimizer": "host"}},
    "mapped": {"zero": 3, "offload": {"parameters": "disk", "optimizer": "disk", **PART}},
    "activations": {"offload": {"activations": "host"}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "ZeRO-3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "pipeline": {"layout": {"pipeline": 2}, "batch": {"micro_samples": 2}},
}
CASES = [(list(LAYOUTS)[k], list(HOMES)[(k + j) % 6]) for k in range(4) for j in range(6)]
"""So that every seventh is another layout and, but for the last, another home."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    corpus(folder)
    return folder


def tables(layout: str, memory: dict[str, Any]) -> dict[str, Any]:
    own = LAYOUTS[layout]
    batch = {"sequence": 64, **own.get("batch", {})}
    return {**own, "model": MODEL, "batch": batch, "memory": {**own.get("memory", {}), **memory}}


def trained(place: TestPlace, given: dict[str, Any], folder: str, steps: int) -> tuple[list[float], dict[str, float]]:
    """The losses of some steps, and the last one's figures of memory."""
    run_file = run_file_of(Path(folder), **given)
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    losses, figures = [], {}
    with closing(run.feed()) as feed:
        for _ in range(steps):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            losses.append(run.step(run.state.progress.step, fed.microbatches, lr=2e-3).loss)
            figures = run.tiers.take_figures()
    run.end()
    return losses, figures


@pytest.mark.slow
@pytest.mark.matrix(every=7)
@pytest.mark.parametrize(("layout", "home"), CASES)
def test_losses_are_the_same_to_the_bit_and_less_is_on_the_device(ranks, folder: Path, layout: str, home: str) -> None:
    world = 1 if layout == "one process" else 2
    plain = ranks(world, trained, tables(layout, ROOMY), str(folder), 3)
    moved = ranks(world, trained, tables(layout, ROOMY | HOMES[home]), str(folder), 3)
    for (losses, at_once), (same, in_turn) in zip(plain, moved, strict=True):
        assert losses == same
        assert in_turn["memory/device_peak_bytes"] <= at_once["memory/device_peak_bytes"]
        assert in_turn["memory/to_device_bytes"] > 0


THAWING = {"freeze": {"later": [{"layers": ["embedding", "blocks.0"], "at": 2, "until": 4}]}}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "home"), [("one process", "disk"), ("ZeRO-1", "host"), ("ZeRO-3", "disk")])
def test_state_waits_in_its_tier_while_its_layer_is_frozen(ranks, folder: Path, layout: str, home: str) -> None:
    """A layer that thaws goes on from the moments that it had, to the bit."""
    world = 1 if layout == "one process" else 2
    plain, moved = (
        ranks(world, trained, tables(layout, ROOMY | memory) | THAWING, str(folder), 6) for memory in ({}, HOMES[home])
    )
    unfrozen = ranks(world, trained, tables(layout, ROOMY), str(folder), 6)
    assert [losses for losses, _ in plain] == [losses for losses, _ in moved]
    assert plain[0][0] != unfrozen[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_state_of_four_times_the_device_trains_to_the_same_bits(ranks, folder: Path, world: int, home: str) -> None:
    """16 bytes for each parameter, divided over the ranks; peak, losses and moved bytes in every step."""
    layout = {"layout": {"shard": world}} if world > 1 else {}
    sizes = {"layers": 24, "width": 96, "feed_forward_width": 256, "vocabulary": 61}
    deep = {**layout, "model": GPT | sizes, "batch": {"sequence": 16 * world}}
    parameters = model_parameters(deep, folder)
    size = f"{16 * parameters // world // 4 // 1024} KiB"
    elsewhere = {"parameters": "host", "optimizer": home, "activations": "host", **PART}
    plain = ranks(world, trained, deep, str(folder), 3)
    small = deep | {"memory": {"simulate_device": size, "recompute": "full", "offload": elsewhere}}
    for (losses, _), (same, found) in zip(plain, ranks(world, trained, small, str(folder), 3), strict=True):
        assert losses == same
        assert 4 * found["memory/device_peak_bytes"] <= 16 * parameters / world
        blocks = parameters - OUTSIDE * sizes["width"]
        inputs = 23 * 8 * 16 * sizes["width"] * 4
        assert found["memory/to_device_bytes"] - inputs == pytest.approx(4 * (parameters + blocks) / world, rel=0.02)
        assert found["memory/to_host_bytes"] == pytest.approx(4 * parameters / world + inputs * 24 / 23, rel=0.02)
        if home == "disk":
            assert found["memory/disk_read_bytes"] == pytest.approx(8 * parameters / world, rel=0.15)


STILL, MOVED = 0.05, 0.1
"""Parts of a peak by which it may differ from the predicted one. Where state or activations move, it is chance which
moves are over at the fullest moment.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "homes"),
    [
        ("one process", ()),
        ("one process", ("full",)),
        ("one process", ("host",)),
        ("one process", ("activations",)),
        ("one process", ("full", "activations", "parameters")),
        ("ZeRO-1", ()),
        ("ZeRO-1", ("host",)),
        ("ZeRO-3", ("activations", "parameters")),
    ],
)
def test_the_peak_of_a_step_is_the_predicted_one(ranks, folder: Path, layout: str, homes: tuple[str, ...]) -> None:
    """Whether a backward's first moment, its last or the update holds the most; what ranks share counts once."""
    world = 1 if layout == "one process" else 2
    offload = {key: value for home in homes for key, value in HOMES.get(home, {}).get("offload", {}).items()}
    again = {"recompute": "full"} if "full" in homes else {}
    given = tables(layout, ROOMY | again | {"offload": {**offload, **PART}})
    (_, found), *_ = ranks(world, trained, given, str(folder), 3)
    price = Prices(run_file_of(folder, **given, run={"processes": world})).of(AS_IT_IS)
    assert price is not None
    assert price.size_bytes == pytest.approx(found["memory/device_peak_bytes"], rel=MOVED if offload else STILL)


def model_parameters(tables: dict[str, Any], folder: Path) -> int:
    """Those of its GPT."""
    model = run_file_of(folder, **tables).model
    assert isinstance(model, GPTConfig)
    with torch.device("meta"):
        return parameter_count(build(model))


OUTSIDE = 2 * 61 + 1
"""Rows of the width outside of blocks: embedding, head and the last norm."""


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_and_fits_with_the_key_that_is_named(ranks, folder: Path) -> None:
    """The device is as large as the peak of the run with the key; without it the refusal names that key."""
    offloaded = HOMES["activations"]
    needed = ranks(1, trained, tables("one process", ROOMY | offloaded | {"recompute": "full"}), str(folder), 2)[0][1]
    size = f"{int(needed['memory/device_peak_bytes'] / 1024) + 1} KiB"
    small = {"simulate_device": size}
    ranks(1, trained, tables("one process", small | offloaded | {"recompute": "full"}), str(folder), 2)
    with pytest.raises(AssertionError, match=r"OutOfMemory: .*short by .*memory\.recompute = \"full\""):
        ranks(1, trained, tables("one process", small), str(folder), 2)


@pytest.mark.slow
def test_checkpoints_go_from_tier_to_tier_and_world_to_world(ranks, folder: Path) -> None:
    """Device, disk and host of one process continue each other to the bit; two ranks under ZeRO-3 go on as well."""
    straight: Leg = ranks(1, travel, tables("one process", {}), str(folder), "straight", 10)[0]
    legs = [
        ranks(1, travel, tables("one process", HOMES.get(home, {})), str(folder), "journey", 2)[0]
        for home in ("disk", "parameters", "host", "mapped", "device")
    ]
    assert [loss for leg in legs for loss in leg.losses] == straight.losses
    for name, value in straight.left.items():
        assert value.equal(legs[-1].left[name]), name
    further: Leg = ranks(2, travel, tables("ZeRO-3", HOMES["parameters"]), str(folder), "journey", 1)[0]
    for name, value in straight.left.items():
        assert value.equal(further.came[name]), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": {"kind": "muon"}}, 'optimizer.kind = "muon"'),
        ({"optimizer": {"kind": "adamw", "average": {"kind": "ema"}}}, "optimizer.average"),
        ({"gradients": {"schedule": "priority"}, "layout": {"replicate": 2}}, "priority"),
        ({"sync": {"kind": "server"}, "layout": {"replicate": 2}}, 'sync.kind = "server"'),
    ],
)
def test_what_needs_the_state_elsewhere_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    sentence = refusal(run_file_of(tmp_path, **given, memory=HOMES["host"]))
    assert sentence is not None
    assert sentence.startswith("memory.offload.optimizer")
    assert said in sentence


def test_a_compiled_model_has_no_ledger(tmp_path: Path) -> None:
    for memory in (ROOMY, HOMES["activations"]):
        sentence = refusal(run_file_of(tmp_path, run={"compile": True}, memory=memory))
        assert sentence is not None
        assert "run.compile" in sentence


def go_on(
    place: TestPlace, given: dict[str, Any], folder: str, name: str, until: int, fault: str | float | None = None
) -> tuple[int, str]:
    """Goes on from the newest checkpoint to step `until`, and saves after each: its step, and a hash of the state.

    `fault` is an error number's name, raised by the third write of the spill file, or seconds until SIGKILL, from the
    first step on.
    """
    directory = Path(folder) / name
    run_file = run_file_of(Path(folder), **given)
    own = msgspec.structs.replace(run_file.run, processes=1, directory=str(directory))
    writes = itertools.count(1)

    def failing(*args: Any, code: int = getattr(errno, str(fault), 0)) -> int:
        if next(writes) == 3:
            raise OSError(code, os.strerror(code))
        return os.pwritev(*args)

    made, here = tiers.SpillFile, Place(0, 1, 0, 1, 0, "shoal")
    try:
        tiers.SpillFile = partial(made, write=failing) if isinstance(fault, str) else made  # type: ignore[misc]
        run = open_run(msgspec.structs.replace(run_file, run=own), here, store=place.store)
    finally:
        tiers.SpillFile = made  # type: ignore[misc]
    resume(run.state, directory, announce=run.process.announce, warn=print)
    progress, exchange = run.state.progress, Board(place.store, timeout_s=HANG_S).clone()
    config = CheckpointConfig(keep=2)
    saver = Saver(directory, rank=0, world_size=1, exchange=exchange, config=config, timeout_s=HANG_S, split=True)
    if isinstance(fault, float):
        threading.Timer(fault, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        with closing(run.feed()) as feed:
            while progress.step < until:
                fed = feed.next()
                progress.advance(fed.interval)
                run.step(progress.step, fed.microbatches, lr=2e-3)
                saver.save(progress.step, run.state.tensors(), run.state.to_json(), layout=run.mesh.layout.to_dict())
                assert all(report.committed for report in saver.wait(HANG_S))
        digest = hashlib.blake2b()
        for part, targets in sorted(parts_of(run.state.tensors()).items()):
            for target in targets:
                digest.update(part.encode() + target.tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    finally:
        saver.close()
        run.end()
    return progress.step, digest.hexdigest()


@pytest.mark.slow
@pytest.mark.matrix(rows=(0,))
@pytest.mark.parametrize(("error", "said"), [("ENOSPC", "No space left on device"), ("EIO", "Input/output error")])
def test_a_fault_of_the_spill_disk_costs_what_followed_the_newest_checkpoint(
    ranks, folder: Path, error: str, said: str
) -> None:
    """One sentence; the checkpoint before is whole, and the run goes on from it to the same bits."""
    given = tables("one process", HOMES["disk"])
    straight = ranks(1, go_on, given, str(folder), f"straight-{error}", 4)[0]
    ranks(1, go_on, given, str(folder), error, 2)
    with pytest.raises(AssertionError, match=said):
        ranks(1, go_on, given, str(folder), error, 4, error)
    assert ranks(1, go_on, given, str(folder), error, 4)[0] == straight
    assert not list((folder / error).glob("spill/*"))


@pytest.mark.stress
def test_thirty_kills_during_spills_lose_nothing_and_leave_nothing(ranks, folder: Path) -> None:
    """At random moments of steps and saves, one after the other: what comes out is a run without kills."""
    given, draws = tables("one process", HOMES["disk"]), random.Random(0)
    for _ in range(30):
        ((worked, _),) = ranks.outcomes(1, go_on, given, str(folder), "killed", 10_000, draws.uniform(0.0, 0.6))
        assert not worked
        assert not list((folder / "killed").glob("spill/*"))
    step, _ = ranks(1, go_on, given, str(folder), "killed", 1)[0]
    found = ranks(1, go_on, given, str(folder), "killed", step + 2)[0]
    assert found == ranks(1, go_on, given, str(folder), "straight", step + 2)[0]
    assert step > 0
