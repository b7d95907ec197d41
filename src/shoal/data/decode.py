"""Fields of records as numbers: images, arrays, JSON and plain values.

Bytes are decoded by the field's name where a tar or a folder gives one ("jpg", "npy", "cls", "json", "txt"), else by
how they begin: images and .npy arrays announce themselves. Images become float32 [channels, height, width] in [0, 1].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.errors import DataError, MissingExtra
from shoal.files import printable, read_file

IMAGE_SUFFIXES = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp"})
NPY_MAGIC = b"\x93NUMPY"
MOST_PIXELS = 2**28
"""An image of more pixels is refused: a few bytes may claim to be gigabytes."""


@dataclass(frozen=True)
class ImageForm:
    """What images become: 1 or 3 channels; `size` x `size` pixels, or as they are where it is None."""

    channels: int = 3
    size: int | None = None


def decoded(value: Any, field: str, form: ImageForm) -> Any:
    """The value of a field as an array or a number.

    Raises:
        DataError: it is text, damaged, or of no form that is known.
        MissingExtra: it is an image, and Pillow is not installed.
    """
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # as `datasets` stores images
        value = value["bytes"]
    if isinstance(value, bytes):
        return _from_bytes(value, field.rpartition(".")[2], form)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fiub":
        raise DataError(f"The field {field!r} is a list that is no array of numbers: give lists of numbers.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DataError(f"The field {field!r} has {value.bit_length()} bits, and whole numbers have 64: make it less.")
    if isinstance(value, np.ndarray | int | float | bool):
        return value
    if isinstance(value, list):
        return _from_list(value, field)
    if hasattr(value, "tobytes") and hasattr(value, "getbands"):  # a Pillow image, as `datasets` returns them
        return image_array(value, form)
    if isinstance(value, str):
        raise DataError(
            f"The field {field!r} holds text, {value[:20]!r}: name it as data.text to train on tokens, or leave it out."
        )
    raise DataError(f"The field {field!r} is {_kind(value)}: it must hold numbers, lists of them, or an image.")


def _from_list(value: list[Any], field: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise DataError(f"The field {field!r} is a list that is no array of numbers: give lists of equal lengths.")
    return array


def _from_bytes(content: bytes, suffix: str, form: ImageForm) -> Any:
    if content.startswith(NPY_MAGIC):
        return _npy(content)
    if suffix in ("cls", "id", "index"):
        try:
            return int(content)
        except ValueError:
            raise DataError(f"The field {suffix!r} is {content[:20]!r}, not a whole number: write the class.") from None
    if suffix == "json":
        try:
            return decoded(msgspec.json.decode(content), "json", form)
        except msgspec.DecodeError as error:
            raise DataError(f"The field 'json' is no JSON ({error}): write it anew.") from error
    if suffix in ("txt", "text"):
        return decoded(content.decode("utf-8", "replace"), suffix, form)
    return decode_image(content, form)


def _npy(content: bytes) -> np.ndarray:
    try:
        return np.load(BytesIO(content), allow_pickle=False)
    except Exception as error:  # numpy evaluates the header: a damaged one raises whatever Python's parser does
        raise DataError(f"A .npy field is damaged ({error}): write it anew with numpy.save.") from error


def decode_image(content: bytes, form: ImageForm) -> np.ndarray:
    """The image in `content`, float32 [channels, height, width] in [0, 1].

    Raises:
        DataError: it is no image, or a damaged one.
        MissingExtra: Pillow is not installed.
    """
    pillow = _pillow()
    try:
        with pillow.open(BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"The image has {image.width} x {image.height} pixels: shrink it to 2^28 at most.")
            return image_array(image, form)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise DataError(
            f"{len(content)} bytes that begin with {content[:8]!r} are no readable image ({error}): replace them."
        ) from error


def image_array(image: Any, form: ImageForm) -> np.ndarray:
    """A Pillow image as float32 [channels, height, width] in [0, 1]. Raises DataError where it is not of colours."""
    if image.mode == "F":
        raise DataError("The image holds floating-point numbers, whose range is unknown: save them as .npy.")
    white = 255
    if image.mode.startswith("I"):  # grey of 16 bits, which Pillow's conversions would cut off at 255
        grey, white = np.asarray(image, dtype=np.float32), 2**16 - 1
        if grey.size and not 0 <= grey.min() <= grey.max() <= white:
            raise DataError("The image holds numbers beyond 16 bits, whose range is unknown: save them as .npy.")
        image = _pillow().fromarray(grey)
    else:
        image = image.convert("L" if form.channels == 1 else "RGB")
    if form.size is not None and image.size != (form.size, form.size):
        image = image.resize((form.size, form.size), resample=_pillow().Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32) / np.float32(white)
    if pixels.ndim == 2:
        return np.repeat(pixels[None], form.channels, axis=0)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", extra="data", purpose="decoding images") from error
    return Image


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


# Image folders: a folder for each class, in it the images; classes are numbered in the order of their names. What
# begins with a dot is neither (.ipynb_checkpoints, ._1.jpg).


MOST_BYTES = 2**30


class ImageFolder:
    """Records of `image` (the file's bytes) and `class` (its number), sorted by class and path.

    Paths are kept as one array of bytes and their ends: about 40 bytes for each image.

    Raises:
        DataError: the folder is missing or holds no images in folders, or lacks a class of `classes`.
    """

    def __init__(self, folder: str | Path, *, classes: tuple[str, ...] | None = None) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise DataError(f"There is no folder {self.folder}: correct data.folder.")
        found = sorted(
            entry.name for entry in os.scandir(self.folder) if entry.is_dir() and not entry.name.startswith(".")
        )
        self.classes = tuple(found) if classes is None else classes
        unknown = [name for name in found if name not in self.classes]
        if unknown:
            raise DataError(
                f"{self.folder} holds a class {unknown[0]!r} that the training images lack: give both the same folders."
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        paths, labels = [], []
        for name in found:
            inside = _images(self.folder / name)
            paths += [os.fsencode(path.relative_to(self.folder)) for path in inside]
            labels += [numbers[name]] * len(inside)
        if not paths:
            raise DataError(f"{self.folder} holds no images in folders: put those of each class into one folder there.")
        self._paths, self._ends = b"".join(paths), np.cumsum([len(path) for path in paths])
        self._labels = np.asarray(labels, dtype=np.int32)

    @property
    def targets(self) -> np.ndarray:
        """The class of each image, int32 [images]."""
        return self._labels

    def __len__(self) -> int:
        return len(self._ends)

    def record(self, index: int) -> Mapping[str, Any]:
        """The bytes of image `index` and its class. Raises DataError where the file cannot be read."""
        content = read_file(self._path(index), limit_bytes=MOST_BYTES, error=DataError, repair="put the image back")
        return {"image": content, "class": int(self._labels[index])}

    def where(self, index: int) -> str:
        """The image's path."""
        return printable(self._path(index))

    def _path(self, index: int) -> Path:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return self.folder / os.fsdecode(self._paths[start : int(self._ends[index])])


def _images(folder: Path) -> list[Path]:
    """The images below `folder`, sorted."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES)
