"""`python -m fastserial`: the command line."""

from __future__ import annotations

from fastserial.cli.main import main

if __name__ == "__main__":
    main()
