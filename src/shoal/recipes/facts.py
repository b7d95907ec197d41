"""What is recorded about a run once, beside its measurements."""

from __future__ import annotations

import platform
import socket
from math import prod
from typing import Any

import torch

from shoal.recipes.setting import Setting


def run_facts(setting: Setting, *, generation: int) -> dict[str, Any]:
    """Data, model, layout and machine, as JSON-able values under the names that the report reads."""
    layout, data = setting.mesh.layout, dict(setting.data.facts)
    return {
        "name": setting.run_file.run.name,
        "state": "",
        "steps": setting.run_file.run.steps,
        "generation": generation,
        "data": data,
        "parameters": sum(prod(shape) for shape in setting.parts.split.shapes.values()),
        "world": layout.world_size,
        "layout": layout.to_dict(),
        "device": setting.device.type,
        "wire": setting.mesh.world.wire,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **_text_facts(setting, data),
    }


def _text_facts(setting: Setting, data: dict[str, Any]) -> dict[str, Any]:
    """The corpus and the loss's unit, where the data is text read as bytes."""
    if "hash" not in data:
        return {}
    corpus = {
        "name": type(setting.run_file.data).__struct_config__.tag,
        "hash": data["hash"],
        "bytes": data["train/bytes"] + data["held_out/bytes"],
    }
    baseline = data.get("baseline/bigram_nats_per_byte")
    facts: dict[str, Any] = {"corpus": corpus, "loss_unit": "nats/byte"}
    return facts | ({"baseline": {"name": "bigram", "loss": baseline}} if baseline is not None else {})
