"""Table `[wire]`: what the ranks talk over. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.comm.backends import TransportName
from shoal.config.table import Table, says

Algorithm = Literal[
    "backend", "auto", "ring", "recursive-doubling", "halving-doubling", "circulant", "one-shot", "two-shot",
    "double-tree", "hierarchical", "torus",
]  # fmt: skip
"""What computes collectives: the backend, the cheapest table on the measured links, or one all-reduce algorithm."""


class WireConfig(Table, frozen=True):
    """What the ranks talk over, and how long one waits for another."""

    transport: Annotated[
        TransportName,
        says(
            "What CPU ranks talk over: Gloo, shared memory, shared memory inside hosts and Gloo between them "
            "(hierarchical), or MPI. auto: shared memory where all ranks of a group are on one host; else MPI if "
            "mpiexec started them; else hierarchical, or Gloo if no two ranks share a host."
        ),
    ] = "auto"
    algorithm: Annotated[
        Algorithm,
        says(
            "How groups over Gloo compute collectives: as Gloo does (backend), by the cheapest algorithm on the links "
            "measured at the start (auto; the next run may sum in another order), or all-reduces by one algorithm."
        ),
    ] = "backend"
    check_collectives: Annotated[
        bool,
        says(
            "Compare every collective between its ranks before it runs; ranks that call different ones are named, "
            "with the line of code, instead of hanging."
        ),
    ] = False
    report_hang_s: Annotated[
        float,
        says(
            "Seconds in one collective after which all ranks say where they are, and one sentence names who is waited "
            "for and the line of code; 0: never.",
            ge=0,
        ),
    ] = 30.0
    timeout_s: Annotated[float, says("Longest wait for the other ranks in one collective.", gt=0, le=86400)] = 60.0
