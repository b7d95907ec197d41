"""The schedules that train with one set of weights a step, by name: those of PyTorch, ZB-H1 and ZB-H2."""

from __future__ import annotations

from typing import Literal

Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "ZB-H1",
    "ZB-H2",
]
