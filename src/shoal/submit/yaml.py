"""Objects as YAML in block style: dictionaries, lists, texts, whole numbers, booleans. What YAML 1.2 reads, no more.

A text is written plain only where no reader could take it for anything else; else as JSON writes it, which is YAML too,
or as a literal block where it has lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_TAKEN = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""What YAML 1.1 reads as something other than a text."""


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects, one document each."""
    return "---\n".join("\n".join(_block(document)) + "\n" for document in objects)


def _block(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_text(key)}:", inner)]
    if isinstance(value, list) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value and value.endswith("\n") and not value.startswith((" ", "\n")):
        keep = "|+" if value.endswith("\n\n") else "|"
        return [f"{key} {keep}", *(f"  {line}" if line else "" for line in value[:-1].split("\n"))]
    if isinstance(value, Mapping | list) and value:
        return [key, *(f"  {line}" if line else "" for line in _block(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _block(value)
    return [f"- {first}", *(f"  {line}" if line else "" for line in rest)]


def _scalar(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _TAKEN else json.dumps(text)
