"""The wheel and its extras: without the packages of its extra, a command ends in one line with what to install."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aggregator.cli import cli as aggregator
from aggregator.http.join_page import NOT_SERVED, TYPES
from aggregator.storage.open_store import open_store
from edge_client.cli import cli as edge_client
from protocol.errors import pip_command
from protofleet.cli import cli as protofleet
from sums_operator.cli import cli as sums
from tests.support.fleets.aggregator_process import without, write_task
from tests.support.fleets.fleet import with_startup_code
from tests.support.fleets.fork_server import run_command
from tests.support.messages.submissions import SERVED

ROOT = Path(__file__).parents[2]

EXTRAS = (
    "amqtt", "onnx", "onnxruntime", "onnxscript", "prometheus_client", "rich", "safetensors",
    "scipy", "segno", "sklearn", "starlette", "timm", "torch", "uvicorn", "websockets",
)  # fmt: skip
"""Packages that only extras bring."""

TRAINING = ("onnxscript", "timm", "torch")
"""Packages of the extras `train` and `export` alone that could be imported for a training."""

PRIVATE = ("--private", "--images", "5")

EDGE_CLIENT = {
    "": ["--broker", "127.0.0.1:9", "--data", "{folder}", "--state", "{folder}/device"],
    "run": ["run", "--broker", "127.0.0.1:9", "--data", "{folder}", "--state", "{folder}/device"],
    "dry-run": ["dry-run", "--broker", "127.0.0.1:9", "--data", "{folder}", "--state", "{folder}/device"],
    "cost": ["cost", "--backbone", "{folder}/task.toml", "--data", "{folder}"],
    "init": ["init", "{folder}/device.toml", "--broker", "::1", "--backbone", "{folder}/task.toml", *PRIVATE],
    "predict": ["predict", "photo.jpg", "--state", "{folder}/device"],
    "doctor": ["doctor", "--state", "{folder}/device", "--json"],
    "review": ["review", "--data", "{folder}", "--state", "{folder}/device"],
    "serve": ["serve", "--state", "{folder}/device"],
    "status": ["status", "--state", "{folder}/device"],
    "watch": ["watch", "{folder}", "--state", "{folder}/device"],
    "join": ["join", f"http://127.0.0.1:9/join/#fleet=barn&key={'0' * 64}&secret={'A' * 22}&name=shed-9"],
    "take-over": ["take-over", "--state", "{folder}/device"],
    "adopt-spent": ["adopt-spent", "--state", "{folder}/device"],
    "make-key": ["make-key", "{folder}/signing.key"],
}
AGGREGATOR = {
    "init": ["--class", "a", "--backbone", "photo.onnx"],
    "doctor": [],
    "check": ["{folder}/task.toml"],
    "run": ["--task", "{folder}/task.toml"],
    "status": [],
    "rollback": [],
    "promote": [],
    "release": ["shed-1"],
    "enroll": ["shed-1", "--out", "{folder}/shed-1"],
    "enroll-broker": ["broker.example", "--out", "{folder}/broker"],
    "enroll-sums": ["--out", "{folder}/sums"],
    "revoke": ["shed-1"],
    "forget": ["shed-1"],
    "reset-key": ["shed-1"],
    "issue-key": ["--root", "{folder}/root.key", "--fleet", "orchard", "--out", "{folder}/issued"],
    "rotate-key": [],
    "take-over": [],
}
SIMULATION, COMPARISON = (
    [command, "{folder}", "--backbone", "{folder}/task.toml"] for command in ("simulate", "compare")
)
PUBLIC_MAP = ["public-map", "{folder}", "--backbone", "{folder}/task.toml", "--out", "{folder}/public.map"]
SUMS = {
    "init": ["{folder}/sums"],
    "new-task": ["{folder}/none", "{folder}/card.toml"],
    "end-task": ["{folder}/none", "7f83b1657ff1fc53"],
    "run": ["--state", "{folder}", "--broker", "127.0.0.1:9", "--fleet", "barn"],
    "status": ["--state", "{folder}"],
}
EXPORT = {"export": ["resnet18", "--random"], "list": ["--list", "resnet*"]}


def _state(command: str) -> list[str]:
    """Return the option of the state folder, which commands for another machine do not have."""
    return [] if command in {"issue-key", "init", "check"} else ["--state", "{folder}/aggregator"]


COMMANDS = [
    *(("edge_client.cli", "cpu", arguments) for arguments in EDGE_CLIENT.values()),
    *(
        ("aggregator.cli", "aggregator,cpu", [name, *arguments, *_state(name)])
        for name, arguments in AGGREGATOR.items()
    ),
    *(("export.cli", "export,cpu", arguments) for arguments in EXPORT.values()),
    ("protofleet.cli", "aggregator,cpu", SIMULATION),
    ("protofleet.cli", "aggregator,cpu,export", COMPARISON),
    ("protofleet.cli", "aggregator,cpu", PUBLIC_MAP),
]
WITHOUT_EXTRAS = (
    *("enroll", "enroll-broker", "enroll-sums", "revoke", "forget", "reset-key", "issue-key"),
    *("rotate-key", "rollback", "promote", "release", "take-over", "make-key", "adopt-spent", "join"),
)
"""Commands that need none."""


def test_every_command_is_tried() -> None:
    assert EDGE_CLIENT.keys() == {"", *edge_client.commands}
    assert AGGREGATOR.keys() == set(aggregator.commands)
    assert {SIMULATION[0], COMPARISON[0], PUBLIC_MAP[0]} == set(protofleet.commands)
    assert SUMS.keys() == set(sums.commands)


@pytest.mark.parametrize(("module", "extra", "arguments"), COMMANDS)
def test_missing_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, arguments: list[str]
) -> None:
    """Each command names the extra, or needs none."""
    write_task(tmp_path)
    store = open_store(tmp_path / "aggregator")
    store.facts.put(SERVED)
    store.close()
    given = [each.format(folder=tmp_path) for each in arguments]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError('onnxruntime')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the device's jobs
    done = run_command(f"{without(*EXTRAS)}from {module} import main", *given)
    assert "Traceback" not in done.stderr
    if arguments[0] == "doctor" and module == "edge_client.cli":
        assert "pip install" in done.stdout
        return
    if arguments[0] in WITHOUT_EXTRAS or ("status" in arguments and module == "edge_client.cli"):
        assert "pip install" not in done.stderr
        return
    assert done.returncode == 1
    (line,) = (each for each in done.stderr.splitlines() if "no broker at" not in each)
    assert line.startswith("error: ")
    assert pip_command(extra) in line


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ('algorithm = "fedpcl"', 'algorithm = "fedpcl"'),
        ('[training]\nrecipe = "paper"', 'training.recipe = "paper"'),
    ],
    ids=["rounds", "adapter"],
)
def test_task_names_the_extra_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, setting: str
) -> None:
    """Without PyTorch, `run` ends before it has a state, and `check` and `doctor` say so before."""
    task, state = str(write_task(tmp_path, settings)), str(tmp_path / "state")
    program = f"{without(*TRAINING)}from aggregator.cli import main"
    install = pip_command("aggregator,cpu,train")
    hidden = with_startup_code(tmp_path / "hidden", without(*TRAINING))  # of the program `serve`
    monkeypatch.setenv("PYTHONPATH", hidden["PYTHONPATH"])
    done = run_command(program, "run", "--task", task, "--state", state)
    reason = f"{setting} needs onnxscript and torch"
    assert (done.returncode, done.stderr) == (1, f"error: {reason}: {install}\n")
    assert not Path(state).exists()
    done = run_command(program, "check", task)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"note       {reason}, which this machine lacks: {install}\n" in done.stdout
    done = run_command(program, "doctor", "--task", task, "--state", state, "--broker", "127.0.0.1:9")
    assert done.returncode == 1
    assert re.search(rf"failed +packages +{reason}\n +do: {re.escape(install)}\n", done.stdout)


def test_task_of_one_upload_needs_no_pytorch(tmp_path: Path) -> None:
    """`check` has no note on it, and `doctor` says what there is not."""
    task = str(write_task(tmp_path))
    program = f"{without(*TRAINING)}from aggregator.cli import main"
    assert "torch" not in run_command(program, "check", task).stdout
    given = ("--task", task, "--state", str(tmp_path / "state"), "--broker", "127.0.0.1:9")
    shown = run_command(program, "doctor", *given).stdout
    assert re.search(r"ok +packages +onnx \S+, no torch: neither rounds nor FedTC's adapter\n", shown)
    task = str(write_task(tmp_path, '[training]\ndevice = "cuda"'))
    text = "training.device is cuda, and torch is not installed"
    assert re.search(rf"warning +runtime +{text}\n", run_command(program, "doctor", *given).stdout)


def test_names_of_the_python_api_need_no_other_extras_than_the_page_says() -> None:
    """Those of the page's first row are imported without the packages of `aggregator`; others name an extra."""
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (.*) \| `\[([a-z,]+)\]` \|$", page)
    names = {extras: re.findall(r"`(\w+)`", row) for row, extras in rows}
    assert list(names) == ["cpu", "aggregator,cpu", "aggregator,cpu,train", "aggregator,cpu,export"]
    program = f"""{without(*(set(EXTRAS) - {"onnxruntime"}))}
import numpy as np, protofleet
for name in {names["cpu"]}:
    getattr(protofleet, name)
made = protofleet.device_prototypes(np.eye(60, 8, dtype="f4"), np.arange(60) % 2)
data = protofleet.encode_submission(made, classes=["a", "b"])
read = protofleet.decode_submission(data, classes=["a", "b"], feature_size=8)
for call in (
    lambda: protofleet.train_head([read], classes=2),
    lambda: protofleet.FederatedClassifier().fit(np.eye(60, 8), np.arange(60) % 2),
    lambda: protofleet.simulate,
    lambda: protofleet.Aggregator("task.toml"),
    lambda: protofleet.compare,
):
    try:
        call()
    except protofleet.ProtofleetError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names["aggregator,cpu"] + names["aggregator,cpu,export"])
    assert all(pip_command("aggregator,cpu") in line for line in lines[:4])
    assert pip_command("aggregator,cpu,export") in lines[4]


def test_simulated_rounds_name_the_extra(tmp_path: Path) -> None:
    done = run_command(
        f"{without(*TRAINING)}from protofleet.cli import main",
        *("simulate", str(tmp_path), "--backbone", "b.onnx", "--algorithm", "fpl"),
    )
    error = f"error: onnxscript is not installed: {pip_command('aggregator,cpu,train')}\n"
    assert (done.returncode, done.stderr) == (1, error)


def test_training_in_rounds_and_the_adapter_alone_import_pytorch() -> None:
    """All other modules of the aggregator and the Python API are imported without it."""
    program = f"""{without(*TRAINING)}
