"""Features of a folder of images, or predictions of files, by PyTorch and timm.

`python torch_program.py MODEL SIZE THREADS MODE PATH...`: MODE is `features` (a folder, and where to write), for which
workers decode, or `predict`.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform

MODEL, SIZE, THREADS, MODE, *PATHS = sys.argv[1:]
BATCH_SIZE = 32
CLASSES = 10


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Images of paths, preprocessed as timm does for evaluation."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.transform = create_transform(int(SIZE), crop_pct=1.0)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            transformed: torch.Tensor = self.transform(image.convert("RGB"))
        return transformed


def main() -> None:
    """Run the mode."""
    torch.set_num_threads(int(THREADS))
    sized = {"img_size": int(SIZE)} if MODEL.startswith("vit") else {}
    classes = CLASSES if MODE == "predict" else 0
    network = (
        timm.create_model(MODEL, num_classes=classes, **sized).eval().to(memory_format=torch.channels_last)
    )
    with torch.inference_mode():
        if MODE == "predict":
            images = Images([Path(path) for path in PATHS])
            for number in range(len(images)):
                batch = images[number][None].to(memory_format=torch.channels_last)
                print(PATHS[number], int(network(batch).argmax()))
            return
        images = Images(sorted(Path(PATHS[0]).glob("*/*.jpg")))
        loader = torch.utils.data.DataLoader(images, BATCH_SIZE, num_workers=int(THREADS))
        features = [network(batch.to(memory_format=torch.channels_last)).numpy() for batch in loader]
        np.save(PATHS[1], np.concatenate(features))


if __name__ == "__main__":
    main()
