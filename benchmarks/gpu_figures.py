"""The file of `python -m benchmarks.gpu`: figures by card, written as they come, and compared with those of before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Book:
    """The figures of all cards, and of `card` what is `found` now; written to `out` at each note."""

    out: Path | None
    card: str
    earlier: dict[str, Any]
    found: dict[str, Any]
    noted: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, out: Path | None, card: str, *, keeps: bool, facts: Mapping[str, Any]) -> Book:
        """Where it `keeps` what the file has of the card, rows are added to it; else those of sides are set aside."""
        earlier = json.loads(out.read_text()) if out is not None and out.exists() else {}
        own = earlier.get(card, {})
        own = own if keeps else {"before": own.get("rows", [])}
        return cls(out, card, earlier, {**own, **facts})

    @property
    def before(self) -> dict[str, Any]:
        """The figures of all cards, of this one those of the run before."""
        return (
            {**self.earlier, self.card: {"rows": self.found.get("before", ())}}
            if self.card in self.earlier
            else self.earlier
        )

    @property
    def measured(self) -> dict[str, Any]:
        """The rows of sides that were measured now."""
        rows = [row for row in self.found.get("rows", ()) if row["side"] in self.noted]
        return {"rows": rows} if rows else {}

    @property
    def text(self) -> str:
        return json.dumps({**self.earlier, self.card: self.found}, indent=2) + "\n"

    def note(self, table: str, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Puts `rows` into `table`, each in the place of the one with the same `key`."""
        kept = {row[key]: row for row in self.found.get(table, ())}
        self.noted |= {row[key] for row in rows}
        self.found[table] = [*{**kept, **{row[key]: row for row in rows}}.values()]
        if self.out is not None:
            part = self.out.with_name(f".{self.out.name}.part")
            part.write_text(self.text)
            part.replace(self.out)


def compared(earlier: Mapping[str, Any], card: str, found: Mapping[str, Any]) -> list[str]:
    """Sentences about each side beside the last figures of the same card. Those of other cards are not compared."""
    if "rows" not in found:
        return []
    if card not in earlier:
        others = ", ".join(earlier)
        return [f"the figures of {others} are not compared with those of {card}: cards differ"] if others else []
    before = {row["side"]: row.get("ms") for row in earlier[card].get("rows", ())}
    return [
        f"{row['side']}: {row['ms']} ms, {before[row['side']]} ms before"
        for row in found["rows"]
        if "ms" in row and before.get(row["side"]) is not None
    ]
