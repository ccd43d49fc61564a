"""Modules for more than one machine, in `aggregator.cluster`: imported when a URL or a setting names them."""

import importlib
from collections.abc import Mapping
from typing import Any

from protocol.errors import ConfigError, RuntimeMissing, pip_command

DATABASES = {"postgresql": "aggregator.cluster.tables", "postgres": "aggregator.cluster.tables"}
"""By the scheme of `--store`: `check_url` and `open_database`."""

BLOBS = {"s3": "aggregator.cluster.object_blobs"}
"""By the scheme of `--blobs`: `open_blobs` for a job, and `blobs_of` for an aggregator."""

ENGINES = {"ray": "aggregator.cluster.ray_engine"}
"""By `[training] engine`, beside `local`: `require`, and `execute` as of `training.execution`."""


def cluster_module(modules: Mapping[str, str], url: str) -> Any:
    """Return the module for a URL, or for an engine's name.

    Raises:
        ConfigError: there is none for the scheme.
        RuntimeMissing: its libraries are not installed.
    """
    name = modules.get(url.partition("://")[0])
    if name is None:
        raise ConfigError(f"expected a URL that begins with {' or '.join(f'{each}://' for each in modules)}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeMissing(
            f"{error.name} is not installed: {pip_command('aggregator,cpu,cluster')}"
        ) from None
