"""The command line: `main`, and a file for each command but those of `fastserial.bench.cli`."""
