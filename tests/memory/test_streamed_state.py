"""State of an optimizer on the host and on disk: the same update to the last bit, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from shoal.config.check import implementation_of
from shoal.errors import EnvironmentFault, UserCodeError
from shoal.memory.spill_file import SpillFile, Traffic, rounded
from shoal.memory.streamed_state import LEAST_BYTES, StreamedState
from shoal.memory.tiers import DiskTier, HostTier, Lane, Pool
from shoal.optim.config import SGD, AdamW, AdamW8bit, OptimizerConfig
from shoal.optim.fused import FusedOptimizer
from shoal.optim.kinds import Lion
from shoal.optim.slots import make_slots, named_slots, pack_slots

CPU = torch.device("cpu")
SHAPES = [(96, 64), (64, 80), (200, 100), (8,), (1 << 13,), (64, 64)]
PART_BYTES = 64 << 10
KINDS: dict[str, OptimizerConfig] = {
    "adamw": AdamW(weight_decay=0.1), "adamw_8bit": AdamW8bit(), "sgd": SGD(momentum=0.9), "lion": Lion(),
}  # fmt: skip


def parameters() -> list[Parameter]:
    draws = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=draws)) for shape in SHAPES]


def optimizer_of(kind: str, own: list[Parameter]) -> FusedOptimizer:
    made = implementation_of(KINDS[kind])(KINDS[kind], [{"params": own, "weight_decay": 0.1}], 1e-2)
    assert isinstance(made, FusedOptimizer)
    return made


def home(tier: str, folder: Path, traffic: Traffic, *, pool_bytes: int = 1 << 20) -> StreamedState:
    made = (
        HostTier(CPU, traffic) if tier == "host" else DiskTier(SpillFile(folder), CPU, traffic, pool_bytes=pool_bytes)
    )
    return StreamedState(made, CPU, traffic, part_bytes=PART_BYTES)


def gradients(own: list[Parameter], steps: int) -> Iterator[None]:
    """Before each step; in the second one some parameters have none."""
    draws = torch.Generator().manual_seed(4)
    for step in range(steps):
        for number, parameter in enumerate(own):
            drawn = torch.randn(parameter.shape, generator=draws)
            parameter.grad = None if step == 1 and number in (0, 3) else drawn
        yield


def slots_of(optimizer: FusedOptimizer, own: list[Parameter]) -> dict[str, torch.Tensor]:
    return named_slots(optimizer, [(str(number), each) for number, each in enumerate(own)])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_update_is_the_same_to_the_bit(kind: str, tier: str, tmp_path: Path) -> None:
    plain, moved = parameters(), parameters()
    first, second = optimizer_of(kind, plain), optimizer_of(kind, moved)
    second.home = home(tier, tmp_path, Traffic(), pool_bytes=PART_BYTES)
    for _ in zip(gradients(plain, 4), gradients(moved, 4), strict=True):
        first.step()
        second.step()
    assert all(map(torch.equal, plain, moved))
    slots, others = slots_of(first, plain), slots_of(second, moved)
    assert slots.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in slots.items())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_state_that_was_let_go_begins_anew(tier: str, tmp_path: Path) -> None:
    """As that of layers which are frozen, and trained again later."""
    plain, moved = parameters(), parameters()
    first, second = optimizer_of("adamw", plain), optimizer_of("adamw", moved)
    second.home = home(tier, tmp_path, Traffic(), pool_bytes=PART_BYTES)
    for step, _ in enumerate(zip(gradients(plain, 5), gradients(moved, 5), strict=True)):
        for optimizer, own in ((first, plain), (second, moved)):
            if step == 2:
                own[1].grad = None
                optimizer.state.pop(own[1])
            optimizer.step()
    assert all(map(torch.equal, plain, moved))
    slots, others = slots_of(first, plain), slots_of(second, moved)
    assert all(torch.equal(value, others[name]) for name, value in slots.items())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_moved_bytes_are_those_of_the_closed_form(tier: str, tmp_path: Path) -> None:
    """Two moments of float32 for each number of a large parameter, in each direction; nothing comes in the first."""
    own, traffic = parameters(), Traffic()
    optimizer = optimizer_of("adamw", own)
    optimizer.home = home(tier, tmp_path, traffic)
    large = [p for p in own if p.nbytes >= LEAST_BYTES]
    state = sum(2 * p.nbytes for p in large)
    for step, _ in enumerate(gradients(own, 1)):
        optimizer.step()
        found = traffic.take_figures()
        assert found["memory/to_device_bytes"] == (state if step else 0)
        assert found["memory/to_host_bytes"] == state
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert traffic.take_figures()["memory/to_device_bytes"] == state
    if tier == "disk":
        slots_of(optimizer, own)  # reads all of it, behind what is still to be written
        found = traffic.take_figures()
        assert found["memory/disk_read_bytes"] >= sum(rounded(2 * p.nbytes) for p in large)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_saved_state_goes_on_elsewhere(tier: str, tmp_path: Path) -> None:
    """From the device to the tier by a checkpoint's slots, whatever was read ahead before."""
    plain, moved = parameters(), parameters()
    first, second = optimizer_of("adamw", plain), optimizer_of("adamw", moved)
    second.home = home(tier, tmp_path, Traffic())
    for _ in zip(gradients(plain, 1), gradients(moved, 1), strict=True):
        second.step()
    for _ in gradients(plain, 2):
        first.step()
    with torch.no_grad():
        for mine, given in zip(moved, plain, strict=True):
            mine.copy_(given)
    saved = slots_of(first, plain)
    named = [(str(number), each) for number, each in enumerate(moved)]
    places = make_slots(second, named, {name: x.dtype for name, x in saved.items()}, slots=AdamW().all_slots)
    for name, place in places.items():
        place.copy_(saved[name])
    pack_slots(second)
    for _ in zip(gradients(plain, 1), gradients(moved, 1), strict=True):
        first.step()
        second.step()
    assert all(map(torch.equal, plain, moved))


