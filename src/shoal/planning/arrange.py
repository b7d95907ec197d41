"""What the planner does for a start: `layout.auto`, and advice when memory ran out. It is imported only when asked."""

from __future__ import annotations

import sys

from shoal.assembly.start import Planner
from shoal.launch.environment import Place
from shoal.runfile.run_file import RunFile


def arranged(run_file: RunFile, place: Place | None) -> RunFile:
    """The run file with a layout, if it leaves that to the planner; whoever started the run is told which and why.

    `place` is None in the process that starts the ranks.
    """
    if not run_file.layout.auto:
        return run_file
    from shoal.planning.auto_layout import with_layout

    chosen = with_layout(run_file, place)
    if place is None or (place.rank == 0 and place.launcher != "shoal"):
        print(chosen.why, file=sys.stderr, flush=True)
    return chosen.run_file


def memory_advice(run_file: RunFile) -> str:
    """What would free how much memory, in lines for people."""
    from shoal.planning import memory_advice as advice

    return advice.memory_advice(run_file)


PLANNER = Planner(arranged, memory_advice)
"""For `assembly.start.run`."""
