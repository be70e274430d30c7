"""What tests of files share."""

from __future__ import annotations

import pytest

from fastserial.files import destination


@pytest.fixture(params=[False, True], ids=["nameless", "named"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to make the new file: without a name first, and with a temporary one."""
    if request.param:
        monkeypatch.setattr(destination, "_can_link", lambda: False)
    return bool(request.param)
