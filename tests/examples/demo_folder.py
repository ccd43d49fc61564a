"""A folder of the demo, as it is before its programs start."""

from pathlib import Path

from examples.quickstart import digits as data
from examples.quickstart.folder import (
    Folder,
    device_names,
    prepare,
)

DIGITS = data.load()


def filled(root: Path, *, devices: int = 5) -> Folder:
    folder = Folder(root)
    deal = data.deal(DIGITS.labels, devices=devices, seed=0)
    prepare(folder, DIGITS, deal, names=device_names(devices), seed=0)
    return folder
