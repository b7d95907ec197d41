"""`shoal split`: what of a user's module can be split, found by tracing, and written into its run file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from shoal.assembly.objects import UserObjects, data_of, model_of
from shoal.data.batches import read_batch
from shoal.engine.compute import on_device
from shoal.errors import ConfigError, ShoalError
from shoal.files import read_file
from shoal.models.huggingface.config import ForeignKeys
from shoal.models.roles import DeclaresParts, DeclaresRoles
from shoal.observe.facts import replace_file
from shoal.parallel.pipeline.stages import balanced_cut, estimated_costs
from shoal.parallel.traced.chain import traced_chain
from shoal.parallel.traced.pairs import Proposal, propose_roles
from shoal.parallel.traced.relay import Relay, chain_of_calls, integer_attributes
from shoal.runfile.run_file import RunFile

_FOR_OTHERS = 'shoal split is for model.kind = "python", and for models of transformers that declare no plan'

SAMPLES = 2
"""Of the batch that the module is traced on."""

RUN_FILE_BYTES = 1 << 20
"""Larger ones are not read."""


@dataclass(frozen=True)
class SplitProposal:
    """For `tensor` the roles, for `pipeline` the names of the parts and the first ones of each stage but the first.

    `said` is the key `parts` of the run file; `uncut` says why there are no parts, if so. `names` are those of all
    parameters, `integers` those of all integer attributes of modules.
    """

    model: str
    names: tuple[str, ...]
    integers: tuple[str, ...]
    roles: Proposal
    said: str | list[list[str]]
    parts: tuple[str, ...]
    cut: tuple[str, ...]
    uncut: str = ""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.model}, recorded on a batch of {SAMPLES} samples"
        yield "\nlayout.tensor"
        for name, role in patterns_of(self.roles.roles, self.names).items():
            yield f"  {role:<8} {name}"
        values = {count.full_name: count.value for count in self.roles.counts.values()}
        for name, value in patterns_of(values, self.integers).items():
            yield f"  share    {name} = {value}, divided over the ranks"
        for name, reason in self.roles.whole.items():
            yield f"  whole    {name or self.model}: {reason}"
        yield "\nlayout.pipeline"
        if self.uncut:
            yield f"  {self.uncut}"
        for name in self.parts:
            yield f"  {'stage    ' if name in self.cut else '         '}{name}"

    def keys(self) -> dict[str, Any]:
        """The keys of `[model]` that say so."""
        found: dict[str, Any] = {}
        if self.roles.roles:
            found["roles"] = patterns_of(self.roles.roles, self.names)
        if self.roles.counts:
            counts = dict.fromkeys(self.roles.counts)
            found["counts"] = list(patterns_of(counts, self.integers))
        if self.parts:
            found["parts"] = self.said
        return found

    def to_json(self) -> dict[str, Any]:
        """The same as one object."""
        return {"model": self.model, "keys": self.keys(), "whole": self.roles.whole, "parts": list(self.parts),
                "cut": list(self.cut), "uncut": self.uncut}  # fmt: skip


def patterns_of(said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """`said` of some of the `names`, with one pattern (`fnmatch`) for names that differ by their numbers alone, such as
    those of a layer in each block: where it fits no others, and the same is said of all.
    """
    names, found = list(names), dict[str, Any]()
    for name, value in said.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        fitting = [other for other in names if fnmatchcase(other, pattern)]
        alike = len(fitting) > 1 and all(other in said and said[other] == value for other in fitting)
        found[pattern if alike else name] = value
    return found


def propose(run_file: RunFile, *, stages: int = 2) -> SplitProposal:
    """Traces the user's module of `run_file` on its data, in this process, and cuts it for so many `stages`.

    Raises `ConfigError` for a model that declares all that itself, `UserCodeError` where it cannot be built.
    """
    config = run_file.model
    if not isinstance(config, ForeignKeys):
        raise ConfigError(f'model.kind = "{config.variant}" declares how it is split; {_FOR_OTHERS}')
    bare = msgspec.structs.replace(config, roles={}, counts=[], parts="declared")
    run_file = msgspec.structs.replace(run_file, model=bare)
    model = model_of(run_file, UserObjects(), device=torch.device("cpu"), dtype=torch.float32)
    kind, names = type(model).__name__, tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    integers = tuple(integer_attributes(model))
    if isinstance(model, DeclaresRoles) and isinstance(model, DeclaresParts):
        raise ConfigError(f"{kind} declares its roles and its parts itself: there is nothing to propose")
    source = data_of(run_file, UserObjects()).train
    first = np.arange(min(SAMPLES, len(source)))
    raw = read_batch(source, first, first, denominator=run_file.batch.denominator).batch
    inputs = on_device(raw, torch.device("cpu"), torch.float32).inputs
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    named = inputs if isinstance(inputs, dict) else {}
    roles = Proposal() if isinstance(model, DeclaresRoles) else propose_roles(model, args, named)
    if isinstance(model, DeclaresParts):
        return SplitProposal(kind, names, integers, roles, "declared", (), (), f"{kind} declares its parts")
    try:
        said = _parts_of(model, args, named)
        parts = Relay(model, said).parts if isinstance(said, list) else traced_chain(model).parts
        cut = balanced_cut(estimated_costs(model, parts), min(stages, len(parts)))
    except ShoalError as reason:
        return SplitProposal(kind, names, integers, roles, "declared", (), (), str(reason))
    called = tuple(part.name for part in parts)
    return SplitProposal(kind, names, integers, roles, said, called, tuple(called[stage[0]] for stage in cut[1:]))


def _parts_of(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> str | list[list[str]]:
    """What `model.parts` is to say: "traced" where `torch.fx` can trace the forward, else the modules of each part."""
    try:
        traced_chain(model)
    except ShoalError:
        return chain_of_calls(model, args, named)
    return "traced"


def write_keys(path: Path, proposal: SplitProposal) -> None:
    """Puts the proposal's keys into the table `[model]` of the run file, in place of those that it has.

    Everything else stays as it is written. Raises `ConfigError` where there is no such table.
    """
    raw = read_file(path, limit_bytes=RUN_FILE_BYTES, error=ConfigError, repair="name a run file")
    lines = raw.decode().splitlines()
    heads = [index for index, line in enumerate(lines) if line.split("#")[0].strip() == "[model]"]
    if not heads:
        raise ConfigError(f"{path} has no line [model], below which the keys would stand; write them there by hand")
    first = heads[0] + 1
    end = next((i for i in range(first, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    kept = [line for line in lines[first:end] if line.split("=")[0].strip() not in ("roles", "counts", "parts")]
    while kept and not kept[-1].strip():
        kept.pop()
    new = [f"{key} = {_toml(value)}" for key, value in proposal.keys().items()]
    changed = "\n".join([*lines[:first], *kept, *new, *([""] if end < len(lines) else []), *lines[end:]]) + "\n"
    tomllib.loads(changed)  # what was written over several lines is not ours to change
    replace_file(path, changed.encode())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {json.dumps(entry)}" for key, entry in value.items()) + " }"
    return json.dumps(value)
