"""What the tables of a run file ask of each other and of the model, checked before any process starts."""
