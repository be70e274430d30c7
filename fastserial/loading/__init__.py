"""From the disk to storages: session, readers, prefetch."""
