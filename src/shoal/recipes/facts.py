"""What is recorded about a run once, beside its measurements."""

from __future__ import annotations

import platform
import socket
from typing import Any

import torch

from shoal.recipes.setting import Setting


def run_facts(setting: Setting, *, generation: int) -> dict[str, Any]:
    """Data, model, layout and machine, as JSON-able values."""
    layout = setting.mesh.layout
    return {
        "name": setting.run_file.run.name,
        "steps": setting.run_file.run.steps,
        "generation": generation,
        "data": dict(setting.data.facts),
        "model/parameters": sum(p.numel() for p in setting.model.parameters()),
        "world": layout.world_size,
        "layout": layout.to_dict(),
        "device": setting.device.type,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
