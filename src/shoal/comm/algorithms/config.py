"""Names by which a run file asks for algorithms. Imports no torch."""

from __future__ import annotations

from typing import Literal

Algorithm = Literal[
    "backend", "auto", "ring", "recursive-doubling", "halving-doubling", "circulant", "one-shot", "two-shot",
    "double-tree", "hierarchical", "torus",
]  # fmt: skip
"""Who makes a group's collectives: its backend, the cheapest table on the links as measured, or one for all-reduces."""
