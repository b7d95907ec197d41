"""Where the time of a few steps goes: what every rank did and when, joined over the ranks, and the bottleneck named."""
