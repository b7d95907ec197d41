"""Ctrl-C in every verb that can take long: one sentence, its exit code, and nothing left.

Each verb is started as a user starts it, and interrupted in the middle of its work: in the user's model, which says
that it has begun and then takes an hour. Temporary files go to a folder of the test's, which must be empty afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.launcher.signals import SAME_REQUEST_S
from tests.cli.project import Project, project
from tests.programs import Program
from tests.waiting import HANG_S, wait_until

BUILDING = """

def model(**arguments):
    open("begun", "w").close()
    time.sleep(3600)
"""
TRAINING = """

class Slow(Logging):
    def forward(self, x):
        open("begun", "w").close()
        time.sleep(0.2)
        return super().forward(x)


def model(**arguments):
    return Slow()
"""
GPT = """
[run]
name = "gpt"
steps = 1
[model]
kind = "gpt"
vocabulary = 256
width = 32
layers = 4
heads = 2
[layout]
pipeline = 2
[data]
kind = "tokens"
path = "tokens.bin"
dtype = "uint8"
[batch]
global_samples = 256
sequence = 512
"""
ROUNDS = """
[run]
name = "rounds"
steps = 2
[model]
kind = "python"
build = "own:model"
[data]
kind = "python"
build = "own:data"
[batch]
global_samples = 5
[optimizer]
kind = "sgd"
lr = 0.01
[federated]
kind = "fedavg"
clients = 2
"""
SLOW_SCRIPT = "import time\nopen('begun', 'w').close()\ntime.sleep(3600)\n"
SLOW_PROGRAM = "#!/bin/sh\ntouch begun\nexec sleep 3600\n"
HOSTS = "#!/bin/sh\necho 'all*|2|8|16000|(null)'\n"
SWEEP = 'name = "s"\nrun = "run.toml"\nobjective = "loss/train"\n[parameters]\n"optimizer.lr" = [0.01, 0.05]\n'
AGAIN = "interrupted before its end; the same command starts it again\n"
GOES_ON = "the same command resumes from there\n"
NO_RESULT = "SIGINT: stopped at once; there is no result; start it again\n"
MEASURING = r"(?m)^(\d+ of \d+: [^:\n]+|(?!\d+ of |lab: )[^:\n]+): \w"
"""Rank 0 of a benchmark has told what it measures, behind the name of the part, which is shown before ranks start."""
STOPPED, INTERRUPTED, DONE = 75, 130, 0


def building(own: Project) -> None:
    """The model takes an hour to build."""
    with (own.folder / "own.py").open("a") as file:
        file.write(BUILDING)


def training(own: Project) -> None:
    """A step takes a while, and there are many."""
    with (own.folder / "own.py").open("a") as file:
        file.write(TRAINING)
    text = (own.folder / "run.toml").read_text().replace("steps = 9", "steps = 900\nprocesses = 1")
    (own.folder / "run.toml").write_text(text)
    (own.folder / "sweep.toml").write_text(SWEEP)


def trained(own: Project) -> None:
    """There is a run, whose model then takes an hour to build."""
    done = own.shoal("train", "run.toml", "run.steps=1", "run.processes=1")
    assert done.returncode == 0, done.stderr
    building(own)


def failed(own: Project) -> None:
    """There is a capsule of a failed run, whose model then takes an hour to build."""
    done = own.shoal("train", "run.toml", "model.arguments={fail_at=2}")
    assert done.returncode == 1, done.stderr
    building(own)


def drawing(own: Project) -> None:
    """There is a run, and pictures take an hour."""
    done = own.shoal("train", "run.toml", "run.steps=1", "run.processes=1")
    assert done.returncode == 0, done.stderr
    (own.folder / "matplotlib.py").write_text(SLOW_SCRIPT)
    gpt(own)


def gpt(own: Project) -> None:
    """A run file of a GPT, whose steps take about a second."""
    (own.folder / "gpt.toml").write_text(GPT)
    (own.folder / "tokens.bin").write_bytes(bytes(range(256)) * 2048)


def federated(own: Project) -> None:
    """Rounds of clients, whose model takes an hour to build."""
    building(own)
    (own.folder / "rounds.toml").write_text(ROUNDS)


def script(own: Project) -> None:
    """A script of the user's that takes an hour."""
    (own.folder / "mine.py").write_text(SLOW_SCRIPT)


def programs_of_others(own: Project) -> None:
    """Slurm's client, which finds hosts at once, and a remote shell; a submission and a session take an hour."""
    (own.folder / "bin").mkdir()
    for name, script in {"sbatch": SLOW_PROGRAM, "remote": SLOW_PROGRAM, "sinfo": HOSTS}.items():
        (own.folder / "bin" / name).write_text(script)
        (own.folder / "bin" / name).chmod(0o755)


def nothing(own: Project) -> None:
    """The run file is all that is needed."""


@dataclass(frozen=True)
class Case:
    """`begun`: what standard output or error says when the verb is in its work, or with a star files that are there
    then; None: the file "begun".
    """

    command: str
    code: int
    says: str
    prepare: Callable[[Project], None]
    begun: str | None = None


