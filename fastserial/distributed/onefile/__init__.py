"""One ordinary torch file from many ranks, and back: saves, background saves, loads."""
