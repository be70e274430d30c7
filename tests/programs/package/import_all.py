"""Import modules by name: NAME... Prints the name of each that lacks another package, and which."""

from __future__ import annotations

import importlib
import sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
