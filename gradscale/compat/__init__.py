"""Other libraries' names for mixed precision, over ours: old code runs as it is."""
