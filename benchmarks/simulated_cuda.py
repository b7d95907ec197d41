"""A CUDA device that is not there: what a program would launch, copy and wait for on a GPU, seen without one.

    python -m benchmarks.simulated_cuda MODULE [ARGUMENTS]

runs a module as a program, as `python -m` does, and in it `torch.cuda` has one GPU:

    with Watch() as watch:
        train_a_step()
    watch.launches, watch.copies, watch.waits, watch.races

The memory of `cuda:0` is then the host's and its kernels are those of the CPU (simulated_cuda.cpp), so that numbers are
right and a step can be compared with one on the CPU. All between Python and the kernels is PyTorch's own: dispatch,
autocast, autograd's threads, streams, events and pinned memory. Tensors of two devices in one operator raise, as there.

A launch is an operator of PyTorch with a kernel of its own on CUDA; one on lists of tensors (`_foreach_...`) counts
once, though it launches a kernel for each 100 to 300 tensors, and PyTorch's fused RMS norm counts as its parts. Kernels
that CPUs lack (cuDNN, efficient attention, 2:4 products) cannot be simulated; PyTorch says which operator it was.

PyTorch asks for its GPUs when it is imported, once: a process has a simulated one from then on, or never.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shoal.errors import EnvironmentFault, ShoalError

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
FOLDER = SOURCE.parent.parent / "out/simulated_cuda"
NAME = "a simulated GPU"
_LINES = 4
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)


class Watch:
    """What the device was asked to do inside of it, by the threads of this process."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        """By operator."""
        self.copies: Counter[str] = Counter()
        """Between host and device: by direction and the host's kind of memory."""
        self.waits: Counter[str] = Counter()
        """What the host waited for that is all that it has launched: by operator, and the line that asked for it."""
        self.races: Counter[str] = Counter()
        """Operators that another stream's work was not ordered with."""
        self.collectives: Counter[str] = Counter()
        """By name."""
        self.events = 0
        """So often the host waited for an event, while the device had more to do."""
        self._call = _LISTENER(self._note)

    @property
    def launched(self) -> int:
        """Launches of all operators."""
        return self.launches.total()

    def __enter__(self) -> Self:
        _library().simulated_listen(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _library().simulated_listen(_LISTENER())

    def _note(self, kind: bytes, what: bytes, size_bytes: int) -> None:
        name = what.decode()
        if kind == b"launch":
            self.launches[name.removeprefix("aten::")] += 1
        elif kind == b"collective":
            self.collectives[name] += 1
        elif kind == b"event":
            self.events += 1
        elif kind == b"race":
            self.races[f"{name} ({_asker()})"] += 1
        elif kind == b"synchronization":
            self.waits[f"{name} ({_asker()})"] += 1
        else:
            self.copies[f"{kind.decode()}, {name}"] += 1


def _asker() -> str:
    """The innermost lines that are neither PyTorch's nor this module's, and who called them."""
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if not frame.filename.startswith((str(_folder_of("torch")), __file__, "<"))
    ]
    return " > ".join(lines[-_LINES:]) or "a thread of autograd's"


def simulate() -> None:
    """Makes `cuda:0` a simulated device of this process. Raises `EnvironmentFault` without a C++ compiler, and where
    PyTorch is imported already.
    """
    if "torch" in sys.modules:
        raise EnvironmentFault("PyTorch has looked for its GPUs already: python -m benchmarks.simulated_cuda MODULE")
    if (_folder_of("torch") / "lib/libtorch_cuda.so").exists():
        raise EnvironmentFault(
            "this PyTorch is built with CUDA, whose place a simulated GPU takes: install a build for CPUs, "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    library = _library()
    for name in _with_kernels_of_cuda():
        library.simulated_kernel(name.encode())
    for module, name, value in _answers():
        setattr(module, name, value)


def simulated() -> bool:
    """Whether this process has a simulated device."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_name() == NAME


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    import torch

    return torch.ops.simulated_cuda.on_host(tensor) if tensor.is_cuda else tensor


def _answers() -> Iterator[tuple[Any, str, Any]]:
    """What PyTorch's Python asks CUDA's runtime for."""
    import torch

    cuda = torch.cuda
    yield cuda, "_initialized", True
    yield torch._C, "_cuda_getDevice", _always(0)
    for name, value in {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
    }.items():
        yield cuda, name, _always(value)
    for name, value in {"get_device_name": NAME, "get_device_capability": (9, 0), "set_device": None}.items():
        yield cuda, name, _always(value)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        yield cuda, name, _always(0)
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size_bytes)
        torch.ops.simulated_cuda.resize_storage(storage, size_bytes)
        return storage

    yield torch.UntypedStorage, "resize_", resized
    yield cuda, "synchronize", lambda device=None: torch.accelerator.synchronize()
    yield cuda, "manual_seed_all", torch.default_generator.manual_seed
    yield cuda, "default_generators", (torch.default_generator,)
    for module in (cuda, torch.accelerator):
        for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
            yield module, name, _always(0)
        yield module, "reset_peak_memory_stats", _always(None)
        yield module, "memory_stats", lambda *_: {}


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _with_kernels_of_cuda() -> list[str]:
    """Operators with a kernel on CUDA that are made of others where a device has none (`_foreach_add` and the like)."""
    text = (_folder_of("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    found = []
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        devices = set(re.findall(r"[A-Za-z]+", " ".join(re.findall(r"^    ([\w, ]+):", entry, flags=re.MULTILINE))))
        if "CUDA" in devices and "CompositeExplicitAutograd" in devices:
            found.append(entry.partition("(")[0])
    return found


@cache
def _folder_of(package: str) -> Path:
    """Of a package, which is not imported for it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EnvironmentFault(f"there is no {package} here")
    return Path(spec.origin).parent


@cache
def _library() -> ctypes.CDLL:
    ctypes.CDLL(str(_folder_of("torch") / "lib/libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)


def _built() -> Path:
    """The library of this source for this PyTorch, compiled where it is not there yet (half a minute)."""
    place, key = _folder_of("torch"), hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    library = FOLDER / f"{key}.so"
    if library.exists():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    includes = [f"-I{place / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    command = ["c++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *includes, str(SOURCE), f"-L{place / 'lib'}"]
    try:
        done = subprocess.run([*command, "-lc10", "-ltorch_cpu", "-o", str(part)], capture_output=True, text=True)
    except FileNotFoundError:
        raise EnvironmentFault("a GPU is simulated by a library in C++, and there is no compiler c++ here") from None
    if done.returncode:
        raise EnvironmentFault(f"{SOURCE.name} does not compile against this PyTorch: {done.stderr[:2000]}")
    part.rename(library)
    return library


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.simulated_cuda MODULE [ARGUMENTS]")
    from benchmarks.simulated_cuda import simulate as start  # this module, as others import it

    try:
        start()
    except ShoalError as error:
        sys.exit(f"benchmarks: {error}")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
