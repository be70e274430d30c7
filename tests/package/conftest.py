"""`nox -s package` runs these tests, on what it built; `nox -s tests` does not."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("FASTSERIAL_PACKAGE") else ["test_*.py"]