def anonymous_bytes() -> int:
    """Of this process's memory, what is neither pages of files nor shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_a_checkpoint_of_state_on_disk_takes_no_memory(tmp_path: Path) -> None:
    """64 MiB of moments, read out and in again a parameter at a time: pages of files hold them."""
    own = [Parameter(torch.zeros(1 << 18)) for _ in range(32)]
    optimizer = optimizer_of("adamw", own)
    optimizer.home = home("disk", tmp_path, Traffic(), pool_bytes=1 << 22)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    named = [(str(number), each) for number, each in enumerate(own)]
    before = anonymous_bytes()
    saved = slots_of(optimizer, own)
    assert sum(value.nbytes for value in saved.values()) > 64 << 20
    places = make_slots(optimizer, named, {name: x.dtype for name, x in saved.items()}, slots=AdamW().all_slots)
    for name in saved:
        places[name].copy_(saved[name])
    del places, saved
    pack_slots(optimizer)
    assert anonymous_bytes() - before < 24 << 20
    optimizer.step()
    assert float(optimizer.state[own[3]]["step"]) == 2


def test_a_disk_that_fails_ends_the_update_with_its_sentence(tmp_path: Path) -> None:
    """Whichever write it is, with a pool that holds one part: nothing waits for a buffer that never comes."""

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    own, traffic = parameters(), Traffic()
    optimizer = optimizer_of("adamw", own)
    tier = DiskTier(SpillFile(tmp_path, write=failing), CPU, traffic, pool_bytes=PART_BYTES)
    optimizer.home = StreamedState(tier, CPU, traffic, part_bytes=PART_BYTES)

    def train() -> None:
        for _ in gradients(own, 3):
            optimizer.step()

    with pytest.raises(EnvironmentFault, match="Input/output error"):
        train()
    optimizer.home.close()


@pytest.mark.parametrize("pool_bytes", [PART_BYTES, 1 << 20])
def test_state_on_disk_is_not_waited_for_when_the_run_is_over(pool_bytes: int, tmp_path: Path) -> None:
    """Reading it and a further step say so, whether some was read ahead or all."""
    own = parameters()
    optimizer = optimizer_of("adamw", own)
    optimizer.home = home("disk", tmp_path, Traffic(), pool_bytes=pool_bytes)
    for _ in gradients(own, 3):
        optimizer.step()
    assert slots_of(optimizer, own)
    optimizer.home.close()
    with pytest.raises(UserCodeError, match="the run is over"):
        slots_of(optimizer, own)
    with pytest.raises(UserCodeError, match="the run is over"):
        optimizer.step()


def test_kinds_that_say_that_they_update_apart_do() -> None:
    """And no other kind is taken by mistake."""
    for kind, config in KINDS.items():
        assert config.updates_apart
        assert optimizer_of(kind, parameters()).takes_home


def test_a_pool_lends_what_it_has() -> None:
    """One buffer may be larger than the pool; then none is left until it comes back."""
    pool = Pool(1 << 14, CPU)
    large = pool.take(1 << 16)
    assert large is not None
    assert pool.take(1) is None
    pool.give(large)
    assert all(pool.take(1 << 13) is not None for _ in range(2))
    assert pool.take(1) is None
    assert pool.take(1, beyond=True) is not None


class PlayedStream:
    """A stream of a device that is not here; `said` is what it was asked."""

    def __init__(self, said: list[str], name: str) -> None:
        self._said, self._name = said, name

    def record_event(self) -> str:
        self._said.append(f"{self._name} records")
        return self._name

    def wait_event(self, event: str) -> None:
        self._said.append(f"{self._name} waits for {event}")

    def synchronize(self) -> None:
        self._said.append(f"{self._name} is done")

    def __enter__(self) -> None:
        self._said.append(f"on {self._name}")

    def __exit__(self, *_: object) -> None:
        self._said.append(f"off {self._name}")


def test_moves_take_the_streams_of_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On XPU as on CUDA: a move waits for what the step has launched, and is over when its stream has done it."""
    said: list[str] = []
    monkeypatch.setattr(torch, "Stream", lambda device: PlayedStream(said, f"lane on {device}"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: PlayedStream(said, f"step on {device}"))
    lane = Lane(torch.device("xpu", 0), "moves")
    assert lane.submit(lambda: said.append("moved")).result() is None
    lane.close()
    assert said == [
        "step on xpu:0 records", "on lane on xpu:0", "lane on xpu:0 waits for step on xpu:0", "moved",
        "off lane on xpu:0", "lane on xpu:0 is done",
    ]  # fmt: skip
