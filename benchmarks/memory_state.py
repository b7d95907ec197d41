"""Bytes of model state that a rank holds under each stage of ZeRO after a step, beside `fully_shard` and closed forms.

Every storage counts once, right after the optimizer's step. With p parameters on n ranks, float32 and Adam
(arXiv:1910.02054, figure 1, without a second copy of the weights):

    stage          parameters   gradients   optimizer   transient: the most besides them during a step
    1              4 p          4 p         8 p / n     none: gradients lie in buffers that stay
    2              4 p          4 p / n     8 p / n     the gradient buckets in flight, and the one that is filled
    3              4 p / n      4 p / n     8 p / n     gathered parameters: what is in no block, a block, the next one;
                                                        gradients: the units in flight, and the one that is filled

`fully_shard` keeps what stage 3 keeps.
"""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.zero_scripts import ShardedScript, ZeroScript
from shoal.bench.ddp_script import new_gpt
from shoal.bench.report import Result, check
from shoal.comm.collective import Collective, Handle
from shoal.comm.mesh import Mesh
from shoal.cost.footprint import FLOAT32
from shoal.cost.plan import Zero
from shoal.gradients.bucket import IN_FLIGHT
from shoal.gradients.config import GradientsConfig
from shoal.memory.tracker import ModelState, model_state, storage_bytes
from shoal.models.build import parameter_count
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.topology.holding import Ranks

MODEL = GPTConfig(layers=16, width=512, heads=8, feed_forward="gelu", feed_forward_width=2048)
KINDS = ("parameters", "gradients", "optimizer")
SIDES: dict[str, Zero] = {"zero_1": 1, "zero_2": 2, "zero_3": 3, "fully_shard": 3}
SIZES = {"samples": 1, "sequence": 32}
OFF_THE_FORM = 0.10


def by_stage(mesh: Mesh, corpus: Path) -> Result:
    """A row for each stage and one for `fully_shard`, each the largest of all ranks; and a check for each."""
    model = new_gpt(MODEL)
    rows, checks = [], []
    for name, zero in SIDES.items():
        shoal = name != "fully_shard"
        state, transient_bytes = (_zero if shoal else _fully_shard)(copy.deepcopy(model), mesh, corpus, zero)
        most = _largest(mesh.world, state, transient_bytes)
        row = _row(name, zero, most, model, ranks=mesh.layout.world_size)
        off = abs(row["over_the_form"] - 1)
        checks.append(check(f"model state of a rank, {name}, off its closed form", off, OFF_THE_FORM, at_most=True))
        if shoal:
            form_bytes = row["form_transient_bytes"] = _transient_form(zero, model)
            transient = f"transient buffers of a rank, {name}, bytes against their closed form"
            checks.append(check(transient, most["transient_bytes"], form_bytes, at_most=True))
        rows.append(row)
    return {"rows": rows, "checks": checks}


class WatchedCollective:
    """A `Collective` that reports the whole buffers of its reduce-scatters and all-gathers to `whole`."""

    def __init__(self, inner: Collective, whole: _WholeBuffers) -> None:
        self._inner, self._whole = inner, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Handle:
        """As `Collective.reduce_scatter`."""
        self._whole.add(input)
        return self._inner.reduce_scatter(output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        """As `Collective.all_gather`."""
        self._whole.add(output)
        return self._inner.all_gather(output, input)


class _WholeBuffers:
    """Bytes of the buffers that were reported and still exist, and the most at once."""

    def __init__(self) -> None:
        self._buffers: dict[int, weakref.ref[Tensor]] = {}
        self.peak_bytes = 0

    def add(self, buffer: Tensor) -> None:
        self._buffers[id(buffer)] = weakref.ref(buffer)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    @property
    def bytes(self) -> int:
        buffers = (reference() for reference in self._buffers.values())
        return storage_bytes(buffer for buffer in buffers if buffer is not None)


def _zero(model: GPT, mesh: Mesh, corpus: Path, zero: Zero) -> tuple[ModelState, int]:
    """State after the second step, and the most bytes of whole buffers during that step."""
    whole = _WholeBuffers()

    def groups(ranks: Ranks) -> Collective:
        return cast(Collective, WatchedCollective(mesh.ranks(ranks), whole))

    script = ZeroScript(model, corpus, mesh, groups, zero=zero, **SIZES)
    found = _record_state(model, script.optimizer)
    script.step()
    whole.peak_bytes = 0
    script.step()
    return found[-1], whole.peak_bytes - whole.bytes


def _fully_shard(model: GPT, mesh: Mesh, corpus: Path, zero: Zero) -> tuple[ModelState, None]:
    """The same for PyTorch's, whose buffers during a step cannot be seen."""
    script = ShardedScript(model, corpus, rank=mesh.rank, world_size=mesh.layout.world_size, **SIZES)
    found = _record_state(model, script.optimizer)
    for _ in range(2):
        script.step()
    return found[-1], None


def _record_state(model: nn.Module, optimizer: Optimizer) -> list[ModelState]:
    """A list that gets the model state after each step of the optimizer."""
    found: list[ModelState] = []

    def count(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        found.append(model_state(model, [stepped]))

    optimizer.register_step_post_hook(count)
    return found


def _largest(world: Collective, state: ModelState, transient_bytes: int | None) -> dict[str, int]:
    """The most bytes that any rank holds, by kind."""
    figures = {f"{kind}_bytes": getattr(state, f"{kind}_bytes") for kind in KINDS}
    if transient_bytes is not None:
        figures["transient_bytes"] = transient_bytes
    most = torch.tensor(list(figures.values()), dtype=torch.int64)
    world.all_reduce(most, "max").wait()
    return dict(zip(figures, map(int, most), strict=True))


def _row(name: str, zero: Zero, most: dict[str, int], model: GPT, *, ranks: int) -> dict[str, Any]:
    numbers = parameter_count(model)
    form = {f"form_{k}_bytes": int(numbers * x) for k, x in zip(KINDS, FLOAT32.sharded(zero, ranks), strict=True)}
    total_bytes, form_bytes = sum(most[f"{kind}_bytes"] for kind in KINDS), sum(form.values())
    return {
        "state": name,
        "ranks": ranks,
        "parameters": numbers,
        "total_bytes": total_bytes,
        "form_total_bytes": form_bytes,
        "over_the_form": round(total_bytes / form_bytes, 4),
        **most,
        **form,
    }


def _transient_form(zero: Zero, model: GPT) -> int:
    """The most bytes of whole buffers during a step."""
    if zero == 1:
        return 0
    if zero == 2:
        return (IN_FLIGHT + 1) * GradientsConfig().bucket_size
    block_bytes = storage_bytes(model.blocks[0].parameters())
    rest_bytes = storage_bytes(model.parameters()) - len(model.blocks) * block_bytes
    return rest_bytes + 2 * block_bytes + (IN_FLIGHT + 1) * block_bytes