CASES = [
    Case("train run.toml", INTERRUPTED, "the next start resumes from the newest checkpoint\n", building),
    Case("train run.toml", STOPPED, f"stopped after a good checkpoint; {GOES_ON}", training),
    Case("verify run.toml", INTERRUPTED, NO_RESULT, building),
    Case("evaluate runs/own", INTERRUPTED, NO_RESULT, trained),
    Case("profile run.toml", INTERRUPTED, NO_RESULT, building),
    Case("plan run.toml", INTERRUPTED, f"shoal plan: {AGAIN}", building),
    Case("plan gpt.toml --measure 1", INTERRUPTED, f"shoal plan: {AGAIN}", gpt, "tmp/shoal-trial-*/plan-*/logs/*"),
    Case("simulate gpt.toml --schedule --picture s.png", INTERRUPTED, f"shoal simulate: {AGAIN}", drawing),
    Case("split run.toml", INTERRUPTED, f"shoal split: {AGAIN}", building),
    Case("sweep sweep.toml", STOPPED, GOES_ON, training),
    Case("ensemble run.toml --members 2", STOPPED, GOES_ON, training),
    Case("reproduce runs/own", STOPPED, GOES_ON, trained),
    Case("rehearse run.toml --faults rank", INTERRUPTED, f"shoal rehearse: {AGAIN}", training),
    Case("tune lr run.toml", INTERRUPTED, f"shoal tune lr: {AGAIN}", training),
    Case("compress runs/own --to 0.5", STOPPED, "the same command goes on from there\n", trained),
    Case("federate simulate rounds.toml", INTERRUPTED, f"shoal federate simulate: {AGAIN}", federated),
    Case("replay runs/own/capsule.zip", INTERRUPTED, f"shoal replay: {AGAIN}", failed),
    Case("report runs/own", INTERRUPTED, f"shoal report: {AGAIN}", drawing),
    Case("diff runs/own runs/own --plot x.png", INTERRUPTED, f"shoal diff: {AGAIN}", drawing),
    Case("launch -n 2 mine.py", INTERRUPTED, "SIGINT: stopped at once; what the script has saved is there\n", script),
    Case("doctor --hosts a --shell bin/remote", INTERRUPTED, f"shoal doctor: {AGAIN}", programs_of_others),
    Case("submit run.toml run.processes=1 --to slurm", INTERRUPTED, "before you submit it again\n", programs_of_others),
    Case("watch runs/own", DONE, "The page is closed; the runs go on without it\n", trained, "http://"),
    Case("coordinator serve j --token t", DONE, "with j, it goes on where it was\n", nothing, "listens on"),
    Case("bench comm", INTERRUPTED, NO_RESULT, nothing, MEASURING),
]  # fmt: skip
LONGER = [
    *(
        Case(f"bench {words}", INTERRUPTED, NO_RESULT, nothing, MEASURING)
        for words in ("step", "sync", "products", "codec", "codec --accuracy digits", "link --network throttle")
    ),
    Case("bench comm --backends mpi --processes 2", INTERRUPTED, f"shoal bench comm: {AGAIN}", nothing, MEASURING),
]
ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.stress) for case in LONGER)]


def begin(case: Case, own: Project) -> Program:
    """The verb, in the middle of its work."""
    case.prepare(own)
    (own.folder / "tmp").mkdir()
    path = f"{own.folder / 'bin'}:{os.environ['PATH']}"
    running = own.start(*case.command.split(), TMPDIR=str(own.folder / "tmp"), PATH=path)
    if case.begun is not None and "*" not in case.begun:
        own.wait_for_text(case.begun)
        return running

    def has_begun() -> bool:
        assert running.poll() is None, own.said()
        return any(own.folder.glob(case.begun or "begun"))

    wait_until(has_begun, own.said)
    return running


