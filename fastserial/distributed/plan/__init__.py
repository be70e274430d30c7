"""Which rank writes or reads which bytes of a file: arithmetic, the same on every rank."""
