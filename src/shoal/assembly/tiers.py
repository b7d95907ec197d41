"""What of a rank's memory lies elsewhere than on its device, and what the device may hold, as `[memory]` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from shoal.assembly.splitting import Divided, blocks_in, with_inner
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.gradients.fully_sharded import FullyShardedGradients
from shoal.gradients.gradients import Gradients
from shoal.memory.collector import Collector
from shoal.memory.offloaded_activations import LEAST_BYTES, SavedTensors
from shoal.memory.recompute import Recomputed, blocks_of
from shoal.memory.simulated_device import ACTIVATIONS, SimulatedDevice
from shoal.memory.spill_file import DiskTraffic, SpillFile, Traffic
from shoal.memory.streamed_state import LEAST_BYTES as LEAST_STATE_BYTES
from shoal.memory.streamed_state import DelayedUpdates, HostPieces, HostUpdates, StreamedState
from shoal.memory.tiers import DiskTier, HostTier
from shoal.memory.tracker import AllocatorFigures
from shoal.optim.config import kinds_whose
from shoal.optim.fused import FusedOptimizer
from shoal.runfile.layout_rules import microbatch_sizes
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory
from shoal.sparsity.block_cache import CachedBlocks, KeptSamples
from shoal.units import memory_bytes

SPILL_FOLDER = "spill"


class Tiers:
    """Of one rank in one generation. `device` is the ledger of a simulated device, None elsewhere."""

    def __init__(self, run_file: RunFile, device: torch.device) -> None:
        self._run_file, memory = run_file, run_file.memory
        self._config, self._recompute, self._torch_device = memory.offload, memory.recompute, device
        self._block_cache = None if run_file.freeze is None else run_file.freeze.cache
        self._blocks: CachedBlocks | None = None
        self._folder = Path(memory.offload.folder or run_directory(run_file) / SPILL_FOLDER)
        self._traffic, self._allocator = Traffic(), AllocatorFigures(device)
        if memory.budget is not None:
            raise ConfigError(
                f'memory.budget = "{memory.budget}" is met where ranks are started: train by shoal train, or write the '
                "keys that its run.toml has"
            )
        self._state: StreamedState | HostUpdates | DelayedUpdates | None = None
        if memory.offload.parameters != "device" and device.type != "cpu":
            raise ConfigError(
                f'memory.offload.parameters = "{memory.offload.parameters}" on a {device.type} device: it runs on '
                "CPUs, with memory.simulate_device; split them over ranks by layout.shard and memory.zero = 3"
            )
        self._pieces: SpillFile | None = None
        self.home = None if memory.offload.parameters == "device" else self._home_of_pieces()
        self._activations: SavedTensors | None = None
        self._collector = None if memory.collect_every_steps == 0 else Collector(memory.collect_every_steps)
        self.device = None
        if memory.simulated_bytes is not None:
            if device.type != "cpu":
                raise ConfigError(
                    f'memory.simulate_device = "{memory.simulate_device}" on a {device.type} device, which has memory '
                    'of its own: set run.device = "cpu", or leave it out'
                )
            self.device = SimulatedDevice(memory.simulated_bytes)

    @property
    def moves(self) -> bool:
        """Whether anything lies elsewhere."""
        return self.home is not None or self._state is not None or self._activations is not None

    def check_own_loop(self) -> None:
        """Raises `ConfigError` for what a script's own loop would leave uncounted, or undo."""
        if self._config.delay_update_after is not None:
            raise ConfigError(
                f"memory.offload.delay_update_after = {self._config.delay_update_after} in a loop of the script's own: "
                "what it writes into weights would be lost with the next delayed update; leave the key out, or train "
                "by shoal train"
            )
        if self.device is not None:
            raise ConfigError(
                "memory.simulate_device counts what the run's own steps compute, and this loop is the script's: leave "
                "it out, or train by shoal train"
            )

    def keep_state(self, optimizers: Iterable[torch.optim.Optimizer], *, steps: Callable[[], int]) -> None:
        """Gives the state of `optimizers`, which have not stepped yet, its home. Raises `ConfigError` for one whose
        parameters are not updated one by one. `steps`: how many the run has taken.
        """
        if self._config.optimizer == "device":
            return
        for optimizer in optimizers:
            if not isinstance(optimizer, FusedOptimizer) or not optimizer.takes_home:
                raise ConfigError(
                    f'memory.offload.optimizer = "{self._config.optimizer}" with {type(optimizer).__name__}, which '
                    "needs the state of all parameters at once or, as a script's own, updates them itself: leave the "
                    "key out, or train by shoal train with optimizer.kind = "
                    f"{kinds_whose(lambda table: table.updates_apart)}"
                )
            optimizer.home = self._state = self._home_of_state(steps)

    def keep_activations(self, parts: Divided, mesh: Mesh) -> None:
        """Gives what the blocks of this rank's part of the model save its home, and what frozen ones give theirs.

        Raises `ConfigError` without blocks.
        """
        config, rank = self._config, mesh.layout.index("pipeline", mesh.rank)
        if self._block_cache is not None:
            model = parts.split.model
            sharing = mesh.axis("replicate", "shard", lane="cache")
            kept = KeptSamples(memory_bytes(self._block_cache), sharing, self._torch_device)
            self._blocks = CachedBlocks(model, blocks_in(model, parts.stages, rank), kept)
        if config.activations == "device" and config.activation_bits is None:
            return
        blocks = blocks_in(parts.split.model, parts.stages, rank)
        if not blocks:
            raise ConfigError(
                f"memory.offload moves what blocks save, and {type(parts.split.model).__name__} has none: hold its "
                "layers in an nn.ModuleList and call them as modules, or leave activations and activation_bits out"
            )
        self._activations = SavedTensors(
            self._torch_device, self._traffic, to_host=config.activations == "host", bits=config.activation_bits
        )
        # A block that is computed again has hooks of its own inside of it.
        self._activations.use_in(with_inner(blocks) if self._recompute == "none" else blocks)

    def counting(self) -> AbstractContextManager[None]:
        """Around what computes on the device."""
        return nullcontext() if self.device is None else self.device.counting()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around what builds what lives between steps."""
        counted = self.device is not None and self.home is None
        with self.device.building() if counted and self.device is not None else nullcontext():
            yield

    def hold(self, model: nn.Module, gradients: Gradients, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Enters the model into the ledger, and tells it what is what."""
        if self.device is None:
            return
        own = [*model.parameters(), *model.buffers()]
        if isinstance(gradients, FullyShardedGradients):
            own += gradients.gathered
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        stepped = [p for group in groups for p in group["params"]] if self.home is None else []

        def holders() -> Mapping[str, Iterable[Tensor]]:
            state = [x for o in optimizers for slots in o.state.values() for x in slots.values()]
            return {
                PARAMETERS: [*own, *stepped],
                GRADIENTS: [p.grad for p in (*own, *stepped) if p.grad is not None],
                OPTIMIZER_STATE: [x for x in state if isinstance(x, Tensor)],
            }

        self.device.holders = holders
        self.device.advice = _advice(self._run_file, model)
        self.device.hold(tensor for tensor in (*own, *stepped) if tensor.device.type == "cpu")

    def take_figures(self) -> dict[str, float]:
        """What the step just taken moved and did not compute, what its device held at most, what allocators have."""
        found = self._allocator.take() | (self._traffic.take_figures() if self.moves else {})
        if self.device is not None:
            found["memory/device_peak_bytes"] = self.device.take_peak()
        if self._collector is not None:
            found |= self._collector.after_step()
        if self._blocks is not None:
            found |= self._blocks.take_figures()
        return found

    def take_lines(self) -> list[str]:
        """What is to be said of the step just taken: tensors that pile up, a cache that is full."""
        telling = (self._collector, self._blocks)
        return [line for each in telling if each is not None for line in each.take_lines()]

    def unused(self, model: nn.Module) -> list[str]:
        """Sentences on keys of `[memory]` that had no effect on the steps so far, at this size."""
        found = []
        if self._activations is not None and not self._activations.used:
            found.append(
                f"memory.offload moved nothing that blocks save: each tensor of it is below {LEAST_BYTES >> 10} KiB, "
                "and stays; a larger batch shows it"
            )
        if isinstance(self._state, StreamedState) and not self._state.used:
            found.append(
                f"memory.offload moved no state of the optimizer: each tensor of it is below {LEAST_STATE_BYTES >> 10} "
                "KiB, and stays; a larger model shows it"
            )
        forwards = (module.__dict__.get("forward") for module in model.modules())
        budgets = [each.budget for each in forwards if isinstance(each, Recomputed) and each.budget is not None]
        if budgets and all(budget.keeps_all for budget in budgets):
            found.append(
                "memory.recompute_budget is enough for all that blocks save, so that nothing was computed again after "
                "the first step; a smaller one shows it"
            )
        return found

    def close(self) -> None:
        """Ends threads, and gives the spill file's space and Python's collector back."""
        for each in (self._state, self._activations, self._collector, self._pieces):
            if each is not None:
                each.close()

    def _home_of_pieces(self) -> HostPieces:
        if self._config.parameters == "disk":
            self._pieces = SpillFile(self._folder)
        return HostPieces(self._traffic, self._pieces)

    def _home_of_state(self, steps: Callable[[], int]) -> StreamedState | HostUpdates | DelayedUpdates:
        config, on_disk, after = self._config, self._config.optimizer == "disk", self._config.delay_update_after
        on_device = self.home is None and after is None
        traffic = self._traffic if on_device else DiskTraffic(self._traffic)
        tier: HostTier | DiskTier = HostTier(self._torch_device, traffic)
        if on_disk:
            tier = DiskTier(SpillFile(self._folder), self._torch_device, traffic, pool_bytes=config.pool_bytes)
        there = self._torch_device if after is None else torch.device("cpu")
        streamed = StreamedState(tier, there, traffic, part_bytes=config.part_bytes)
        if on_device:
            return streamed
        on_host = nullcontext if self.device is None else self.device.on_host
        disk = streamed if on_disk else None
        if after is None:
            return HostUpdates(on_host, disk, part_bytes=config.part_bytes)
        beside = HostUpdates(nullcontext, disk, part_bytes=config.part_bytes)  # nothing of a thread is counted
        return DelayedUpdates(beside, self._torch_device, self._traffic, after=after, steps=steps, on_host=on_host)


PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
LARGE_PARTS, SMALL_PARTS = 6, 32
"""Parts of the parameters below which moving the state, three parts at a time, frees too little; and how many to have
then.
"""


def _advice(run_file: RunFile, model: nn.Module) -> dict[str, str]:
    """For a holder the keys that would free some of it: such as the run can be with, and is not yet."""
    found: dict[str, str] = {}
    for holder, keys, changed in _changes(run_file, model):
        if holder not in found and refusal(changed) is None:
            found[holder] = keys
    return found


def _changes(run_file: RunFile, model: nn.Module) -> Iterator[tuple[str, str, RunFile]]:
    """(holder, keys, run file with them), of each holder what costs least first."""
    replaced, memory, offload = msgspec.structs.replace, run_file.memory, run_file.memory.offload

    def moved(**homes: str) -> RunFile:
        return replaced(run_file, memory=replaced(memory, offload=replaced(offload, **homes)))

    if memory.recompute != "full" and blocks_of(model):
        again = replaced(run_file, memory=replaced(memory, recompute="full", recompute_budget=None))
        yield ACTIVATIONS, 'memory.recompute = "full"', again
    in_blocks = with_inner([model]) != [model]
    if offload.activations == "device" and in_blocks:
        yield ACTIVATIONS, 'memory.offload.activations = "host"', moved(activations="host")
    if (half := _samples_at_once(run_file) // 2) > 0:
        smaller = replaced(run_file, batch=replaced(run_file.batch, micro_samples=half))
        yield ACTIVATIONS, f"batch.micro_samples = {half}", smaller
    if offload.optimizer == "device":
        size = sum(parameter.nbytes for parameter in model.parameters())
        part = f"{max(1, size // SMALL_PARTS >> 10)} KiB"
        small = f' and memory.offload.part = "{part}"' if size < LARGE_PARTS * offload.part_bytes else ""
        yield OPTIMIZER_STATE, f'memory.offload.optimizer = "host"{small}', moved(optimizer="host")
    if offload.parameters == "device" and in_blocks:
        keys = 'memory.offload = { parameters = "host", optimizer = "host" }'
        for holder in (PARAMETERS, GRADIENTS):
            yield holder, keys, moved(parameters="host", optimizer="host")


def _samples_at_once(run_file: RunFile) -> int:
    layout = run_file.layout.layout(run_file.stated_processes or 1)
    return microbatch_sizes(run_file, shares=layout.replicate * layout.shard).samples