import importlib, pkgutil, aggregator, protofleet
for package in (aggregator, protofleet):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            module.name.endswith("__main__") or importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name in {TRAINING}:
                print(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "aggregator.algorithms.fedpcl_step",
        "aggregator.algorithms.fedtc.adapter",
        "aggregator.algorithms.layers",
        "aggregator.graphs.parity",
        "aggregator.graphs.tracing",
    ]


@pytest.mark.parametrize("name", SUMS)
def test_second_operator_needs_no_extra(tmp_path: Path, name: str) -> None:
    given = [each.format(folder=tmp_path) for each in SUMS[name]]
    done = run_command(f"{without(*EXTRAS)}from sums_operator.cli import main", name, *given)
    assert done.returncode == (0 if name == "init" else 1)
    assert not re.search("Traceback|pip install", done.stderr)


def _found(pattern: str, *folders: str) -> list[str]:
    """Return the texts that match, with their files, in the project's pages and programs below folders."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    return [
        f"{file.relative_to(ROOT)}: {text}"
        for file in files
        if file.suffix in {".md", ".py", ".sh", ".service"}
        for text in re.findall(pattern, file.read_text(encoding="utf-8"))
    ]


def test_no_page_and_no_message_installs_protofleet_from_the_package_index() -> None:
    """It is not there, and another package may take its name: the wheel's file is named instead."""
    products = ("aggregator", "dashboard", "edge_client", "export", "protocol", "protofleet", "sums_operator")
    assert not _found(
        r"""pip install ['"]?protofleet(?![-\w]).*|'protofleet\[.*""", *products, "docs", "deploy", "examples"
    )
    assert "protofleet[" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_pages_install_into_a_virtual_environment() -> None:
    """Debian 12 and Raspberry Pi OS refuse pip outside of one."""
    assert not _found(r"(?<![/\w])pip (?:install|wheel) .*", "docs")


