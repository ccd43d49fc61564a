"""Makes the demo's backbone: `python -m examples.quickstart.train_backbone`.

A small convolutional network is trained to classify the garments of Fashion-MNIST, and written without its
classifier as `backbone.onnx`. It never sees a digit. BACKBONE.md has the figures of the one in the repository.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from examples.quickstart.distort import EDGE, distort
from examples.quickstart.folder import BACKBONE
from export.to_onnx import Exported, export_module
from protocol.cli import run
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata
from protocol.models.preprocessing import Preprocessing

DATA = Path(os.environ.get("PROTOFLEET_BENCH_DATA", "../shared/data")) / "fashion_mnist.npz"
THREADS = 2
BATCH_SIZE = 256
PEAK_RATE = 4e-3
MEAN = STD = 0.5
WIDTH = 32
PLACES = 4
"""The features depend on the place in the image: 16 channels at 4 x 4 places are the 256."""


@dataclass(frozen=True)
class Images:
    """Part of a data set: images (n, 28, 28) uint8 and labels (n,) int64."""

    images: Tensor
    labels: Tensor


def load_fashion(file: Path) -> tuple[Images, Images]:
    """Read the training and the test part of Fashion-MNIST.

    Raises:
        ConfigError: the file is missing, or is something else.
    """
    try:
        with np.load(file) as arrays:
            parts = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read Fashion-MNIST from {file} ({error}): give --data an npz file with x_train, y_train, "
            "x_test and y_test"
        ) from error
    train, test = (Images(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))) for x, y in parts)
    return train, test


def make_backbone() -> nn.Sequential:
    """Return a network from normalized (n, 3, 32, 32) to features (n, 256), with random weights."""
    channels = 256 // PLACES**2
    return nn.Sequential(
        *_block(3, WIDTH, stride=2),
        *_block(WIDTH, WIDTH),
        *_block(WIDTH, 2 * WIDTH, stride=2),
        *_block(2 * WIDTH, 2 * WIDTH),
        *_block(2 * WIDTH, 4 * WIDTH, stride=2),
        *_block(4 * WIDTH, 4 * WIDTH),
        *_block(4 * WIDTH, channels, kernel=1),
        nn.Flatten(),
    )


def _block(inputs: int, outputs: int, *, stride: int = 1, kernel: int = 3) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()


def train(
    data: Images, *, epochs: int, seed: int, on_epoch: Callable[[int, float], None]
) -> tuple[nn.Module, nn.Module]:
    """Train a backbone and a linear classifier of its features on distorted images.

    The same data, epochs, seed and number of threads on the same machine give the same weights. `on_epoch` is called
    with the number of each epoch, from 1, and its mean loss.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    backbone = make_backbone().to(memory_format=torch.channels_last)
    classifier = nn.Linear(256, 10)
    parameters = [*backbone.parameters(), *classifier.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, weight_decay=0.02)
    batches = len(data.labels) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=epochs * batches)
    for epoch in range(epochs):
        total = 0.0
        order = torch.randperm(len(data.labels), generator=generator)[: batches * BATCH_SIZE]
        for members in torch.split(order, BATCH_SIZE):
            images = distort(data.images[members][:, None] / 255, generator)
            logits = classifier(backbone(_as_input(images)))
            loss = functional.cross_entropy(logits, data.labels[members], label_smoothing=0.05)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.item() / batches
        on_epoch(epoch + 1, total)
    return backbone.eval(), classifier.eval()


def _as_input(images: Tensor) -> Tensor:
    """Convert gray (n, 1, h, w) in 0 to 1 to the network's normalized RGB."""
    rgb = ((images - MEAN) / STD).expand(-1, 3, -1, -1)
    return rgb.contiguous(memory_format=torch.channels_last)


def accuracy(backbone: nn.Module, classifier: nn.Module, data: Images) -> float:
    """Return the accuracy on undistorted images."""
    correct = 0
    with torch.inference_mode():
        for images, labels in zip(
            torch.split(data.images, 1000), torch.split(data.labels, 1000), strict=True
        ):
            scaled = functional.interpolate(images[:, None] / 255, (EDGE, EDGE), mode="bicubic").clamp(0, 1)
            correct += int((classifier(backbone(_as_input(scaled))).argmax(dim=1) == labels).sum())
    return correct / len(data.labels)


def write(backbone: nn.Module, file: Path) -> Exported:
    """Write the network as an ONNX file for devices."""
    plain = backbone.to(memory_format=torch.contiguous_format)
    metadata = BackboneMetadata(
        model="quickstart",
        feature_size=256,
        preprocessing=Preprocessing(height=EDGE, width=EDGE, interpolation="bicubic"),
        mean=(MEAN,) * 3,
        std=(STD,) * 3,
        weights_sha256=hashlib.sha256(save(plain.state_dict())).hexdigest(),
        weights="Fashion-MNIST",
    )
    return export_module(plain, metadata, path=file)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DATA,
    show_default=True,
    help="Fashion-MNIST as npz: x_train, y_train, x_test, y_test.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=BACKBONE,
    show_default=True,
    help="The ONNX file to write.",
)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def cli(*, data: Path, out: Path, epochs: int, seed: int) -> None:
    """Train the demo's backbone on Fashion-MNIST and write it as ONNX."""
    train_part, test_part = load_fashion(data)
    torch.set_num_threads(THREADS)
    started_s = time.monotonic()
    backbone, classifier = train(
        train_part,
        epochs=epochs,
        seed=seed,
        on_epoch=lambda epoch, loss: click.echo(f"epoch {epoch} of {epochs}: loss {loss:.3f}", err=True),
    )
    seconds = time.monotonic() - started_s
    score = accuracy(backbone, classifier, test_part)
    written = write(backbone, out)
    click.echo(f"{score:.2%} accuracy on the test images, trained in {seconds:.0f} s")
    click.echo(f"{written.path}: {written.size_bytes} bytes, sha256 {written.sha256}")


if __name__ == "__main__":
    run(cli, program="python -m examples.quickstart.train_backbone")
