"""What a rank keeps in memory for the backward pass, and what it computes again."""
