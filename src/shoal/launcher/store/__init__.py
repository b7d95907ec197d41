"""The ranks' key-value store: PyTorch's `Store`, whose connections begin with a proof of the job's token.

messages.py   requests and replies; which token: the launcher's, else the user's own
server.py     the store itself, in a thread of the process that hosts it; imports no torch
connection.py a rank's connection, also by way of MPI; imports no torch
client.py     the same as a `torch.distributed.Store`
"""
