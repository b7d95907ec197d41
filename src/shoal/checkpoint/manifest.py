"""What a checkpoint contains: every tensor's global shape, its boxes and their objects, and the state beside them.

A manifest is deterministic JSON: equal checkpoints are equal bytes, but for the time. Its last key is the blake3 hash
of the JSON without that key, so that a manifest whose bytes have changed is not read (`seal`). Format 1, which earlier
versions wrote, has no such key; it is still read, and reported as unprotected. Format 3 is that of checkpoints with
encoded objects: `encoded` names them, each with the object that its differences begin with. `objects` has these, too,
and what they begin with: so what a checkpoint needs is verified, copied and kept with it.

The file may come from anywhere, so parsing is strict and bounded: no unknown field, boxes that tile every tensor
exactly, and memory in proportion to the file: only `state`, `layout` and `writer` may hold any JSON, and little of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
from blake3 import blake3

from shoal.checkpoint.tensorfile import BY_NAME, MAX_DIMS, MAX_HEADER_BYTES, corner_count, possible_shape, tiles
from shoal.errors import CorruptCheckpoint, UsageError, VerificationFailed
from shoal.files import read_file
from shoal.topology.holding import Box

# What a checkpoint holds beside tensors: JSON, in which the counts of a run must agree with each other.
#
# A run writes how far it has come as `step`, `skipped`, `samples`, `tokens` and `cursor`. These numbers say one thing
# several times: the step is also that of the manifest, and every sample that was counted is a position that the cursor
# has committed. A flipped digit breaks one of these rules, or the hash of the manifest, before it can make a run use a
# sample twice.


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The positions that a run has used: half-open intervals, ascending, with a gap between any two."""

    committed: list[tuple[Count, Count]]


class _Counts(msgspec.Struct, frozen=True):
    """How far a run has come: optimizer steps taken and skipped, samples and tokens used, and which samples."""

    step: Count
    skipped: Count
    samples: Count
    tokens: Count
    cursor: _Positions


def contradiction(state: Mapping[str, Any], *, step: int) -> str | None:
    """Why `state` cannot be the state of a run after `step` steps; None where it can.

    A state without "identity" is not a run's (imported weights), and nothing is asked of it.
    """
    if "identity" not in state:
        return None
    try:
        counts = msgspec.convert(state, _Counts)
    except msgspec.ValidationError as error:
        return f"its state is not that of a run: {error}"
    if counts.step != step:
        return f"it is the checkpoint of step {step}, and its state is that of step {counts.step}"
    if counts.skipped > step:
        return f"it has skipped {counts.skipped} of {step} steps"
    used, end = 0, -1
    for start, stop in counts.cursor.committed:
        if not end < start < stop:
            return f"its data cursor has the interval [{start}, {stop}) after position {end}"
        used, end = used + stop - start, stop
    if used != counts.samples:
        return f"it counts {counts.samples} samples, and its data cursor {used}"
    return None


def plain(value: Any, where: str) -> Any:
    """A deep copy of `value` made of JSON's own types; `where` is its name in the message of a `UsageError`.

    JSON would turn NaN into null and the key 1 into "1" without a word, so both are refused; a tuple becomes a list.
    """
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold: save None or a string in its place")
    if type(value) is str:
        return _text(value, where)
    if value is None or type(value) in (bool, int, float):
        return value
    raise UsageError(
        f"{where} is of type {type(value).__name__}; the state of a checkpoint is JSON: pass tensors as tensors, "
        "and the rest as numbers, strings, lists and mappings"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"{where} has the key {key!r}; the keys of a checkpoint's state are strings: use {str(key)!r}")
    return _text(key, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} has the text {text!r}, which is not Unicode: replace its lone surrogates") from None
    return text


FORMAT_VERSION = 3
PLAIN_VERSION = 2
UNPROTECTED_VERSION = 1
MAX_MANIFEST_BYTES = 128 << 20
"""Half a million objects: 4 TB in objects of 8 MiB, 500 TB in objects of 1 GiB."""

MAX_STATE_BYTES = 4 << 20
"""JSON of `state`, of `layout` and of `writer`; as Python's objects it takes up to thirty times as much memory."""

