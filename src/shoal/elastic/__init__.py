"""A rank of an elastic run: replicas come and go while the others go on. The launcher's side is `shoal.fleet`.

replica.py          a rank of a replica: one generation after the other, until the run is over
rendezvous.py       where ranks meet and what they tell each other: those of a replica, those of a generation
generation.py       the beginning of a generation: groups, parts, and the state for those who lack it
committed_state.py  the state that counts, and is carried over to the next generation
state_copy.py       the copy of a state, by chunks with hashes
sinks.py            what a rank reports of its steps, and the sinks of a rank whose number changes
"""