def living(folder: Path) -> list[str]:
    """The commands of the processes that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # gone meanwhile, or not ours to look at
            continue
    return found


def require_nothing_left(own: Project) -> None:
    """No process and no temporary file. The kernel may need a moment for those whose launcher has ended."""
    wait_until(lambda: not living(own.folder), lambda: str(living(own.folder)))
    assert [str(path) for path in (own.folder / "tmp").rglob("*")] == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("shoal")]


@pytest.mark.slow
@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.command.replace("/", "-")[:24])
def test_ctrl_c(case: Case, tmp_path: Path) -> None:
    """One sentence, no traceback, the code that the documentation says, and nothing left."""
    own = project(tmp_path)
    running = begin(case, own)
    running.send_signal(signal.SIGINT)
    code = running.wait(HANG_S)
    said = own.said()
    assert code == case.code, said
    assert said.count(case.says) == 1, said
    assert said.endswith(case.says), said
    assert "Traceback" not in said
    require_nothing_left(own)


OF_THE_USER = ("launch",)
"""What is shown is the user's script's own."""
SAYING = [case for case in CASES if case.command.split()[0] not in OF_THE_USER]
SAYING_MORE = [pytest.param(case, marks=pytest.mark.stress) for case in LONGER]


@pytest.mark.slow
@pytest.mark.matrix(every=5)
@pytest.mark.parametrize("case", [*SAYING, *SAYING_MORE], ids=lambda case: case.command.replace("/", "-")[:24])
def test_long_work_says_what_it_does(case: Case, tmp_path: Path) -> None:
    """No verb is silent while it works: before it ends, it has said what it is at, where no terminal is, too."""
    own = project(tmp_path)
    running = begin(case, own)
    own.wait_for_text(r"\S")
    running.send_signal(signal.SIGINT)
    running.wait(HANG_S)


DEAF_SCRIPT = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLOW_SCRIPT
DEAF_TRAINING = TRAINING.replace("time.sleep(0.2)", "time.sleep(3600)")


def deaf_script(own: Project) -> None:
    """A script that does not hear SIGTERM."""
    (own.folder / "mine.py").write_text(DEAF_SCRIPT)


def deaf_training(own: Project) -> None:
    """A step that takes an hour, which a rank would end before it stops."""
    training(own)
    text = (own.folder / "own.py").read_text()
    (own.folder / "own.py").write_text(text.replace(TRAINING, DEAF_TRAINING))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "told_in"),
    [
        (Case("sweep sweep.toml", STOPPED, GOES_ON, deaf_training), "sweeps/s/trial-0000/output.txt"),
        (Case("launch -n 2 mine.py", INTERRUPTED, "what the script has saved is there\n", deaf_script), "out.txt"),
    ],
    ids=["sweep", "launch"],
)
def test_a_second_ctrl_c_ends_at_once(case: Case, told_in: str, tmp_path: Path) -> None:
    """Ranks that would go on for an hour after the first are killed."""
    own = project(tmp_path)
    running = begin(case, own)
    running.send_signal(signal.SIGINT)
    own.wait_for_text("a second one stops at once", output=told_in)
    time.sleep(2 * SAME_REQUEST_S)  # sooner it is taken for the same Ctrl-C
    running.send_signal(signal.SIGINT)
    assert running.wait(HANG_S) == case.code, own.said()
    assert own.said().endswith(case.says)
    assert "Traceback" not in own.said()
    require_nothing_left(own)


LEAVING = """

import atexit


def _leave():
    open(f"leaving-{RANK}", "w").close()
    time.sleep(3600)


def model(**arguments):
    atexit.register(_leave)
    return Logging()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_changes_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Both ranks are on their way out, and the signal ends it: the run has ended well, and its code says so."""
    own = project(tmp_path)
    with (own.folder / "own.py").open("a") as file:
        file.write(LEAVING)
    running = own.start("train", "run.toml", "run.steps=2", "run.processes=2")
    wait_until(lambda: all((own.folder / f"leaving-{rank}").exists() for rank in range(2)), own.said)
    running.send_signal(number)
    assert running.wait(HANG_S) == DONE, own.said()
    assert "Traceback" not in own.said()


@pytest.mark.stress
def test_a_reproduction_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """The same command, and the run is bitwise the same."""
    own = project(tmp_path)
    assert own.shoal("train", "run.toml", "run.steps=6").returncode == 0
    plain = (own.folder / "own.py").read_text()
    (own.folder / "own.py").write_text(plain.replace("time.sleep(self.pause)", "time.sleep(0.3)"))
    running = own.start("reproduce", "runs/own")
    own.wait_for_step(2, run="runs/own-again")
    running.send_signal(signal.SIGINT)
    assert running.wait(HANG_S) == STOPPED, own.said()
    (own.folder / "own.py").write_text(plain)
    again = own.shoal("reproduce", "runs/own")
    assert again.returncode == DONE, again.stderr + again.stdout
    assert "bitwise the same" in again.stdout


def is_caught(pid: int) -> bool:
    """Whether the process has a handler of its own for SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGINT - 1) & 1)


@pytest.mark.stress
@pytest.mark.parametrize("verb", ["train", "plan", "verify", "simulate"])
def test_ctrl_c_in_the_first_moments(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere in the first second of a fresh interpreter that runs Shoal: no traceback, and nothing left."""
    own, draws = project(tmp_path), random.Random(0)
    (own.folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(own.folder / "tmp"))
    for _ in range(12):
        starting = own.start_anew(verb, "run.toml")
        while not is_caught(starting.pid):  # the interpreter's own start, in which it has no handler yet
            time.sleep(0.001)
        while is_caught(starting.pid):  # `import site`, until Shoal begins
            time.sleep(0.001)
        time.sleep(delay_s := draws.uniform(0.0, 1.2))
        starting.send_signal(signal.SIGINT)
        code = starting.wait(HANG_S)
        assert code in (-signal.SIGINT, INTERRUPTED, STOPPED), (delay_s, own.said())
        assert "Traceback" not in own.said(), delay_s
        require_nothing_left(own)
