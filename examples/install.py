"""Install what a make target needs into the environment that runs this: `python examples/install.py demo` or `all`.

The environment is new: nothing but the standard library and pip is in it.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds without CUDA."""

TIMEOUT_S = 5.0
"""How long an index may take to answer."""


@dataclass(frozen=True)
class Target:
    """An installation, and what it takes on Linux x86-64 with Python 3.11.

    Attributes:
        extras: of protofleet.
        takes: size and duration, without CUDA if there are builds with it.
        builds: packages that have a build with CUDA and one without; all are of one kind.
        with_cuda: size and duration with CUDA.
    """

    extras: str
    takes: str
    builds: tuple[str, ...] = ()
    with_cuda: str = ""


TARGETS = {
    "demo": Target(
        "cpu,demo",
        takes="0.4 GB on disk, 0.1 GB to download, a minute",
    ),
    "all": Target(
        "cpu,demo,cluster,train,export,dev",
        takes="about 2 GB on disk, a few minutes",
        builds=("torch", "torchvision"),
        with_cuda="6.5 GB on disk, 4.7 GB of it for CUDA, several minutes",
    ),
}


def main(name: str) -> None:
    """Install a target, and say what it takes."""
    target, started_s = TARGETS[name], time.monotonic()
    options = choose_build(target)
    takes = target.takes if options or not target.builds else target.with_cuda
    _say(f"installing protofleet[{target.extras}] into {_short(sys.prefix)}: {takes}")
    if not pip_install(target, options):
        if not options:
            sys.exit("error: pip failed: see its message above, and run make again")
        _say(f"that failed; installing the build with CUDA: {target.with_cuda}")
        if not pip_install(target, []):
            sys.exit("error: pip failed: see its message above, and run make again")
    size = _size_bytes(Path(sys.prefix))
    _say(f"installed in {time.monotonic() - started_s:.0f} s: {size / 1e9:.1f} GB in {_short(sys.prefix)}")


def choose_build(target: Target) -> list[str]:
    """Return the options of pip for the builds without CUDA; none where there is a GPU, or there are no such builds.

    Installed builds stay, unless torch is without CUDA and another package of the target is not.
    """
    if not target.builds:
        return []
    versions = [_installed(name) for name in target.builds]
    installed = versions[0]
    if installed and (not _is_cpu(installed) or all(map(_is_cpu, versions))):
        _say(f"torch {installed} is installed")
        return []
    if has_gpu():
        _say("nvidia-smi lists a GPU: installing torch with CUDA")
        return []
    names = " and ".join(target.builds)
    _say(f"no NVIDIA GPU: looking for {names} without CUDA")
    if found := cpu_builds(target.builds):
        _say(f"found {', '.join(found[-len(target.builds) :])}")
        return found
    _say(f"neither the package index nor {CPU_INDEX} has {names} without CUDA for this Python")
    if installed:
        _say(f"removing torch {installed}: {target.builds[-1]} needs the build with CUDA")
        _pip("uninstall", "--yes", "torch")
    return []


def has_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU lists one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    done = subprocess.run([program, "-L"], capture_output=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


def cpu_builds(names: tuple[str, ...]) -> list[str]:
    """Return the options of pip for the newest builds of packages without CUDA; none unless all have one.

    The configured package index is asked first, then PyTorch's.
    """
    for index in ([], ["--extra-index-url", CPU_INDEX]):
        versions = [_newest_cpu_build(name, index) for name in names]
        if all(versions):
            return [*index, *(f"{name}=={version}" for name, version in zip(names, versions, strict=True))]
    return []


def _newest_cpu_build(name: str, index: list[str]) -> str | None:
    done = subprocess.run(
        [*_command("index"), "versions", "--retries", "0", "--timeout", str(TIMEOUT_S), *index, name],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"[\w.]+\+cpu\b", done.stdout)
    return found[0] if found else None


def pip_install(target: Target, options: list[str]) -> bool:
    """Install a target in editable form; return whether that succeeded.

    Python compiles the modules that it imports: all of them take pip a minute.
    """
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    return _pip("install", *quiet, "--no-compile", *options, "--editable", f".[{target.extras}]")


def _pip(*arguments: str) -> bool:
    return subprocess.run(_command(*arguments), check=False).returncode == 0


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def _is_cpu(version: str | None) -> bool:
    return version is not None and version.endswith("+cpu")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _size_bytes(folder: Path) -> int:
    files = (path.lstat() for path in folder.rglob("*"))
    return sum(file.st_blocks * 512 for file in files)


def _short(path: str) -> str:
    return os.path.relpath(path)


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
