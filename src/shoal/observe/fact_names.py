"""What the facts of a run are called on the page, and how their values are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shoal import units
from shoal.escape import escape_controls
from shoal.observe.facts import text_of

MAX_FACT_CHARACTERS = 500
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps planned",
        "generation": "Generation (starts so far, less one)",
        "parameters": "Trained parameters",
        "world": "Ranks",
        "layout/replicate": "Layout: replicas",
        "layout/shard": "Layout: sharded over",
        "layout/pipeline": "Layout: pipeline stages",
        "layout/context": "Layout: sequence split over",
        "layout/tensor": "Layout: tensors split over",
        "layout/expert": "Layout: experts split over",
        "device": "Device",
        "membership": "Replicas lost and joined",
        "wire": "Communication",
        "host": "Host of rank 0",
        "torch": "PyTorch",
        "python": "Python",
        "threads": "Threads of a rank",
        "data/vocabulary": "Vocabulary",
        "data/train/files": "Training files",
        "data/held_out/files": "Held-out files",
        "data/train/samples": "Training samples",
        "data/held_out/samples": "Held-out samples",
        "data/train/bytes": "Training text",
        "data/held_out/bytes": "Held-out text",
        "corpus/name": "Corpus",
        "corpus/hash": "Hash of the corpus",
        "corpus/bytes": "Size of the corpus",
        "time/step_predicted": "Predicted step",
        "memory/peak_bytes_predicted": "Predicted peak memory",
        "prediction": "Prediction from",
        "evaluation/loss": "Held-out loss",
        "evaluation/accuracy": "Held-out accuracy",
    }
)
_TOLD_ELSEWHERE = frozenset({"data/hash", "data/baseline/bigram_nats_per_byte"})


def name_and_value(key: str, value: Any) -> tuple[str, str]:
    """A fact in words; a key that is not known is written with spaces, "own/tuning_runs" as "Own: tuning runs".

    The value is "" for a fact that needs no row: it stands elsewhere on the page, or is an axis that splits nothing.
    """
    words = ": ".join(key.split("/")).replace("_", " ")
    return _NAMES.get(key, words[:1].upper() + words[1:]), _written(key, value)


def _written(key: str, value: Any) -> str:
    if value is None or key in _TOLD_ELSEWHERE or (key.startswith("layout/") and value == 1):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and abs(value) < 10**18:
        return _form_of(key, value)(value)
    if key == "membership" and isinstance(value, list):
        changes = [text_of(one.get("change")) for one in value if isinstance(one, dict)]
        return escape_controls(". ".join(filter(None, changes)))[:MAX_FACT_CHARACTERS]
    if isinstance(value, list):
        return escape_controls(", ".join(map(str, value)))[:MAX_FACT_CHARACTERS]
    return escape_controls(str(value))[:MAX_FACT_CHARACTERS]


def _form_of(key: str, value: float) -> Callable[[float], str]:
    if key.startswith("memory/"):
        return units.memory_size
    if key.startswith("time/"):
        return units.seconds
    if key.endswith("bytes"):
        return units.byte_size
    return units.number if isinstance(value, float) else "{:,}".format
