"""Communication between ranks: groups of processes, the collectives they call, and what goes over the wire.

    mesh         a layout bound to groups of ranks
    collective   what code calls: all_reduce, broadcast, send, ...; a call under way; the group of one rank
    exchanges    what ranks do with a flat buffer of gradients
    seam         the process group around every backend, through which every byte passes
    ledger       calls, bytes and seconds of every collective
    conditions   faults and rates that tests and labs impose on a wire
    board        small messages through the run's store, each bounded in time

How a backend is chosen, and what each does: docs/transports.md.
"""
