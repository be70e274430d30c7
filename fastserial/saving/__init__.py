"""From torch's records to the disk: archive, writer, blocks."""