PACKAGES = ("aggregator", "edge_client", "export", "protocol", "protofleet", "sums_operator")
SECRETS = ("aggregator.sqlite", "identity/signing.key", "identity/ca.key", "state/identity/ca.crt")

needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed: pip install hatchling"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that are built from, with secrets in every package and in deploy/."""
    root = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, root)
    for name in (*PACKAGES, "deploy"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for secret in SECRETS:
            (root / name / secret).parent.mkdir(parents=True, exist_ok=True)
            (root / name / secret).write_text("secret", encoding="ascii")
    return root


def build(source: Path, target: str, out: Path) -> Path:
    """Build with hatchling, as `pip wheel` does, and return the file; this needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@needs_hatchling
def test_wheel_holds_code_vectors_and_the_device_page_only(source: Path, tmp_path: Path) -> None:
    """Every Python file, py.typed, test vector and page of the packages, and the wheel's own metadata."""
    with zipfile.ZipFile(build(source, "wheel", tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    code = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "py.typed", "page/*.*", "vectors/*.json")
        for file in (ROOT / package).rglob(pattern)
    }
    assert names == code


@needs_hatchling
def test_source_distribution_holds_no_state(source: Path, tmp_path: Path) -> None:
    """Keys, certificates and databases are left out."""
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        names = archive.getnames()
    assert any(name.endswith("aggregator/py.typed") for name in names)
    assert not [name for name in names if name.endswith((".key", ".crt", ".sqlite"))]


@needs_hatchling
def test_wheel_of_the_dashboard_holds_its_page(tmp_path: Path) -> None:
    """With the libraries from npm, their licenses, the page for phones, and nothing that belongs to the build."""
    source = tmp_path / "dashboard"
    shutil.copytree(ROOT / "phone", tmp_path / "phone")
    shutil.copytree(ROOT / "dashboard", source, ignore=shutil.ignore_patterns("__pycache__", "vendor*"))
    shutil.copy(ROOT / "dashboard" / "vendor.py", source)
    vendor = source / "static" / "vendor"
    vendor.mkdir()
    for name in ("standalone.module.js", "LICENSE.preact", "README.txt"):
        (vendor / name).write_text(name, encoding="ascii")
    with zipfile.ZipFile(build(source, "wheel", tmp_path / "out")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    static = {
        f"dashboard/{file.relative_to(source)}" for file in (source / "static").rglob("*") if file.is_file()
    }
    phone = {
        f"dashboard/{file.relative_to(ROOT)}"
        for file in (ROOT / "phone").rglob("*")
        if file.suffix in TYPES and file.relative_to(ROOT).parts[1] not in NOT_SERVED
    }
    assert names == {"dashboard/__init__.py", *static, *phone}
    assert "dashboard/phone/core/resize.js" in names
    assert "dashboard/static/vendor/LICENSE.preact" in names
