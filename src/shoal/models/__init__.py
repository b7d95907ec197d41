"""Models, and what Shoal must know of one to split it: its roles, its chain of layers, how it is called."""
