"""Python's garbage collector, run on all ranks at the same step, and tensors that pile up between two collections.

The collector stops its process whenever enough objects were made, on each rank at another time, and every rank waits
for whoever is stopped. With `memory.collect_every_steps` it is off. After a warm-up everything that was made until then
(modules, code, optimizers) is put aside for good (`gc.freeze`), so that a collection looks at little; and all ranks
collect at the same points, young objects after every step and all of them after every so many. (Megatron-LM's
`manual-gc`, torchtitan's `gc_freq`.)

A leak is tensors that somebody still holds: no collector helps. `LeakWatch` counts living tensors by their kind (class,
element type, shape) every few steps; that is cheap, as what was frozen is not looked at. A kind whose bytes never fall
and keep rising through `STEPS_OF_A_LEAK` steps is named, with the line of the code that makes most of them
(`tracemalloc`, which runs only while a kind is suspected) and what holds them.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import time
import tracemalloc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import units

WARM_UP_STEPS = 3
"""Steps before everything is frozen: buffers, caches and the optimizer's state are made in the first two."""

LOOK_EVERY_STEPS, STEPS_OF_A_LEAK = 5, 50
SUSPECTED_LOOKS, RISING_SHARE = 4, 0.8
FRAMES = 24
LARGEST = 3
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib") or "\0")


class Kind(NamedTuple):
    """Tensors that are alike."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        element = str(self.dtype).removeprefix("torch.")
        return f"{self.name} of {element} {list(self.shape)}"


class Held(NamedTuple):
    """How many there are, and the bytes of their storages, each once."""

    number: int
    bytes: int


class Collector:
    """The collector of this process from now on, until `close`. `after_step` is called once a step, by all ranks."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps, self._steps = every_steps, 0
        self._pauses = PauseTimer()
        self._leaks = LeakWatch()
        self._was_enabled = gc.isenabled()
        self._lines: list[str] = []

    def after_step(self) -> dict[str, float]:
        """Collects where that is due. The seconds that the collector has taken since the last call."""
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self._steps > WARM_UP_STEPS:
            gc.collect(2 if self._steps % self._every_steps == 0 else 1)
            if self._steps % LOOK_EVERY_STEPS == 0:
                self._lines += self._leaks.look()
        return {"memory/collector_s": self._pauses.take_s()}

    def take_lines(self) -> list[str]:
        """What was found to pile up since the last call, a sentence each."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """Gives the collector back as it was."""
        self._pauses.close()
        self._leaks.close()
        if self._steps >= WARM_UP_STEPS:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


class PauseTimer:
    """Seconds that Python's collector takes, by a clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin_s = self._taken_s = 0.0
        gc.callbacks.append(self._told)

    def take_s(self) -> float:
        """Since the last call."""
        taken, self._taken_s = self._taken_s, 0.0
        return taken

    def close(self) -> None:
        """Stops counting."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def _told(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._begin_s = self._clock()
        else:
            self._taken_s += self._clock() - self._begin_s


class LeakWatch:
    """Kinds of tensors whose bytes rise from look to look; `look` is called every `LOOK_EVERY_STEPS` steps."""

    def __init__(self, tensors: Callable[[], list[Tensor]] | None = None) -> None:
        self._tensors = living_tensors if tensors is None else tensors
        self._looks: deque[dict[Kind, Held]] = deque(maxlen=STEPS_OF_A_LEAK // LOOK_EVERY_STEPS)
        self._named: set[Kind] = set()
        self._frozen: list[weakref.ref[Tensor]] = []
        self._tracing = False

    def look(self) -> list[str]:
        """A sentence for each kind that has risen for `STEPS_OF_A_LEAK` steps and was not named yet."""
        tensors = self._tensors() + [tensor for ref in self._frozen if (tensor := ref()) is not None]
        self._looks.append(by_kind(tensors))
        rising = self._rising(len(self._looks), full=True)
        found = self._sentences(rising, tensors) if rising else []
        suspected = len(self._looks) >= SUSPECTED_LOOKS and bool(self._rising(SUSPECTED_LOOKS, full=False))
        self._trace(suspected)
        return found

    def close(self) -> None:
        """Ends the tracing of allocations."""
        self._trace(False)

    def _rising(self, looks: int, *, full: bool) -> list[Kind]:
        """The kinds that rose through the last so many looks; `full`: only where there are as many as name a leak."""
        if full and len(self._looks) < (self._looks.maxlen or 0):
            return []
        last = list(self._looks)[-looks:]
        rising = [
            kind
            for kind in last[-1]
            if kind not in self._named and _rises([x.get(kind, Held(0, 0)).bytes for x in last])
        ]
        if full:
            self._named.update(rising)
        return rising

    def _trace(self, wanted: bool) -> None:
        if wanted and not tracemalloc.is_tracing():
            tracemalloc.start(FRAMES)
            self._tracing = True
        elif not wanted and self._tracing:
            tracemalloc.stop()
            self._tracing = False

    def _sentences(self, kinds: Iterable[Kind], tensors: list[Tensor]) -> list[str]:
        """What holds them may have been frozen, and is looked for there; what is frozen with it stays in view."""
        with _thawed():
            found = [self._sentence(kind, tensors) for kind in kinds]
        self._frozen = [weakref.ref(tensor) for tensor in tensors] if gc.get_freeze_count() else []
        return found

    def _sentence(self, kind: Kind, tensors: list[Tensor]) -> str:
        first, last = self._looks[0].get(kind, Held(0, 0)), self._looks[-1][kind]
        own = [tensor for tensor in tensors if _kind(tensor) == kind]
        line = made_at(own)
        where = "" if line is None else f", made at {line}"
        return (
            f"tensors pile up: {last.number - first.number} more {kind} than {STEPS_OF_A_LEAK} steps ago, "
            f"{units.memory_size(last.bytes)} in all{where}{_holders_of(own, tensors)}; keep a number of each "
            "(.item()), or detach() and drop them"
        )


def living_tensors() -> list[Tensor]:
    """The tensors that Python's collector follows, without those that were frozen: what refers to a class of them. A
    list of all objects would hold tuples that other threads still fill: their `tuple(...)` would fail.
    """
    kinds = set(_with_subclasses(Tensor))
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in type.__subclasses__(kind):
        yield from _with_subclasses(subclass)


def by_kind(tensors: Iterable[Tensor]) -> dict[Kind, Held]:
    """How many of each kind there are. Bytes of a storage go to the first kind that has it."""
    counts, sizes, seen = Counter[Kind](), Counter[Kind](), set[int]()
    for tensor in tensors:
        try:
            kind, storage = _kind(tensor), tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage
            continue
        counts[kind] += 1
        sizes[kind] += 0 if storage._cdata in seen else storage.nbytes()
        seen.add(storage._cdata)
    return {kind: Held(count, sizes[kind]) for kind, count in counts.items()}


def largest_holders() -> str:
    """What most of the bytes of this process's tensors are, in a clause, for an error that ends it."""
    gc.unfreeze()
    tensors = [x for x in living_tensors() if x.device.type != "meta"]
    kinds = sorted(by_kind(tensors).items(), key=lambda item: -item[1].bytes)[:LARGEST]
    said = [f"{units.memory_size(held.bytes)} in {held.number} {kind}" for kind, held in kinds if held.bytes]
    return f"the largest tensors: {', '.join(said)}" if said else "it holds no tensors"


