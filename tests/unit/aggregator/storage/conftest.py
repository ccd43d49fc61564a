"""The database of the stores that tests open themselves."""

import pytest


@pytest.fixture
def database_url() -> str:
    """No URL: the tables are in the state directory."""
    return ""
