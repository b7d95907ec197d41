"""The training loop of one rank: a step and its update policies, votes, recovery, evaluation, saves that are due."""
