"""Stores on both databases."""

import pytest

from aggregator.storage.store import Store


@pytest.fixture
def store(either_store: Store) -> Store:
    return either_store
