"""Layouts drawn at random, each choice for itself, as no covering array is. Every fourth has a foreign model.

A combination that the run file's rules refuse is drawn again.
"""

from __future__ import annotations

import random
from typing import Any

from tests.models.huggingface.architectures import TABLES
from tests.verification import zoo
from tests.verification.covering import MOST_RANKS, Choices, legal

FOREIGN = (*TABLES, "U-Net", "graph", "LSTM", "patches")
"""Eight architectures of transformers, and four modules that declare nothing."""
SPLITTABLE = ("Llama", "Qwen3")
"""Those of them that stages and tensor ranks may divide in any layout drawn here."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "replicate": (1, 2),
    "shard": (1, 2),
    "zero": (1, 2, 3),
    "accumulation": (False, True),
    "optimizer": ("adamw", "sgd"),
    "exact": (False, True),
}
SPLITS: dict[str, tuple[Any, ...]] = {"tensor": (1, 2), "pipeline": (1, 2), "recompute": ("none", "operators", "full")}


def drawn(number: int, *, seed: int = 1) -> list[Choices]:
    """`number` combinations; those of foreign models have the key "foreign"."""
    draw = random.Random(seed)
    return [
        foreign(draw, FOREIGN[index // 4 % len(FOREIGN)])
        if index % 4 == 3
        else legal(draw, MOST_RANKS[index % len(MOST_RANKS)])
        for index in range(number)
    ]


def foreign(draw: random.Random, name: str) -> Choices:
    """A layout of two or four ranks of the model `name`."""
    factors = FACTORS | (SPLITS if name in SPLITTABLE else {})
    while True:
        choices = {"foreign": name} | {key: draw.choice(values) for key, values in factors.items()}
        if choices["shard"] == 1:
            del choices["zero"]
        ranks = choices["replicate"] * choices["shard"] * choices.get("tensor", 1) * choices.get("pipeline", 1)
        if ranks in (2, 4):
            return choices


def tables_of_foreign(choices: Choices) -> dict[str, dict[str, Any]]:
    """The tables of the run file."""
    name = choices["foreign"]
    axes = ("replicate", "shard", "tensor", "pipeline")
    memory = {key: choices[key] for key in ("zero", "recompute") if key in choices}
    return {
        **(TABLES[name] if name in TABLES else zoo.tables(name)),
        "layout": {axis: choices[axis] for axis in axes if axis in choices},
        "batch": {"global_samples": 8} | ({"micro_samples": 1} if choices["accumulation"] else {}),
        "optimizer": {"kind": "adamw", "lr": 2e-3} if choices["optimizer"] == "adamw" else {"kind": "sgd", "lr": 0.1},
        **({"memory": memory} if memory else {}),
    }
