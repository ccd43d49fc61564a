"""What takes long to make and several tests of the aggregator need: the graphs of a task of rounds."""

from pathlib import Path

import pytest

from aggregator.config.task_file import load_task
from aggregator.storage.store import Store, open_folder
from aggregator.tasks.task import prepare_task
from tests.support.aggregator_process import IN_ROUNDS, write_task


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task file of rounds, and beside it a state that has its graphs; only to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    store = Store(open_folder(folder / "state"))
    prepare_task(*load_task(write_task(folder, IN_ROUNDS)), store=store)
    store.close()
    return folder
