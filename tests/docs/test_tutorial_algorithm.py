"""docs/tutorial-algorithm.md quotes the code, and its statements on adding an algorithm are true."""

import re
import tomllib
from pathlib import Path

import msgspec

from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.config.schema import TaskFile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial-algorithm.md").read_text(encoding="utf-8")


def test_code_on_the_page_is_the_code_that_runs() -> None:
    """The Python blocks are sections of the algorithms' files and of the registry, and leave out only their heads."""
    algorithms = ROOT / "aggregator" / "algorithms"
    file, registry, one_shot = (
        (algorithms / name).read_text(encoding="utf-8")
        for name in ("fedproto.py", "registry.py", "fedncm.py")
    )
    whole, *sections, entry = re.findall(r"(?ms)^```python\n(.*?)\n^```", PAGE)
    assert entry in registry
    assert whole == one_shot[one_shot.index("from collections") :].strip()
    rest = file[file.index("class FedProto") :]
    for section in sections:
        assert section in rest
        rest = rest.replace(section, "")
    assert not rest.strip()


def test_no_other_file_of_the_product_knows_the_algorithms() -> None:
    """Only their own files and the registry name them; no device program does."""
    packages = ("aggregator", "edge_client", "protocol", "export")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    for name in ("FedProto", "FedNCM"):
        naming = {
            file.name for file in files if f"{name}(" in (text := file.read_text()) or name.lower() in text
        }
        assert naming == {f"{name.lower()}.py", "registry.py"}


def test_task_file_on_the_page_selects_the_algorithm() -> None:
    """Its table becomes the algorithm's settings, with defaults for the others."""
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)
    task = msgspec.convert(tomllib.loads(text), TaskFile)
    assert task.learning == FedProto(rounds=20, pull=1.0)
    assert ALGORITHMS["fedproto"] is FedProto
