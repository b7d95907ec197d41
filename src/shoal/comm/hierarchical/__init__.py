"""Ranks on several hosts: shared memory inside each, the first ranks of the hosts among themselves."""
