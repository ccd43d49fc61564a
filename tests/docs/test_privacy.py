"""The program on the privacy page runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "privacy.md"


def test_program_measures_the_length_of_features(tmp_path: Path) -> None:
    """It omits files that are not images."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rng = np.random.default_rng(0)
    images = [tmp_path / f"{number}.png" for number in range(4)]
    for image in images[:3]:
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(image)
    images[3].write_bytes(b"not an image")
    backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
    command = [sys.executable, "-c", program, backbone, *images]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    low, middle, high = map(float, done.stdout.strip(" []\n").split())
    assert 0 < low <= middle <= high
