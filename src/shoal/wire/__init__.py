"""The wire for arrays of any framework: NumPy, JAX, TensorFlow, CuPy, torch. It never imports torch.

    from shoal import wire

    group = wire.init()                              # in a rank of any launcher; alone without one
    mean = group.all_reduce(gradient, op="avg")      # an array of any framework on the CPU; returns NumPy's
    group.all_reduce(x, out=x)                       # in place
    rows = group.all_gather(x)                       # [size, *x.shape]

Ranks of one host exchange through shared memory, by the core in C that `shoal.c10d` uses; ranks of several through TCP,
two levels where all hosts have as many ranks. `shoal.c10d.init_process_group` brings ranks with torch into the same
group.
"""

from __future__ import annotations

from shoal.wire.adaptive import Adaptive
from shoal.wire.arrays import as_array
from shoal.wire.codecs import Cast, Codec, ErrorFeedback, Int8, TopK
from shoal.wire.connect import init, world
from shoal.wire.group import Group

__all__ = ["Adaptive", "Cast", "Codec", "ErrorFeedback", "Group", "Int8", "TopK", "as_array", "init", "world"]
