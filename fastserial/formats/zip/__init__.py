"""torch's zip container: layout, directory, records."""
