"""Quantize an exported backbone to 8 bits, and compare its features with PyTorch's on held-out photos."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from export.parity import Reference, compare, photo_files, read_photo
from export.quantization import Calibrated, calibrate, stem
from export.to_onnx import suggestion
from protocol.errors import ConfigError, ProtofleetError
from protocol.models.onnx_metadata import BackboneMetadata, Parity
from protocol.models.preprocessing import preprocess

MIN_PHOTOS = 10

HELD_OUT = 5
"""One of so many photos of the calibration is held out for the comparison."""

TRIED_PHOTOS = 8
"""Held-out photos on which each layer is tried, if a backbone is refused."""

NAMED_LAYERS = 5
"""Layers that a refusal names."""


@dataclass(frozen=True)
class Int8:
    """How a backbone is quantized."""

    calibration: Path
    """Folder of photos such as those of the devices."""
    float_layers: tuple[str, ...] = ()
    """Layers that stay in float32, in addition to `stem`."""
    min_cosine: float = 0.8
    """Least cosine similarity of a feature and PyTorch's, over the photos of the comparison."""

    def convert(
        self, file: bytes, metadata: BackboneMetadata, reference: Reference
    ) -> tuple[onnx.ModelProto, BackboneMetadata]:
        """Return the quantized graph, and its metadata with the parity on the held-out photos.

        Raises:
            ConfigError: there are too few photos, one cannot be read, or the network has no such layer.
            ProtofleetError: the worst cosine is below `min_cosine`; the layers that contribute most are named.
        """
        paths = photo_files(self.calibration)
        if len(paths) < MIN_PHOTOS:
            raise ConfigError(
                f"expected at least {MIN_PHOTOS} photos in {self.calibration}, got {len(paths)}: "
                "a hundred or more like those of the devices are better"
            )
        held_out = paths[::HELD_OUT]
        rest = [path for number, path in enumerate(paths) if number % HELD_OUT]
        images = (preprocess(read_photo(path), metadata.preprocessing) for path in rest)
        calibrated = calibrate(onnx.load_from_string(file), images)
        layers = self._layers(calibrated)
        model = calibrated.to_int8(layers)
        parity = _parity(model, metadata, reference, held_out)
        if not parity.cosine >= self.min_cosine:
            worst = _worst_layers(calibrated, layers, metadata, reference, held_out[:TRIED_PHOTOS])
            raise ProtofleetError(
                f"{metadata.model} loses too much with 8 bits: expected a worst cosine of at least "
                f"{self.min_cosine:g} on {parity.images} held-out photos, got {parity.cosine:.3f}; no file was "
                f"written. The layers that lose most, with the worst cosine of each one quantized: {worst}; "
                "keep some in float32 with --float-layer, or calibrate on more photos of the devices"
            )
        return model, msgspec.structs.replace(metadata, precision="int8", parity=parity)

    def _layers(self, calibrated: Calibrated) -> list[str]:
        """Return the layers to quantize."""
        for name in self.float_layers:
            if name not in calibrated.layers:
                hint = suggestion(name, calibrated.layers)
                raise ConfigError(f"--float-layer: the network has no layer {name!r}; {hint}")
        left_out = {*stem(calibrated.model), *self.float_layers}
        return [name for name in calibrated.layers if name not in left_out]


def _parity(
    model: onnx.ModelProto, metadata: BackboneMetadata, reference: Reference, paths: Sequence[Path]
) -> Parity:
    return compare(
        bytes(model.SerializeToString()),
        preprocessing=metadata.preprocessing,
        reference=reference,
        photos=map(read_photo, paths),
    )


def _worst_layers(
    calibrated: Calibrated,
    layers: Sequence[str],
    metadata: BackboneMetadata,
    reference: Reference,
    paths: Sequence[Path],
) -> str:
    """Return the names of the layers that do the most harm when quantized alone, with the worst cosine of each."""
    cosines = {
        layer: _parity(calibrated.with_one_layer(layer), metadata, reference, paths).cosine
        for layer in layers
    }
    worst = sorted(cosines.items(), key=lambda entry: entry[1])[:NAMED_LAYERS]
    return ", ".join(f"{name} ({cosine:.3f})" for name, cosine in worst)
