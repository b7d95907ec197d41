"""What a batch is to a loop of its user and to PyTorch: samples of any kind, packed into tensors and put together
again.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from shoal.data.sample import Sample, Source, Tree, as_tree
from shoal.errors import UserCodeError

# Data sets of a user's own loop: whatever a sample is, it is all inputs, and what is a target the loop knows.


# What a batch carries beside tensors: texts, None, bytes, lists of any length, a user's dataclasses.
#
# They stay on the host and mean nothing to a model, but they belong to samples: a microbatch that is cut, padded or
# read in another process must keep them beside the right ones. So each is packed into a row of bytes, uint8 [bytes]: a
# header in JSON that says what it is, and the memory of the tensors inside. Rows side by side, padded with zeros, are a
# tensor [samples, bytes] like any other until the loop gets its batch, where `unpacked` makes the values again. No
# pickle.
#
# In a tree, a dict with one reserved key stands for it: `EACH` a value for each sample (in a list, or a tuple), `WHOLE`
# one for the batch, and `CLASS` beside the fields of a dataclass or a named tuple.


EACH, EACH_OF_TUPLE, WHOLE, CLASS = PACKED = "\0each", "\0each of a tuple", "\0whole", "\0class"
_HEAD_BYTES, _ALIGNED_BYTES = 16, 16


def hosted(sample: Any) -> Any:
    """`sample` with what is no number packed, and lists as tuples."""
    if _is_record(sample):
        fields = {name: hosted(value) for name, value in _fields_of(sample).items()}
        return {CLASS: pack(_name_of(type(sample))), **fields}
    if isinstance(sample, list | tuple) and sample:
        return tuple(map(hosted, sample))
    if isinstance(sample, Mapping) and sample:
        return {key: hosted(value) for key, value in sample.items()}
    if sample is None or isinstance(sample, str | bytes | list | tuple | Mapping):
        return {EACH: pack(sample)}
    return sample


def as_rows(batch: Any, samples: int) -> Any:
    """What a `collate_fn` made of so many samples, with what does not have a row for each of them packed.

    So many values in a list or tuple are one for each, unless one of them is a tensor of the batch.
    """
    if _has_rows(batch, samples):
        return batch
    if _is_record(batch):
        fields = {name: as_rows(value, samples) for name, value in _fields_of(batch).items()}
        return {CLASS: _repeated(_name_of(type(batch)), samples), **fields}
    if isinstance(batch, Mapping) and batch:
        return {key: as_rows(value, samples) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and batch:
        if len(batch) == samples and not any(_has_rows(value, samples) for value in batch):
            key = EACH if isinstance(batch, list) else EACH_OF_TUPLE
            return {key: torch.nn.utils.rnn.pad_sequence([pack(value) for value in batch], batch_first=True)}
        return tuple(as_rows(value, samples) for value in batch)
    return {WHOLE: _repeated(batch, samples)}


def unpacked(tree: Any, device: torch.device) -> Any:
    """`tree` with the values in place of what was packed, as a list where there is one for each sample; tensors on
    `device`. Itself, where nothing was.
    """
    if isinstance(tree, tuple):
        made = tuple(unpacked(branch, device) for branch in tree)
        return tree if all(map(is_, made, tree)) else made
    if not isinstance(tree, dict):
        return tree
    if EACH in tree:
        return [unpack(row, device) for row in tree[EACH].cpu()]
    if EACH_OF_TUPLE in tree:
        return tuple(unpack(row, device) for row in tree[EACH_OF_TUPLE].cpu())
    if WHOLE in tree:
        return unpack(tree[WHOLE][0].cpu(), device)
    fields = {key: unpacked(branch, device) for key, branch in tree.items() if key != CLASS}
    return _made(unpack(tree[CLASS][0].cpu(), device), fields) if CLASS in tree else fields


def pack(value: Any) -> Tensor:
    """uint8 [bytes]. Raises `UserCodeError` for a value of a kind that cannot be carried."""
    memory = bytearray()
    header = json.dumps(_described(value, memory)).encode()
    sizes = np.array([len(header), len(memory)], dtype="<i8").tobytes()
    start = -(_HEAD_BYTES + len(header)) % _ALIGNED_BYTES
    return torch.frombuffer(bytearray(sizes + header + b" " * start + memory), dtype=torch.uint8)


def unpack(row: Tensor, device: torch.device) -> Any:
    """The value of a row on the host, behind which padding may lie."""
    data = row.contiguous().numpy()
    header_bytes, _ = np.frombuffer(data[:_HEAD_BYTES].tobytes(), dtype="<i8").tolist()
    end = _HEAD_BYTES + header_bytes
    return _value(json.loads(data[_HEAD_BYTES:end].tobytes()), data[end + (-end) % _ALIGNED_BYTES :], device)


def _is_record(value: Any) -> bool:
    return not isinstance(value, type) and _makes_records(type(value))


def _makes_records(kind: type) -> bool:
    """Dataclasses, and named tuples that are found by their names; others are tuples."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _found(f"{kind.__module__}:{kind.__qualname__}") is kind
    return dataclasses.is_dataclass(kind)


