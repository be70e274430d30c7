"""`nox -s docs` runs these tests; `nox -s tests` only what needs no package of the site."""

from __future__ import annotations

import os

_LONG = ["test_pages.py", "test_site.py", "test_symptoms.py"]
collect_ignore_glob = [] if os.environ.get("FASTSERIAL_DOCS") else _LONG
