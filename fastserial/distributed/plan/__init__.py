"""Who writes and who reads which bytes of a file: arithmetic that is the same on every rank."""
