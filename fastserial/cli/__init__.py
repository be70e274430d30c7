"""The command line: `main`, and a file for each command or group of them."""
