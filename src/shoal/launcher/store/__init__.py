"""The ranks' key-value store: PyTorch's `Store`, whose connections begin with a proof of the job's token.

token.py      which token: the launcher's, else the user's own
messages.py   requests and replies
server.py     the store itself, in a thread of the process that hosts it; imports no torch
connection.py a rank's connection; imports no torch
client.py     the same as a `torch.distributed.Store`
"""
