"""The wheel and the source distribution, built from a tree that contains a state folder."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aggregator", "edge_client", "export", "protocol", "protofleet", "sums_operator")
SECRETS = ("aggregator.sqlite", "identity/signing.key", "identity/ca.key", "state/identity/ca.crt")

pytestmark = pytest.mark.skipif(
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


def test_wheel_holds_code_and_the_device_page_only(source: Path, tmp_path: Path) -> None:
    """Every Python file of the packages, their py.typed, the device's page, and the wheel's own metadata."""
    with zipfile.ZipFile(build(source, "wheel", tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    code = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "py.typed", "page/*.*")
        for file in (ROOT / package).rglob(pattern)
    }
    assert names == code


def test_source_distribution_holds_no_state(source: Path, tmp_path: Path) -> None:
    """Keys, certificates and databases are left out."""
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        names = archive.getnames()
    assert any(name.endswith("aggregator/py.typed") for name in names)
    assert not [name for name in names if name.endswith((".key", ".crt", ".sqlite"))]


def test_wheel_of_the_dashboard_holds_its_page(tmp_path: Path) -> None:
    """With the libraries from npm, their licenses, and nothing that belongs to the build."""
    source = tmp_path / "dashboard"
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
    assert names == {"dashboard/__init__.py", *static}
    assert "dashboard/static/vendor/LICENSE.preact" in names
