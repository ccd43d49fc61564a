"""The files of the current head, waited for."""

import time

from aggregator.heads.rollout import Rollout


def write_files(releases: Rollout) -> None:
    """Write the files of the current head, and wait for the fusion of a model."""
    releases.write_files()
    while releases.files._fusing is not None:
        time.sleep(0.01)
        releases.write_files()
