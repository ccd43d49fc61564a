"""The documentation is a website without broken links or anchors."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "make demo" in start, "README.md is the start page"
    assert 'href="operations/index.html"' in start
    assert (tmp_path / "site" / "source" / "deploy" / "Dockerfile.txt").is_file()
    reference = (tmp_path / "site" / "python-reference.html").read_text(encoding="utf-8")
    assert 'id="protofleet.Model.predict"' in reference
