"""The same as `torch_program.py` by ONNX Runtime and Pillow alone, one batch after the other.

`python onnx_program.py GRAPH THREADS MODE ARGUMENT...`: MODE is `features` (a folder, and where to write), `predict`
(files), or `arrays` (a number of images), which runs the network alone, again and again on a batch that is in memory.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

GRAPH, THREADS, MODE, *PATHS = sys.argv[1:]
BATCH_SIZE = 32


def main() -> None:
    """Run the mode."""
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(THREADS)
    session = onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
    size = session.get_inputs()[0].shape[1]
    if MODE == "arrays":
        batch = np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, size, size, 3), dtype=np.uint8)
        left = int(PATHS[0])
        while left > 0:
            session.run(["feature"], {"image": batch[:left]})
            left -= BATCH_SIZE
        return

    def read(path: Path) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC))

    if MODE == "predict":
        for path in PATHS:
            probabilities = session.run(["probabilities"], {"image": read(Path(path))[None]})[0]
            print(path, int(probabilities.argmax()))
        return
    paths = sorted(Path(PATHS[0]).glob("*/*.jpg"))
    batches = [paths[start : start + BATCH_SIZE] for start in range(0, len(paths), BATCH_SIZE)]
    features = [
        session.run(["feature"], {"image": np.stack([read(path) for path in batch])})[0] for batch in batches
    ]
    np.save(PATHS[1], np.concatenate(features))


if __name__ == "__main__":
    main()
