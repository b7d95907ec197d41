"""What a run file may say, and how a sentence writes it: the things that rules between tables are about.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from shoal.runfile.run_file import RunFile, synchronises_norms


@dataclass(frozen=True)
class Fact:
    """`name`: as the page calls it. `of`: the key and value that were found; True stands for the name itself."""

    name: str
    of: Callable[[RunFile], str | bool | None]

    def __call__(self, run_file: RunFile) -> str | None:
        """The key and value as the sentence has them; None where the run file does not say this."""
        found = self.of(run_file)
        return self.name if found is True else found or None

    def where(self, condition: Callable[[RunFile], Any], name: str = "") -> Fact:
        """The same, under one condition more; `name`: what the page calls the two."""
        return Fact(name or self.name, lambda run_file: self(run_file) if condition(run_file) else None)


def written(value: object) -> str:
    """A value as a run file has it."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def value_of(path: str, run_file: RunFile) -> Any:
    """What the run file has at `path`; None, too, where it has no such table."""
    found: Any = run_file
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def key(path: str, holds: Callable[[Any], Any] = bool, name: str = "") -> Fact:
    """`path` has a value that `holds`, and is written with it; `name`: what the page writes behind the path."""

    def found(run_file: RunFile) -> str | None:
        value = value_of(path, run_file)
        return f"{path} = {written(value)}" if holds(value) else None

    return Fact(f"{path} {name}".rstrip(), found)


def named(path: str) -> Fact:
    """`path` is true, or has a value: the key alone is said."""
    return Fact(path, lambda run_file: value_of(path, run_file) not in (None, False))


def equal(path: str, *values: object) -> Fact:
    """`path` has one of these values."""
    return key(path, lambda found: found in values, f"= {' or '.join(map(written, values))}")


def other_than(path: str, value: object) -> Fact:
    """`path` is set, and not to this value."""
    return key(path, lambda found: found not in (None, value), f"other than {written(value)}")


def above(path: str, bound: int = 0) -> Fact:
    """`path` is larger than `bound`."""
    return key(path, lambda found: found is not None and found > bound, f"> {bound}")


def stated(path: str) -> Fact:
    """`path` has a value."""
    return key(path, lambda found: found is not None)


def kind(table: str, holds: Callable[[Any], Any], name: str) -> Fact:
    """`table` is of a kind that `holds`."""
    of = attrgetter(table)

    def found(run_file: RunFile) -> str | None:
        chosen = of(run_file)
        return f'{table}.kind = "{chosen.variant}"' if chosen is not None and holds(chosen) else None

    return Fact(f"{table}.kind {name}", found)


def kinds(table: str, *names: str) -> Fact:
    """`table` is of one of these kinds."""
    return kind(table, lambda of: of.variant in names, f"= {' or '.join(map(written, names))}")


def kind_other_than(table: str, *names: str) -> Fact:
    """`table` is of none of these kinds."""
    return kind(table, lambda of: of.variant not in names, f"other than {' or '.join(map(written, names))}")


def given(table: str) -> Fact:
    """The run file has this table."""
    of = attrgetter(table)
    return Fact(f"[{table}]", lambda run_file: of(run_file) is not None)


ALL_AXES = "pipeline shard context tensor expert"
"""The axes inside a replica: without them it is one rank."""


def axis(name: str) -> Fact:
    """Ranks divide a replica along this axis."""
    return above(f"layout.{name}", 1)


def _said_of_zero_3(run_file: RunFile) -> str | None:
    split = run_file.layout.shard > 1 and run_file.memory.zero not in (1, 2)
    return f"layout.shard = {run_file.layout.shard} and ZeRO-3" if split else None


CANONICAL = Fact('sync.order = "canonical"', lambda run_file: run_file.sync.in_canonical_order)
NOT_LOCKSTEP = kind("sync", lambda sync: sync.replicas_are != "lockstep", 'other than "allreduce"')
OWN_STEPS = kind("sync", lambda sync: sync.replicas_are == "own_steps", "under which replicas step by themselves")
WORKERS = kind("sync", lambda sync: sync.replicas_are == "workers", '= "server" or "hogwild"')
ELASTIC = given("elastic")
BY_SPEED = equal("batch.division", "by_speed")
MICRO_SAMPLES = stated("batch.micro_samples")

PRIORITY = equal("gradients.schedule", "priority")
BUCKET_SEARCH = equal("gradients.bucket", "auto")
CODEC = kind_other_than("codec", "none")
PIPEDREAM = equal("pipeline.schedule", "PipeDream")
ZERO_3 = Fact("layout.shard > 1 and ZeRO-3", _said_of_zero_3)

CUDA = equal("run.device", "cuda")
COMPILED = Fact("run.compile", lambda run_file: run_file.run.compile_said if run_file.run.compile else None)
COMPILED_WHOLE = COMPILED.where(lambda run_file: run_file.run.compile != "blocks", 'run.compile = true or "model"')
FLOAT16 = kinds("precision", "float16")
FLOAT8 = kinds("precision", "float8")

SENDS_MOMENTUM = kind("optimizer", lambda optimizer: optimizer.sends_momentum, "that sends its momentum")
NOT_SGD = kind_other_than("optimizer", "sgd")
MOMENTUM = above("optimizer.momentum").where(lambda run_file: run_file.optimizer.variant == "sgd")
CLIP_NORM = stated("optimizer.clip_norm")
FOLLOWS_UPDATES = Fact(
    "optimizer.average or optimizer.lookahead",
    lambda run_file: run_file.optimizer.average is not None or run_file.optimizer.lookahead is not None,
)

MOE = kinds("model", "moe")
SYNCHRONISED = Fact('model.batch_norm = "synchronised"', lambda run_file: synchronises_norms(run_file.model))
NOISE = above("observe.noise_every_steps")
RECOMPUTED = other_than("memory.recompute", "none")
CHUNKED = above("memory.loss_chunks", 1)
PARAMETERS_AWAY = other_than("memory.offload.parameters", "device")
