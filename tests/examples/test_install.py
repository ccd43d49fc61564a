"""Packages that `make demo` and `make test` install: the build of torch, and one environment for both in any order."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from examples import install
from examples.install import TARGETS, Target

DEMO, ALL = TARGETS["demo"], TARGETS["all"]
TORCH_ALONE = Target("train", takes="", builds=("torch",))
TORCH, TORCHVISION = "torch-2.13.0+cpu-py3-none-any.whl", "torchvision-0.28.0+cpu-py3-none-any.whl"
PLAIN = ("torch-2.15.0-py3-none-any.whl", "torchvision-0.29.0-py3-none-any.whl")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new environment without a GPU, whose pip knows no index."""
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    monkeypatch.setattr(install, "_installed", lambda _: None)
    monkeypatch.setattr(install, "CPU_INDEX", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def configured(folder: Path, monkeypatch: pytest.MonkeyPatch, *wheels: str) -> None:
    """Let the configured index of pip have wheels."""
    for name in wheels:
        (folder / name).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_torch_without_cuda_of_pytorchs_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the index."""
    for wheel in (TORCH, TORCHVISION):
        (folder := tmp_path / wheel.partition("-")[0]).mkdir()
        (folder / "index.html").write_text(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>')
    monkeypatch.setattr(install, "CPU_INDEX", index := tmp_path.as_uri())
    assert install.choose_build(TORCH_ALONE) == ["--extra-index-url", index, "torch==2.13.0+cpu"]


def test_torch_without_cuda_of_the_configured_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older build without CUDA is preferred to a newer one with it."""
    configured(tmp_path, monkeypatch, TORCH, *PLAIN)
    assert install.choose_build(TORCH_ALONE) == ["torch==2.13.0+cpu"]


def test_all_builds_are_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torchvision with CUDA does not work with a torch without."""
    configured(tmp_path, monkeypatch, TORCH, *PLAIN)
    assert install.choose_build(ALL) == []
    configured(tmp_path, monkeypatch, TORCHVISION)
    assert install.choose_build(ALL) == ["torch==2.13.0+cpu", "torchvision==0.28.0+cpu"]


def test_index_that_does_not_answer_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that accepts connections and stays silent costs one timeout, and the build with CUDA is installed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(install, "CPU_INDEX", address)
        monkeypatch.setattr(install, "TIMEOUT_S", 0.5)
        assert install.choose_build(TORCH_ALONE) == []
    assert f"neither the package index nor {address} has torch without CUDA" in capsys.readouterr().out


def test_gpu_keeps_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(tmp_path, monkeypatch, TORCH)
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    assert install.choose_build(TORCH_ALONE) == []


@pytest.mark.parametrize("lists", ["echo 'GPU 0: NVIDIA H200'", "exit 9", "true"])
def test_gpu_is_one_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: str
) -> None:
    """A machine may have the program without a GPU."""
    monkeypatch.undo()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lists}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert install.has_gpu() == ("GPU 0" in lists)


@pytest.mark.parametrize(
    ("versions", "removed"),
    [
        ({"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.29.0"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, False),
        ({"torch": "2.15.0"}, False),
    ],
    ids=["torch alone", "mixed", "both without CUDA", "with CUDA"],
)
def test_torch_is_installed_already(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], *, removed: bool
) -> None:
    """It is replaced where torchvision exists only with CUDA; what works together stays."""
    monkeypatch.setattr(install, "cpu_builds", lambda _: [])
    monkeypatch.setattr(install, "_installed", versions.get)
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "_pip", lambda *arguments: commands.append(arguments))
    assert install.choose_build(ALL) == []
    assert commands == ([("uninstall", "--yes", "torch")] if removed else [])


def test_build_that_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one with CUDA follows, and the output states what each takes."""
    tried: list[list[str]] = []
    monkeypatch.setattr(install, "choose_build", lambda _: ["torch==2.13.0+cpu"])

    def pip_install(_: Target, options: list[str]) -> bool:
        tried.append(options)
        return not options

    monkeypatch.setattr(install, "pip_install", pip_install)
    monkeypatch.setattr(install, "_size_bytes", lambda _: 1_200_000_000)
    install.main("all")
    assert tried == [["torch==2.13.0+cpu"], []]
    printed = capsys.readouterr().out
    assert ALL.takes in printed
    assert ALL.with_cuda in printed
    assert "1.2 GB" in printed


def test_readme_states_what_is_installed() -> None:
    """The sizes in the README are those that the installation states."""
    readme = Path("README.md").read_text(encoding="utf-8")
    size, with_cuda = (takes.partition(" on disk")[0] for takes in (ALL.takes, ALL.with_cuda))
    ends = {"demo": DEMO.takes.partition(" on disk")[0], "test": f"{size}, {with_cuda} with CUDA"}
    for command, end in ends.items():
        (line,) = [line for line in readme.splitlines() if line.startswith(f"make {command} ")]
        assert line.endswith(f"; {end}")


def test_demo_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither build is looked for, and pip compiles nothing: Python compiles what it imports."""
    commands: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> bool:
        commands.append(arguments)
        return True

    monkeypatch.setattr(install, "_pip", pip)
    monkeypatch.setattr(install, "_newest_cpu_build", lambda *_: pytest.fail("looked for a build"))
    assert install.pip_install(DEMO, install.choose_build(DEMO))
    ((*options, extras),) = commands
    assert "--no-compile" in options
    assert extras == ".[cpu,demo]"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("targets", "present", "installs"),
    [
        (("demo",), (), ["demo"]),
        (("test",), (), ["all"]),
        (("check", "demo", "test"), (), ["all"]),
        (("demo",), ("installed",), []),
        (("demo",), ("installed-demo",), []),
        (("test",), ("installed-demo",), ["all"]),
    ],
)
def test_order_of_make_targets(
    tmp_path: Path, targets: tuple[str, ...], present: tuple[str, ...], installs: list[str]
) -> None:
    """The demo installs what it needs, unless everything is, or will be, installed."""
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(name, tmp_path)
    (tmp_path / ".venv").mkdir()
    for stamp in present:
        (tmp_path / ".venv" / stamp).touch()
    done = subprocess.run(
        ["make", "--dry-run", *targets], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = [line.split()[-1] for line in done.stdout.splitlines() if "examples/install.py" in line]
    assert lines == installs
