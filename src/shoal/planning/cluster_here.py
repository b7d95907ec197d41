"""The cluster file of the machine that this process stands on: what was measured, and what had to be assumed.

Facts come in as values, so that the file of any machine can be tried on another. What nobody has measured is taken from
the library of known devices, and said in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tomli_w

from shoal.errors import EnvironmentFault
from shoal.topology.calibration import Calibration
from shoal.topology.cluster import GB, GIB, TERA
from shoal.topology.cluster_file import cluster_from
from shoal.topology.devices import DEVICES, MACHINES, known_device

Tables = dict[str, dict[str, Any]]
NEAREST_CPU, NEAREST_PCIE = "cpu-2", "pcie-l40s-8"


@dataclass(frozen=True)
class Facts:
    """What the system tells: cores, bytes of memory, the names of GPUs as the driver writes them."""

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Described:
    """The file's text, and a sentence for everything in it that was not measured here."""

    text: str
    assumed: tuple[str, ...]


def describe(facts: Facts, calibration: Calibration | None) -> Described:
    """Raises `EnvironmentFault` for GPUs that the library does not know."""
    tables, assumed = _of_gpus(facts) if facts.gpus else _of_cores(facts, calibration)
    cluster_from(tables, file="the written cluster file")
    notes = "".join(f"# assumed: {sentence}\n" for sentence in assumed)
    return Described(notes + tomli_w.dumps(tables), tuple(assumed))


def _of_cores(facts: Facts, calibration: Calibration | None) -> tuple[Tables, list[str]]:
    """One device a core, joined by memory."""
    known, assumed = MACHINES[NEAREST_CPU], []
    device: dict[str, Any] = {"name": facts.name[:128], "memory_gib": round(facts.memory_bytes / GIB / facts.cores, 3)}
    device |= {"units": 1, "tile": known.device.tile}
    device |= _rates(calibration, facts.cores, assumed)
    up, start_us = _memory_link(calibration, facts.cores, assumed)
    assumed.append("the network: 10 Gb/s Ethernet; it matters with more than one node alone")
    tables: Tables = {
        "cluster": {
            "name": facts.name[:128],
            "nodes": 1,
            "machine": NEAREST_CPU,
            "devices_per_node": facts.cores,
            "start_us": start_us,
        },
        "device": device,
        "scale_up": up,
    }
    return tables, assumed


def _rates(calibration: Calibration | None, cores: int, assumed: list[str]) -> dict[str, Any]:
    """Of one core while all are at work, where it was measured."""
    known = MACHINES[NEAREST_CPU].device
    result: dict[str, Any] = {}
    peaks = {} if calibration is None else _peaks(calibration, 1)
    if calibration is None or not peaks:
        assumed.append("rates of matrix products: a server core of 2.6 GHz; 'shoal bench products' measures them")
        result |= {"peak_tflops": known.peak_tflops, "matmul_efficiency": known.matmul_efficiency}
    else:
        together = _peaks(calibration, max((p.ranks for p in calibration.products if p.ranks <= cores), default=1))
        shares = [together[dtype] / peak for dtype, peak in peaks.items() if dtype in together]
        result["peak_tflops"] = {dtype: round(rate / TERA, 6) for dtype, rate in peaks.items()}
        result["matmul_efficiency"] = round(min(1.0, max(0.05, min(shares, default=1.0))), 4)
    rate = calibration.memory_bytes_s if calibration is not None else None
    if rate is None:
        assumed.append(f"the rate of memory: {known.memory_gb_s:g} GB/s a core; 'shoal bench products' measures it")
    result["memory_gb_s"] = round(rate / GB, 3) if rate is not None else known.memory_gb_s
    measured = calibration is not None and not assumed
    result["source"] = f"measured by shoal bench products, torch {calibration.torch}" if measured else known.source  # type: ignore[union-attr]
    return result


def _peaks(calibration: Calibration, ranks: int) -> dict[str, float]:
    """The best rate of each dtype with `ranks` at work at once."""
    best: dict[str, float] = {}
    for product in calibration.products:
        if product.ranks == ranks:
            best[product.dtype] = max(best.get(product.dtype, 0.0), product.flops_s)
    return best


def _memory_link(calibration: Calibration | None, cores: int, assumed: list[str]) -> tuple[dict[str, Any], float]:
    """Rate and latency from the fit of a ring's form to all-reduces: 2 (n-1) a + 2 (n-1)/n S/w."""
    measured = () if calibration is None else calibration.collectives
    fits = [f for f in measured if (f.operation, f.hosts, f.dtype) == ("all_reduce", 1, "float32")]
    own = [f for f in fits if f.backend == "shm"] or fits
    if not own:
        known = MACHINES[NEAREST_CPU]
        assumed.append("links between cores: 5 GB/s at 50 %, 30 us; 'shoal bench comm' measures them")
        link = known.scale_up
        return {
            "kind": link.kind,
            "gb_s": link.gb_s,
            "efficiency": link.efficiency,
            "latency_us": link.latency_us,
        }, 30.0
    fit = min(own, key=lambda f: abs(f.ranks - max(2, cores)))
    n = fit.ranks
    rate = 2 * (n - 1) / n / max(fit.beta_s, 1e-12)
    latency_us = 1e6 * fit.alpha_s / (2 * (n - 1))
    return {"kind": "memory", "gb_s": round(rate / GB, 3), "efficiency": 1.0, "latency_us": round(latency_us, 3)}, 0.0


def _of_gpus(facts: Facts) -> tuple[Tables, list[str]]:
    device = _known_device(facts.gpus)
    machine = next((m for m in MACHINES.values() if m.device.name == device), None) or MACHINES[NEAREST_PCIE]
    assumed = [
        f"rates of {device}: its data sheet and published products, nothing measured here",
        f"links: those of {machine.name}",
    ]
    head = {"name": facts.name[:128], "nodes": 1, "machine": machine.name, "device": device}
    return {"cluster": {**head, "devices_per_node": len(facts.gpus)}}, assumed


def _known_device(names: Iterable[str]) -> str:
    """The library's name of the first; all GPUs of a node are the same."""
    driver = next(iter(names))
    found = known_device(driver)
    if found is None:
        raise EnvironmentFault(
            f"the GPU {driver!r} is none that is known ({', '.join(DEVICES)}); write its rates into [device] of a "
            "cluster file by hand"
        )
    return found.name
