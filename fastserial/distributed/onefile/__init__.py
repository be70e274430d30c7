"""One ordinary torch file from many ranks, and back: saves, saves beside training, loads."""
