"""Following a job that was submitted: how it stands while it waits, what it prints while it runs, how it ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from shoal.submit.scheduler import Scheduler, Status, Submission

LOOK_S = 2.0
_ENDED = ("done", "failed")


def follow(
    scheduler: Scheduler, submission: Submission, directory: Path, *, say: Callable[[str], None], look_s: float = LOOK_S
) -> Status:
    """Until the job has ended: its last status. A sentence goes to `say` when it changes before anything is printed;
    what the job prints goes to standard output."""
    told, printing = "", None
    try:
        while True:
            found = scheduler.status(submission)
            if printing is None and found.sentence != told:
                told = found.sentence
                say(told)
            over = found.state in _ENDED or (found.state == "unknown" and printing is not None)
            if printing is None and (command := scheduler.log_command(submission, directory)):
                if over:
                    subprocess.run(command, check=False)  # all of it is there
                elif found.state == "running":
                    printing = subprocess.Popen([*command, "-f"])
            if over or found.state == "unknown":
                return found
            time.sleep(look_s)
    finally:
        if printing is not None:
            time.sleep(min(look_s, 1.0))  # its last lines
            printing.terminate()
            printing.wait()