def _fields_of(record: Any) -> dict[str, Any]:
    """Those of a dataclass or a named tuple."""
    if isinstance(record, tuple):
        return dict(zip(record._fields, record, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _has_rows(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0 and len(value) == samples


def _repeated(value: Any, samples: int) -> Tensor:
    return pack(value).expand(samples, -1)


def _name_of(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise UserCodeError(
            f"a sample is of {kind.__qualname__}, a class inside of a function, which another process could not find: "
            "define it at the top of its module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    return kind


def _made(name: str, fields: Mapping[str, Any]) -> Any:
    """An object of the class `name`, which is there: the user's own samples are of it."""
    kind = _found(name)
    if not isinstance(kind, type) or not _makes_records(kind):
        raise UserCodeError(f"a sample is of the class {name}, which is not there any more: define it once")
    if issubclass(kind, tuple):
        return kind(**fields)
    made = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _described(value: Any, memory: bytearray) -> Any:
    """What JSON says of `value`; the memory of tensors is appended."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)).copy())
    if isinstance(value, Tensor):
        whole, place = value.detach().cpu().contiguous(), len(memory)
        memory += whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        memory += bytes(-len(memory) % _ALIGNED_BYTES)
        return {"tensor": [str(whole.dtype).removeprefix("torch."), list(whole.shape), place, whole.nbytes]}
    if _is_record(value):
        fields = [[name, _described(each, memory)] for name, each in _fields_of(value).items()]
        return {"class": _name_of(type(value)), "fields": fields}
    if isinstance(value, Mapping):
        return {"dict": [[_described(k, memory), _described(v, memory)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {
            type(value).__name__ if type(value) in (list, tuple) else "tuple": [_described(v, memory) for v in value]
        }
    raise UserCodeError(
        f"a sample holds an object of {type(value).__qualname__}; it may hold tensors, arrays, numbers, texts, bytes, "
        "None, and lists, tuples, dicts and dataclasses of them"
    )


def _value(described: Any, memory: np.ndarray, device: torch.device) -> Any:
    if not isinstance(described, dict):
        return described
    if "bytes" in described:
        return base64.b64decode(described["bytes"])
    if "tensor" in described:
        dtype, shape, place, size = described["tensor"]
        if not size:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        flat = torch.from_numpy(memory[place : place + size].copy())
        return flat.view(getattr(torch, dtype)).reshape(shape).to(device)
    values: Sequence[Any] = next(iter(described.values())) if "class" not in described else described["fields"]
    if "list" in described or "tuple" in described:
        made = [_value(each, memory, device) for each in values]
        return made if "list" in described else tuple(made)
    pairs = {_value(key, memory, device): _value(each, memory, device) for key, each in values}
    return _made(described["class"], pairs) if "class" in described else pairs


class AsInputs:
    """`source`, each sample as inputs that count once: a tensor, an array, a number, a text or bytes, or a tuple, list,
    dict or dataclass of them and of None.

    Raises `UserCodeError` where a sample is something else.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def reading(self, source: Source) -> AsInputs:
        """The same of another source."""
        return AsInputs(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.sample_of(self.source[index])

    def sample_of(self, item: Any) -> Sample:
        """What the source has returned."""
        inputs = as_tree(item if item is None else hosted(item), "sample")  # None is a part, but no sample
        return Sample(inputs, *_COUNTS_ONCE, pads=False)

    def stacked(self, items: Sequence[Any]) -> Sample | None:
        """What the source has returned of several; None where they are not alike (`side_by_side`)."""
        inputs = side_by_side(items)
        return None if inputs is None else _all_inputs(inputs, len(items))


_COUNTS_ONCE = (torch.zeros((), dtype=torch.int64), torch.ones(()))
"""Targets and weights of a sample that is all inputs."""

# Samples of one form are put side by side as a `DataLoader` does it: a stack for each leaf. To make a tree of tensors
# of each sample, and then a batch of the trees, takes Python longer than the stacks, and longer than many a data set
# takes to make a sample.


_NUMBERS = frozenset(map(np.dtype, ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")))
"""Types of NumPy's that stay as they are."""
_form_of = attrgetter("shape", "dtype")


def side_by_side(items: Sequence[Any], *, lists: bool = True) -> Tree | None:
    """What `hosted` and `as_tree` make of `items` one by one, with a new leading dim; None where they are not all of
    one form, or hold anything but plain tensors, arrays and numbers. `lists` count as tuples, or they are none.
    """
    kinds, first = set(map(type, items)), items[0]
    if len(kinds) > 1:
        return None
    kind = kinds.pop()
    if kind is Tensor:
        return torch.stack([*items]).detach() if len(set(map(_form_of, items))) == 1 else None
    if kind is float:
        return torch.from_numpy(np.array(items, dtype=np.float32))
    if kind is bool or kind is int:
        numbers = np.array(items)
        return torch.from_numpy(numbers) if numbers.dtype in _NUMBERS else None
    if kind is np.ndarray or issubclass(kind, np.generic):
        if first.dtype not in _NUMBERS or len(set(map(_form_of, items))) > 1:
            return None
        # in order, whatever that of the arrays (transposed images): loops may take views of a batch
        return torch.from_numpy(np.stack(items, out=np.empty((len(items), *first.shape), first.dtype)))
    if kind is dict and first and all(each.keys() == first.keys() for each in items):
        branches = _each_side_by_side(([each[key] for each in items] for key in first), lists=lists)
        return None if branches is None else dict(zip(map(str, first), branches, strict=True))
    if (kind is tuple or (kind is list and lists)) and first and len(set(map(len, items))) == 1:
        return _each_side_by_side(zip(*items, strict=True), lists=lists)
    return None


def _each_side_by_side(parts: Iterable[Sequence[Any]], *, lists: bool) -> tuple[Tree, ...] | None:
    found = []
    for part in parts:
        if (branch := side_by_side(part, lists=lists)) is None:
            return None
        found.append(branch)
    return tuple(found)


Rows = Callable[[np.ndarray], Any]
"""From the ids of samples, int64 [samples], to these side by side."""


def rows_of(source: object) -> Rows | None:
    """What reads many samples at once of PyTorch's `TensorDataset`, of a `Subset` of one, and of these as inputs; None
    of others.
    """
    if type(source) is AsInputs:
        within = rows_of(source.source)
        return None if within is None else lambda ids: _all_inputs(within(ids), len(ids))
    if type(source) is Subset:
        within, indices = rows_of(source.dataset), source.indices
        return None if within is None else lambda ids: within(np.array([int(indices[i]) for i in ids.tolist()]))
    if type(source) is not TensorDataset or not all(map(_is_plain, source.tensors)):
        return None
    # Stacked samples lie in order, whatever the order of the tensors (channels last): loops may take views of a batch.
    return lambda ids: tuple(tensor.detach()[torch.from_numpy(ids)].contiguous() for tensor in source.tensors)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided


def _all_inputs(inputs: Any, samples: int) -> Sample:
    """`inputs` of so many samples, which have no targets and count once each."""
    return Sample(inputs, torch.zeros(samples, dtype=torch.int64), torch.ones(samples))


class Collated(AsInputs):
    """The same with the loop's own way to put samples side by side, as `collate_fn` of PyTorch's DataLoader. What it
    returns has a row for each sample, or is carried as it is (`as_rows`).
    """

    def __init__(self, source: Source, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(source)
        self._collate = collate

    def reading(self, source: Source) -> Collated:
        return Collated(source, self._collate)

    def item_at(self, index: int) -> Any:
        """The sample as the loop's data set returns it, which only `collate` has to understand."""
        return self.source[index]

    def collated(self, items: Sequence[Any]) -> Sample:
        """What `collate` makes of `items`."""
        inputs = as_tree(as_rows(self._collate(list(items)), len(items)), "batch")
        return _all_inputs(inputs, len(items))