def made_at(tensors: list[Tensor]) -> str | None:
    """The line that made most of what is as large as these Python objects and still lives, `file.py:12`, outside of
    PyTorch, Shoal and Python where there is one; None where nothing was traced.

    `tracemalloc.get_object_traceback` finds no traces of collected objects in CPython 3.11, so traces go by their size.
    """
    if not tensors or not tracemalloc.is_tracing():
        return None
    size = sys.getsizeof(tensors[0])
    traces = (trace for trace in tracemalloc.take_snapshot().traces if trace.size == size)
    lines = Counter(line for trace in traces if (line := _line_of(trace.traceback)) is not None)
    return lines.most_common(1)[0][0] if lines else None


def _line_of(traceback: tracemalloc.Traceback) -> str | None:
    frames = [frame for frame in reversed(traceback) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGES)]
    chosen = next(iter(own or frames), None)
    return None if chosen is None else f"{Path(chosen.filename).name}:{chosen.lineno}"


def _rises(sizes: list[int]) -> bool:
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    return min(steps) >= 0 and sum(step > 0 for step in steps) >= RISING_SHARE * len(steps)


def _holders_of(tensors: list[Tensor], living: list[Tensor]) -> str:
    """What holds the most of them, in a clause; neither of these lists. Tuples are left out: one that another thread
    still fills must not be held.
    """
    own = {id(tensor) for tensor in tensors}
    referrers = [x for x in gc.get_referrers(*tensors) if x is not tensors and x is not living]
    holders = [x for x in referrers if type(x) in (list, dict, deque, set)]
    counted = [(sum(id(one) in own for one in _items(x)), x) for x in holders]
    count, holder = max(counted, key=lambda pair: pair[0], default=(0, None))
    return (
        f", {count} of them in a {type(holder).__name__} of {len(holder)}" if holder is not None and count > 1 else ""
    )


@contextmanager
def _thawed() -> Iterator[None]:
    """Inside, the collector sees what was frozen. Afterwards that is frozen again, with all that was made since; what
    was garbage before is collected first.
    """
    if not gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()


def _items(holder: Any) -> Iterable[Any]:
    return holder.values() if isinstance(holder, dict) else holder


def _kind(tensor: Tensor) -> Kind:
    return Kind(type(tensor).__name__, tensor.dtype, tuple(tensor.shape))
