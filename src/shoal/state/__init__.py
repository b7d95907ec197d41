"""What a rank holds of the state of a run: which tensors are its own, and where they lie in the unsplit model."""
