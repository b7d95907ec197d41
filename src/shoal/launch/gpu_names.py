"""What the driver calls this host's GPUs, read without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.launch.devices import gpus

DRIVER = Path("/proc/driver/nvidia/gpus")
NAMELESS = "a GPU that the driver does not name"


def gpu_names(environ: Mapping[str, str], driver: Path = DRIVER) -> tuple[str, ...]:
    """A name for each GPU that this process may use, as "NVIDIA A100-SXM4-80GB"; `NAMELESS` where none is shown."""
    lines = [line for path in sorted(driver.glob("*/information")) for line in path.read_text().splitlines()]
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    count = gpus(environ)
    return (*names[:count], *[NAMELESS] * (count - len(names)))
