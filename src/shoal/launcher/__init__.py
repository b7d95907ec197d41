"""Starting ranks, finding each other, and dying well. What needs torch is in `rendezvous`; hosts and slow links on one
machine are in `lab`.
"""
