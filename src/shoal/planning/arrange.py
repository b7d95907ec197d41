"""What the planner does for a start: `layout.auto`, `memory.budget`, `memory.fit_microbatch`, and what it can do when
memory ran out. It is imported only when asked.
"""

from __future__ import annotations

import sys
from functools import partial

from shoal.assembly.start import Planner
from shoal.launcher.environment import Place
from shoal.runfile.run_file import RunFile


def arranged(run_file: RunFile, place: Place | None, *, keeps: bool = True) -> RunFile:
    """The run file with a layout and a use of memory, if it leaves those to the planner; whoever started the run is
    told which and why.

    `place` is None in the process that starts the ranks. Unless it `keeps` something, no microbatch is fitted.
    """
    tells = place is None or (place.rank == 0 and place.launcher != "shoal")
    if run_file.layout.auto:
        from shoal.planning.auto_layout import with_layout

        chosen = with_layout(run_file, place)
        run_file = chosen.run_file
        _say(chosen.why, tells)
    if run_file.memory.budget is not None:
        from shoal.observe.terminal import ProgressBar, open_progress_bar
        from shoal.planning.memory_budget import with_budget

        with open_progress_bar(sys.stderr) if tells else ProgressBar() as bar:
            run_file, why = with_budget(run_file, place, keeps=keeps, bar=bar)
        _say(why, tells)
    if run_file.memory.fit_microbatch:
        from shoal.planning.fitted_microbatch import with_microbatch

        run_file, why = with_microbatch(run_file, place, keeps=keeps)
        _say(why, tells)
    return run_file


def _say(why: str, tells: bool) -> None:
    if tells:
        print(why, file=sys.stderr, flush=True)


def memory_advice(run_file: RunFile) -> str:
    """What would free how much memory, in lines for people."""
    from shoal.planning import memory_advice as advice

    return advice.memory_advice(run_file)


def made_smaller(run_file: RunFile) -> str | None:
    """After a run out of memory, if its microbatches can be smaller: what was written down for its next start."""
    if not run_file.memory.fit_microbatch:
        return None
    from shoal.planning import fitted_microbatch

    return fitted_microbatch.made_smaller(run_file)


PLANNER = Planner(arranged, memory_advice, made_smaller)
"""For `assembly.start.run`."""
LOOKING = Planner(partial(arranged, keeps=False), memory_advice, lambda run_file: None)
"""For what starts ranks and leaves nothing in the run directory."""
