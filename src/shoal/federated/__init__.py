"""Federated training: many owners, one model, and nothing revealed but the sum.

Clients keep their data and train copies of the model; a server averages what they send, round after round. Rounds,
secure aggregation and privacy accounting are state machines without I/O, whose clock is an argument. The simulation and
the server over TLS drive the same ones.
"""
