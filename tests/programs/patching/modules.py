"""Prints what a Python process imports that does nothing."""

import sys

print(*sorted(sys.modules))
