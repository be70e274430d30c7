"""From the disk to storages: session, readers, read-ahead."""
