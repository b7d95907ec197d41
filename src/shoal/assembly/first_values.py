"""How a rank comes to the first values of its part of a model, without building the rest.

    Shoal's own models    no storage; each number is drawn by itself (`shoal.models.build`)                KeyedValues
    a user's function     no storage for what is large; one parameter is made after the other,             BuiltValues
                          by rank 0, which sends it to all, and every rank keeps its part
    a folder of           mapped into memory; every rank of a host reads its part alone                    BuiltValues
    transformers' files

The numbers are those of a model that is built whole, bit for bit. A model that is given as a module, or whose code
needs memory that is not there, is built whole on each rank.

Under ZeRO-3 a rank holds pieces of parameters, which are known when its gradients are built: `place` leaves these
parameters without storage, and `fill_owned` writes the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.assembly.objects import UserObjects, placed, users_model
from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError, UserCodeError
from shoal.models.build import draw_into, initialise_parts, place_parameters
from shoal.models.deferred_build import DeferredBuild, DeferredNumbers, ReadNumbers
from shoal.models.huggingface.config import TransformersConfig
from shoal.parallel.split import Split
from shoal.runfile.run_file import RunFile
from shoal.state import Owned, boxes_in
from shoal.topology.holding import Box, intersection, whole
from shoal.topology.layout import Layout

SENT_NUMEL = 1 << 20
"""Numbers of a parameter that are sent at a time."""

Wanted = Mapping[str, Sequence[tuple[Box, Tensor]]]
"""Boxes of unsplit parameters, by name, and the memory that each is written to."""


class FirstValues(Protocol):
    """Of a model whose parameters have no storage, or not all of them."""

    def place(self, split: Split, apart: Collection[str], device: torch.device, dtype: torch.dtype) -> None:
        """Storage for this rank's part, and its buffers; none for the parameters in `apart`, by their names here."""
        ...

    def fill(self, wanted: Wanted, split: Split, names: Sequence[str], mesh: Mesh) -> None:
        """Writes what is wanted of the parameters in `names`, the same on all ranks, which call it together."""
        ...

    def close(self) -> None:
        """All is written: what it was made of may go."""
        ...


@dataclass(frozen=True)
class KeyedValues:
    """Every number is a function of the seed, the parameter's name and its place."""

    seed: int

    def place(self, split: Split, apart: Collection[str], device: torch.device, dtype: torch.dtype) -> None:
        """See `FirstValues`."""
        initialise_parts(split.model, {}, seed=self.seed, device=device, dtype=dtype, apart=apart)

    @torch.no_grad()
    def fill(self, wanted: Wanted, split: Split, names: Sequence[str], mesh: Mesh) -> None:
        """See `FirstValues`. Nothing is sent."""
        for name in names:
            law = split.roles[name].init
            for box, memory in wanted.get(name, ()):
                assert law is not None, f"{name} has no law"
                draw_into(memory, law, name, seed=self.seed, global_shape=split.shapes[name], offsets=box.offset)

    def close(self) -> None:
        """See `FirstValues`."""


@dataclass(frozen=True)
class BuiltValues:
    """One parameter after the other, as the user's code or files have it. `local`: every rank has them alike, and
    nothing is sent.
    """

    numbers: DeferredNumbers | ReadNumbers
    local: bool

    def place(self, split: Split, apart: Collection[str], device: torch.device, dtype: torch.dtype) -> None:
        """See `FirstValues`. What has storage keeps it."""
        place_parameters(split.model, device, dtype, apart=apart, bare_alone=True)

    @torch.no_grad()
    def fill(self, wanted: Wanted, split: Split, names: Sequence[str], mesh: Mesh) -> None:
        """See `FirstValues`."""
        own = set(self.numbers.names)
        for name in (name for name in names if name in own):
            boxes = wanted.get(name, ())
            if not self.local:
                self._send(name, split.shapes[name], boxes, mesh)
            elif boxes:
                found = self.numbers.numbers(name)
                for box, memory in boxes:
                    memory.copy_(found[box.slices])

    def close(self) -> None:
        """See `FirstValues`."""
        self.numbers.close()

    def _send(self, name: str, shape: tuple[int, ...], boxes: Sequence[tuple[Box, Tensor]], mesh: Mesh) -> None:
        """Rank 0 makes it, and sends it some rows at a time."""
        found = self.numbers.numbers(name) if mesh.world.rank == 0 else None
        for rows in rows_of(shape):
            part = torch.empty(rows.shape, dtype=self.numbers.dtype(name), device=mesh.device)
            if found is not None:
                part.copy_(found[rows.slices])
            mesh.world.broadcast(part, root=0).wait()
            for box, memory in boxes:
                common = intersection(box, rows)
                if common is not None:
                    memory[common.relative_to(box.offset).slices].copy_(part[common.relative_to(rows.offset).slices])


