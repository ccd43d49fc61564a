"""The page about privacy has a program that is as good as it looks."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "privacy.md"


def test_the_length_of_features_can_be_measured_as_it_says(tmp_path: Path) -> None:
    """On the quickstart's backbone, of a few images; what is no image is left out."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rng = np.random.default_rng(0)
    images = [tmp_path / f"{number}.png" for number in range(4)]
    for image in images[:3]:
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(image)
    images[3].write_bytes(b"none")
    backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
    done = subprocess.run(
        [sys.executable, "-c", program, backbone, *images],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    low, middle, high = map(float, done.stdout.strip(" []\n").split())
    assert 0 < low <= middle <= high
