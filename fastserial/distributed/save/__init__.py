"""Who writes what of a save."""
