"""`shoal verify`: the same steps under the layout and in one process, compared number by number.

verify.py           one rank of the proof of a layout; strategies.py of one where replicas take steps of their own
reference.py        the reference on rank 0
layout_step.py      a step under the layout, gathered; replicas.py one of replicas, taken apart
plain_rules.py      how replicas agree, as the papers write it
coded.py, moments.py, pipedream.py      what lossy codecs, moments of 8 bits and stale weights need beside
refusals.py         what cannot be proved
verdict.py          what was found, for people and as JSON
"""
