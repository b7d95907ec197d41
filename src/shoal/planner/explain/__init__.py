"""Plans, bills and what would change them, in words and as plain values."""
