"""Parameters that stages on several ranks hold a copy of, such as an embedding that is also the head.

Each copy gets the gradient of its own use. The parameter's gradient is their sum, and every copy needs it, in the same
bits: the copies must stay equal for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle


def sum_copies(gradient: Tensor, holders: Sequence[int], group: Collective) -> None:
    """`gradient` becomes the sum over the ranks of the pipeline that hold a copy; all of them call it.

    Added in rank order on each, so that the sums are the same bits. Pairs take turns, the lower rank sending first, for
    backends that keep a pair's transfers in one sequence.
    """
    own = gradient.detach().contiguous()
    copies = {group.rank: own}
    handles: list[Handle] = []
    for other in holders:
        if other == group.rank:
            continue
        copies[other] = torch.empty_like(own)
        send, receive = (lambda o=other: group.send(own, to=o)), (lambda o=other: group.recv(copies[o], source=o))
        handles += [send(), receive()] if group.rank < other else [receive(), send()]
    for handle in handles:
        handle.wait()
    gradient.copy_(torch.stack([copies[rank] for rank in sorted(copies)]).sum(dim=0))
