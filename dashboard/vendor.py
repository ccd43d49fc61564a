"""Fetches the libraries of the dashboard and of the page for phones from npm: `python -m dashboard.vendor`.

`package-lock.json` pins each package by sha512. What the pages use is copied to `static/vendor/`, with the licenses;
nothing of it is in the repository.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent

TARGET = FOLDER / "static" / "vendor"

FILES = {
    "htm": ("preact/standalone.module.js",),
    "mqtt": ("dist/mqtt.esm.js",),
    "preact": (),  # in htm's file
    "uplot": ("dist/uPlot.iife.min.js", "dist/uPlot.min.css"),
    "onnxruntime-web": (
        "dist/ort.wasm.min.mjs",
        "dist/ort-wasm-simd-threaded.mjs",
        "dist/ort-wasm-simd-threaded.wasm",
    ),
}
"""The files that the pages use, of each package."""

MIT = "https://opensource.org/license/mit"


def main() -> int:
    """Fetch the libraries; returns the exit status."""
    npm = shutil.which("npm")
    if npm is None:
        sys.stderr.write("npm is not installed: the dashboard's page needs it once, for its libraries\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(FOLDER / name, folder)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, check=False)
        if done.returncode:
            return done.returncode
        copy_files(Path(folder) / "node_modules")
    return 0


def copy_files(modules: Path) -> None:
    """Copy the files that the pages use out of npm's folder, whole or not at all."""
    temporary = TARGET.with_name("vendor.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    lines = ["Libraries of the pages, unchanged from npm.\n"]
    for name, files in FILES.items():
        package = json.loads((modules / name / "package.json").read_text(encoding="utf-8"))
        for file in files:
            shutil.copy(modules / name / file, temporary)
        license_file = next((modules / name).glob("LICENSE*"), None)
        if license_file is not None:
            shutil.copy(license_file, temporary / f"LICENSE.{name}")
        sizes = ", ".join(
            f"{Path(file).name} {(modules / name / file).stat().st_size:,} bytes" for file in files
        )
        where = f"LICENSE.{name}" if license_file is not None else MIT
        version = f"{name} {package['version']}" if files else f"{name}, bundled by htm"
        lines.append(f"{version}, {package['license']} ({where}){sizes and ': '}{sizes}")
    (temporary / "README.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    shutil.rmtree(TARGET, ignore_errors=True)
    temporary.rename(TARGET)


if __name__ == "__main__":
    sys.exit(main())