MAX_OBJECT_BYTES = (1 << 30) + MAX_HEADER_BYTES + 8
MAX_RATIO = 1 << 12
"""Bytes of a box for each byte of the object that encodes it: more than `planes.py` reaches with equal numbers."""
MAX_CORNERS_IN_ALL = 1 << 23
"""Corners of all boxes (`tensorfile.tiles`) of a manifest: bounds the time of checking it."""

_SEALED = re.compile(rb',"hash":"([0-9a-f]{64})"\}\n\Z')
_SEAL_BYTES = len(b',"hash":""}\n') + 64
_REPAIR = "use another checkpoint"

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Dims = Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMS)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class BoxEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor, and where its elements are: under `key` in the object."""

    offset: Dims
    shape: Dims
    object: Digest
    key: str

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(tuple(self.offset), tuple(self.shape))


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its name in the unsplit model, its element type, its global shape, and the boxes that tile it."""

    name: str
    dtype: str
    shape: Dims
    boxes: list[BoxEntry]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `created` is in unix seconds; `objects` gives the bytes of each file by its hash. `encoded` are
    those whose boxes are streams (`planes.py`), each with the object that its differences begin with; "": it has none.

    `hash` is that of the file it was read from; empty in a new one, and in one of a version that wrote none.
    """

    step: int
    generation: int
    created: float
    tensors: list[TensorEntry]
    objects: dict[str, int]
    state: dict[str, Any]
    layout: dict[str, Any]
    writer: dict[str, str]
    encoded: dict[str, str] = {}
    hash: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A manifest as its file has it, without the hash; what may be any JSON is not parsed yet."""

    format_version: int
    step: Size
    generation: Size
    created: Time
    tensors: list[TensorEntry]
    objects: dict[Digest, Size]
    state: msgspec.Raw
    layout: msgspec.Raw
    writer: msgspec.Raw
    encoded: dict[Digest, Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]] = {}


class _Version(msgspec.Struct):
    format_version: int


_VERSION = msgspec.json.Decoder(_Version)
_FILE = msgspec.json.Decoder(_File)
_OPEN = msgspec.json.Decoder(dict[str, Any])
_TEXTS = msgspec.json.Decoder(dict[str, str])


def encode(manifest: Manifest) -> bytes:
    """The file's content. Raises `UsageError` for what would be too large to be read again."""
    file = _File(
        format_version=FORMAT_VERSION if manifest.encoded else PLAIN_VERSION,
        step=manifest.step,
        generation=manifest.generation,
        created=manifest.created,
        tensors=manifest.tensors,
        objects=manifest.objects,
        state=_raw(manifest.state, "state"),
        layout=_raw(manifest.layout, "layout"),
        writer=_raw(manifest.writer, "writer"),
        encoded=manifest.encoded,
    )
    content = seal(msgspec.json.encode(file, order="deterministic"))
    if len(content) > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"the manifest of {len(manifest.objects)} objects has {len(content)} bytes, and {MAX_MANIFEST_BYTES} are "
            "the limit: raise checkpoint.object_bytes, which makes fewer objects"
        )
    return content


def seal(body: bytes) -> bytes:
    """The JSON object `body` with its own hash as the last key, and a newline."""
    return body[:-1] + f',"hash":"{blake3(body).hexdigest()}"}}\n'.encode()


def read(path: Path) -> Manifest:
    """The manifest at `path`.

    Raises `CorruptCheckpoint`, which names the file, when it is not a whole and consistent one, and
    `VerificationFailed` when it has a format that this version does not read.
    """
    return decode(read_file(path, limit_bytes=MAX_MANIFEST_BYTES, error=CorruptCheckpoint, repair=_REPAIR), path)


