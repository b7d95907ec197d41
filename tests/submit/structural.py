"""Kubernetes' structural schemas, as its API server applies them with strict field validation.

`schemas/*.json` are the published definitions of custom resources, each with its source. What is checked: types,
required and unknown fields, enumerations, patterns, bounds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parent / "schemas"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,)
}  # fmt: skip


def definition(kind: str) -> dict[str, Any]:
    """The published definition of a kind."""
    return json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())


def faults(found: dict[str, Any]) -> list[str]:
    """What the API server would refuse an object for, a line each."""
    defined = definition(found["kind"])
    wanted = f"{defined['group']}/{defined['version']}"
    wrong = [] if found["apiVersion"] == wanted else [f"apiVersion: {found['apiVersion']} is not {wanted}"]
    return wrong + _faults(found, defined["schema"], found["kind"])


def _faults(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: neither a whole number nor a text"]
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{path}: {value!r} is no {kind}"]
    wrong = []
    if "enum" in schema and value not in schema["enum"]:
        wrong.append(f"{path}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        wrong.append(f"{path}: {value!r} does not match {schema['pattern']}")
    if "minimum" in schema and value < schema["minimum"]:
        wrong.append(f"{path}: {value} is below {schema['minimum']}")
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        wrong.append(f"{path}: longer than {schema['maxLength']}")
    if kind == "array":
        wrong += [fault for i, item in enumerate(value) for fault in _faults(item, schema["items"], f"{path}[{i}]")]
    if kind == "object":
        wrong += _faults_of_fields(value, schema, path)
    return wrong


def _faults_of_fields(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    wrong = [f"{path}.{name}: missing" for name in schema.get("required", []) if name not in value]
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name, inner in value.items():
        if name in known:
            wrong += _faults(inner, known[name], f"{path}.{name}")
        elif isinstance(more, dict):
            wrong += _faults(inner, more, f"{path}.{name}")
        elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
            wrong.append(f"{path}.{name}: unknown field")
    return wrong
