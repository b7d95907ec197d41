"""Compression of gradients and weights: pure functions on tensors that know no process group.

`codec.Codec` is what every codec does, `config` has the table of each kind, and `costs` the bytes of each on the wire.
What error feedback keeps back is held by `comm.exchanges`, which sends what a codec encodes.
"""
