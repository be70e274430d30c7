"""`nox -s docs` runs these tests; `nox -s tests` does not."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("FASTSERIAL_DOCS") else ["test_*.py"]
