"""Which weights are trained at all: masks that prune and grow, and layers that are frozen."""
