"""The schedules by name: those that train with one set of weights a step (PyTorch's, ZB-H1 and ZB-H2), and PipeDream's,
which updates the weights after every microbatch."""

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
AnySchedule = Literal[Schedule, "PipeDream"]