def decode(content: bytes, path: Path) -> Manifest:
    """The manifest whose file is `content`; raises as `read` does, and `path` is for the messages."""
    try:
        version = _VERSION.decode(content).format_version
        if version not in (FORMAT_VERSION, PLAIN_VERSION, UNPROTECTED_VERSION):
            raise VerificationFailed(
                f"{path} has the format {version}, and this Shoal reads up to {FORMAT_VERSION}: "
                "use the Shoal that wrote it"
            )
        body, found = (content, "") if version == UNPROTECTED_VERSION else _opened(content)
        file = _FILE.decode(body)
        if bool(file.encoded) != (version == FORMAT_VERSION):
            raise ValueError(f"format {version}, and {len(file.encoded)} encoded objects")
        manifest = Manifest(
            step=file.step,
            generation=file.generation,
            created=file.created,
            tensors=file.tensors,
            objects=file.objects,
            state=_OPEN.decode(_small(file.state, "state")),
            layout=_OPEN.decode(_small(file.layout, "layout")),
            writer=_TEXTS.decode(_small(file.writer, "writer")),
            encoded=file.encoded,
            hash=found,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is damaged ({error}): {_REPAIR}") from error
    problem = _inconsistency(manifest)
    if problem:
        raise CorruptCheckpoint(f"{path} contradicts itself ({problem}): {_REPAIR}")
    return manifest


def _opened(content: bytes) -> tuple[bytes, str]:
    """What `seal` was given, and the hash. Raises `ValueError` where they do not belong together."""
    match = _SEALED.search(content[-_SEAL_BYTES:])
    if match is None:
        raise ValueError("it does not end with a hash")
    body = content[:-_SEAL_BYTES] + b"}"
    if blake3(body).hexdigest().encode() != match[1]:
        raise ValueError("its bytes do not hash to the hash in it")
    return body, match[1].decode()


def _raw(value: object, name: str) -> msgspec.Raw:
    encoded = msgspec.json.encode(value, order="deterministic")
    if len(encoded) > MAX_STATE_BYTES:
        raise UsageError(
            f"the {name} of this checkpoint has {len(encoded)} bytes of JSON, and {MAX_STATE_BYTES} are the limit: "
            "save what is large as tensors"
        )
    return msgspec.Raw(encoded)


def _small(raw: msgspec.Raw, name: str) -> msgspec.Raw:
    if memoryview(raw).nbytes > MAX_STATE_BYTES:
        raise ValueError(f"its {name} is larger than {MAX_STATE_BYTES} bytes")
    return raw


def _inconsistency(manifest: Manifest) -> str | None:
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) < len(names):
        return "two tensors have one name"
    if max(manifest.objects.values(), default=0) > MAX_OBJECT_BYTES:
        return f"an object is larger than {MAX_OBJECT_BYTES} bytes"
    corners = 0
    for tensor in manifest.tensors:
        corners += corner_count(tensor.shape, [entry.box for entry in tensor.boxes])
        if corners > MAX_CORNERS_IN_ALL:
            return "its tensors are cut into too many boxes"
    if problem := _base_problem(manifest):
        return problem
    problems = (_tensor_problem(tensor, manifest) for tensor in manifest.tensors)
    found = next((problem for problem in problems if problem), None)
    return found or contradiction(manifest.state, step=manifest.step)


def _base_problem(manifest: Manifest) -> str | None:
    for digest, base in manifest.encoded.items():
        if digest not in manifest.objects:
            return f"the encoded object {digest} is not in it"
        if base and manifest.encoded.get(base) != "":
            return f"the object {base} that another one begins with is not in it, or begins with one itself"
    return None


def _tensor_problem(tensor: TensorEntry, manifest: Manifest) -> str | None:
    if tensor.dtype not in BY_NAME:
        return f"tensor {tensor.name!r} has the unknown type {tensor.dtype!r}"
    if not possible_shape(tensor.shape):
        return f"tensor {tensor.name!r} has the shape {tensor.shape}, which no tensor can have"
    if not tiles(tensor.shape, [entry.box for entry in tensor.boxes]):
        return f"the boxes of tensor {tensor.name!r} do not tile its shape {tensor.shape}"
    itemsize = BY_NAME[tensor.dtype].itemsize
    for box in tensor.boxes:
        room = manifest.objects.get(box.object, -1) * (MAX_RATIO if box.object in manifest.encoded else 1)
        if prod(box.shape) * itemsize > min(room, MAX_OBJECT_BYTES):
            return f"a box of tensor {tensor.name!r} does not fit in its object {box.object}"
    return None
