"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8 grey values, which come with the package.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
A fixed fifth is held out: the images whose index has the smallest hashes, whatever the seed of the run.
"""

from __future__ import annotations

import hashlib

import numpy as np

from shoal.data.arrays import Arrays
from shoal.errors import MissingExtra

HELD_OUT_FRACTION = 0.2
BRIGHTEST = 16.0


def digits() -> tuple[Arrays, Arrays]:
    """(train, held out): inputs float32 [1, 8, 8] in [0, 1], targets int64, the digit.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", extra="vision", purpose="data.kind = 'digits'") from error
    images, labels = load_digits(return_X_y=True)
    inputs = (np.asarray(images) / BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = np.asarray(labels).astype(np.int64)
    order = np.array(sorted(range(len(targets)), key=_place))
    held_out, train = np.split(order, [round(HELD_OUT_FRACTION * len(order))])
    return Arrays(inputs[train], targets[train]), Arrays(inputs[held_out], targets[held_out])


def _place(index: int) -> bytes:
    return hashlib.blake2b(str(index).encode(), digest_size=8).digest()