def place_and_fill(values: FirstValues, split: Split, mesh: Mesh, dtype: torch.dtype, *, in_pieces: bool) -> None:
    """Storage and first values of this rank's part; `in_pieces`: of what ZeRO-3 divides neither, see `fill_owned`."""
    bare, divided = {name for name, p in split.model.named_parameters() if p.is_meta}, _divided(split)
    apart = {name for name in bare if in_pieces and split.holdings[name].name in divided}
    values.place(split, apart, mesh.device, dtype)
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for name, parameter in split.model.named_parameters():
        if name in bare and name not in apart:
            holding = split.holdings[name]
            found.setdefault(holding.name, []).extend(boxes_in(holding, parameter.data))
    names = [name for name in split.shapes if not in_pieces or name not in divided]
    values.fill(found, split, names, mesh)


def fill_owned(values: FirstValues, split: Split, owned: Iterable[Owned], mesh: Mesh) -> None:
    """The pieces of ZeRO-3, of parameters that `place` left apart."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for each in owned:
        found.setdefault(each.name, []).extend(each.boxes(each.parameter.data))
    divided = _divided(split)
    values.fill(found, split, [name for name in split.shapes if name in divided], mesh)


def _divided(split: Split) -> frozenset[str]:
    """The parameters of the unsplit model that ZeRO-3 divides: the dense ones that are trained."""
    return frozenset(n for n in split.shapes if n not in split.frozen and split.roles[n].kind != "table")


def splits_model(run_file: RunFile, layout: Layout) -> bool:
    """Does a rank hold less than the whole model between two uses?"""
    memory = run_file.memory
    pieces = layout.shard > 1 and memory.zero in (None, 3)
    return pieces or memory.offload.parameters != "device" or layout.tensor * layout.pipeline > 1


def built_by_parts(
    run_file: RunFile, given: UserObjects, *, device: torch.device, dtype: torch.dtype, one_host: bool
) -> tuple[nn.Module, BuiltValues | None]:
    """The user's model, its large parameters without storage where that is possible; None: it is whole.

    Raises `UserCodeError`: what the model's code raises, or why it cannot be built by parts.
    """
    if isinstance(given.model, nn.Module):
        raise UserCodeError(
            'memory.build = "parts": the script hands over a module, which is built already; hand over a function that '
            "builds it"
        )
    config = run_file.model
    if isinstance(config, TransformersConfig) and config.folder is not None and given.model is None:
        model = users_model(run_file, given)
        numbers: DeferredNumbers | ReadNumbers | None = ReadNumbers(
            {name: parameter.data for name, parameter in model.named_parameters()}, dtype
        )
        place_parameters(model, torch.device("meta"), dtype)
    else:
        build = DeferredBuild()
        model = users_model(run_file, given, build.building())
        numbers = build.finished(model, dtype)
    placed(model, device, dtype)
    return model, None if numbers is None else BuiltValues(numbers, numbers.local and one_host)


def why_whole(error: Exception) -> str:
    """A sentence for a model that could not be built by parts."""
    said = str(error) if isinstance(error, ShoalError) else f"its code raises {type(error).__name__}: {error}"
    return (
        f"every rank builds the whole model before it keeps its part, because {' '.join(said.split())[:300]} "
        '(memory.build = "whole" says that it may)'
    )


def rows_of(shape: Sequence[int]) -> Iterator[Box]:
    """A tensor in boxes of about `SENT_NUMEL` numbers, cut along its first dimension."""
    if not shape:
        yield whole(())
        return
    each = max(1, SENT_NUMEL // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], each):
        yield Box((start, *(0,) * (len(shape) - 1)), (min(each, shape[0] - start), *shape[1:]))
