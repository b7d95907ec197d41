"""How replicas agree: all-reduce, parameter servers, local steps, gossip, Hogwild.

`strategy` has the two protocols that every strategy implements, `config` the table of each kind.
"""
