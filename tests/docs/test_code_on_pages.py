"""Code on the pages runs, and statements on it are true: the Python API, privacy, and the tutorial on algorithms."""

import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import protofleet
from aggregator.algorithms.registry import GROUP
from examples.python.median_prototypes import MedianProto
from protocol.mqtt.reconnecting_session import BrokerAddress
from protofleet import events
from tests.support.fleets.fleet import write_digits, write_task

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial-algorithm.md").read_text(encoding="utf-8")


def test_code_of_the_tutorial_is_the_code_that_runs() -> None:
    """The Python blocks are the whole of FedNCM, and sections of FedProto."""
    algorithms = ROOT / "aggregator" / "algorithms"
    file, one_shot = (
        (algorithms / name).read_text(encoding="utf-8") for name in ("fedproto.py", "fedncm.py")
    )
    whole, *sections = re.findall(r"(?ms)^```python\n(.*?)\n^```", TUTORIAL)
    assert whole == one_shot[one_shot.index("from collections") :].strip()
    assert len(sections) == 4
    for section in sections:
        assert section in file


def test_no_other_file_of_the_product_knows_the_algorithms() -> None:
    """Only their own files and the registry name them; no device program does."""
    packages = ("aggregator", "edge_client", "protocol", "export")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    for name in ("FedProto", "FedNCM"):
        naming = {
            file.name for file in files if f"{name}(" in (text := file.read_text()) or name.lower() in text
        }
        assert naming == {f"{name.lower()}.py", "registry.py"}


def test_package_of_the_tutorial_names_the_example() -> None:
    """The module imports nothing that an aggregator's environment lacks."""
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", TUTORIAL)
    assert tomllib.loads(text)["project"]["entry-points"][GROUP] == {
        MedianProto.name: f"median_prototypes:{MedianProto.__name__}"
    }
    source = (ROOT / "examples" / "python" / "median_prototypes.py").read_text(encoding="utf-8")
    imported = {name.partition(".")[0] for name in re.findall(r"(?m)^(?:from|import) (\S+)", source)}
    assert imported - sys.stdlib_module_names == {"numpy", "protofleet", "aggregator"}


PYTHON_API = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
CLASSES = ("0", "1", "2")


def test_code_on_the_page_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: BrokerAddress,
) -> None:
    """The second block makes the model of the first one."""
    monkeypatch.chdir(tmp_path)
    photos = write_digits(tmp_path / "photos", classes=[0, 1, 2], each=20)
    task = write_task(tmp_path, classes=CLASSES, quorum=1)
    task.write_text(task.read_text().replace("backbone-0.onnx", "backbone.onnx"))
    (tmp_path / "backbone-0.onnx").rename("backbone.onnx")
    shutil.copy(next(iter(sorted((photos / "1").iterdir()))), "photo.png")
    first, *blocks = re.findall(r"(?ms)^```python\n(.*?)^```", PYTHON_API)
    assert len(blocks) == 7
    whole = "\n".join(["import protofleet", blocks[0], first, *blocks[1:]])
    (tmp_path / "page.py").write_text(whole.replace("127.0.0.1:1883", f"{address.host}:{address.port}"))
    runpy.run_path("page.py")
    printed = capsys.readouterr().out
    assert "submission of" in printed
    assert "head 1" in printed
    assert "backbone" in printed.splitlines()[-1]


def test_events_on_the_page_are_those_of_the_code() -> None:
    """The table has every event of a device and of an aggregator."""
    rows = re.findall(r"^\| `(Device|Aggregator)` \| (`.*`) \|$", PYTHON_API, re.MULTILINE)
    named = {service: re.findall(r"`([A-Z]\w+)`", names) for service, names in rows}
    assert named == {
        "Device": [each.__name__ for each in get_args(events.DeviceEvent)],
        "Aggregator": [each.__name__ for each in get_args(events.AggregatorEvent)],
    }


def test_functions_and_classes_are_on_the_page() -> None:
    """All but the types of what they take and return."""
    types = {"AlgorithmResult", "Backbone", "BrokerAccess", "Head", "ImageSource", "Prediction", "Prototypes"}
    others = {"Comparison", "Simulation", "load_backbone"}
    assert [
        name for name in protofleet.__all__ if name not in PYTHON_API and name not in types | others
    ] == []
