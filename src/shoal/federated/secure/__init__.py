"""Secure aggregation: the server learns the sum of what clients send, and nothing else about it.

SecAgg (Bonawitz et al., CCS 2017, eprint 2017/281) and SecAgg+ (Bell et al., CCS 2020, eprint 2020/704). Client u sends

    y_u = x_u + PRG(b_u) + sum over neighbours v > u of PRG(s_uv) - sum over neighbours v < u of PRG(s_uv)

modulo 2^32 or 2^64. s_uv is agreed between u and v by X25519, so the masks of pairs cancel in the sum. b_u and the key
behind the s_uv are shared among the neighbours of u: of a client that is there to the end they give the shares of b_u,
of one that was lost the shares of its key, and never both. In SecAgg every client is a neighbour of every other, in
SecAgg+ each has k.

The server is honest but curious: it follows the protocol and relays keys unchanged. Clients may lie.
"""
