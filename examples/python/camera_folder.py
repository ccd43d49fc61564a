"""A robot that predicts from the folder of its camera: each new image once, in the order of their names.

Run: python examples/python/camera_folder.py model.onnx camera

With `Model.installed()` in place of `Model.load`, it uses the head that `edge-client` has installed, always the newest.
"""

import sys
import time
from pathlib import Path

import protofleet


def classify_new(model: protofleet.Model, folder: Path, seen: set[Path]) -> list[tuple[Path, str]]:
    """Return the images in a folder that are not in `seen`, with their classes, and add them to it."""
    found = []
    for path in sorted(set(folder.glob("*.png")) | set(folder.glob("*.jpg"))):
        if path in seen:
            continue
        try:
            prediction = model.predict(path)
        except protofleet.ProtofleetError as error:
            if time.time() - path.stat().st_mtime < 2:
                continue  # the camera still writes it: try again
            print(f"left out: {error}")
        else:
            found.append((path, prediction.label))
            print(f"{path.name}: {prediction.label} ({prediction.probability:.0%})")
        seen.add(path)
    return found


if __name__ == "__main__":
    classifier, seen_images = protofleet.Model.load(sys.argv[1]), set[Path]()
    while True:
        classify_new(classifier, Path(sys.argv[2]), seen_images)
        time.sleep(0.2)
