"""What is recorded about a run once, beside its measurements."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from shoal.assembly.run import Run
from shoal.observe.provenance import provenance


def run_facts(run: Run, *, made_of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Data, model, layout and machine, as JSON-able values under the names that the report reads. `made_of`: the
    provenance, where it is known already.
    """
    layout, data = run.mesh.layout, dict(run.workload.data.facts)
    return {
        "name": run.run_file.run.name,
        "state": "",
        "steps": run.run_file.run.steps,
        "generation": run.mesh.generation,
        "data": data,
        "parameters": sum(prod(shape) for shape in run.generation.parts.split.shapes.values()),
        "world": layout.world_size,
        "layout": layout.to_dict(),
        "device": run.device.type,
        "wire": run.mesh.world.wire,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "provenance": provenance(run.process.environ) if made_of is None else dict(made_of),
        **_text_facts(run, data),
    }


def _text_facts(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """The corpus and the loss's unit, where the data is text read as bytes."""
    if "hash" not in data:
        return {}
    corpus = {
        "name": run.run_file.data.variant,
        "hash": data["hash"],
        "bytes": data["train/bytes"] + data["held_out/bytes"],
    }
    baseline = data.get("baseline/bigram_nats_per_byte")
    facts: dict[str, Any] = {"corpus": corpus, "loss_unit": "nats/byte"}
    return facts | ({"baseline": {"name": "bigram", "loss": baseline}} if baseline is not None else {})
