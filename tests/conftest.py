"""For all tests: what the user of this machine tuned does not change their saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastserial.tuning import lookup


@pytest.fixture(autouse=True, scope="session")
def _own_config_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        lookup.forget_cache()
        yield
