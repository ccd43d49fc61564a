"""Networks are chosen, loaded and described as timm has them, or refused; published weights on real images."""

import io
import itertools
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models._hub import save_for_hf
from torch import Tensor

from export.backbones import Choice, list_models, load_backbone, weights_digest
from export.parity import compared_photos, timm_reference
from export.to_onnx import Exported, export_module
from protocol.errors import ConfigError
from protocol.models.preprocessing import Preprocessing, preprocess
from protocol.storage.blobstore import file_digest

MODEL = "test_resnet"
"""timm's own network for tests: 0.5 M parameters, images of 160 x 160."""


def made(name: str = MODEL, *, seed: int = 1) -> Any:
    """A network of timm whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return timm.create_model(name).eval()


def headless(name: str = MODEL) -> Any:
    """Return the network without its classifier."""
    module = made(name)
    module.reset_classifier(0)
    return module


def state_of(module: Any) -> dict[str, Tensor]:
    """Return the network's weights, each copied."""
    return {key: value.clone() for key, value in module.state_dict().items()}


def same_features(left: Any, right: Any, *, edge: int = 160) -> bool:
    """Return True if two networks give the same features of a random image."""
    image = torch.randn(1, 3, edge, edge, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return torch.equal(left(image), right(image))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_weights_are_loaded_from_safetensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made(name)), path)

    backbone = load_backbone(Choice(name, weights=path))

    assert same_features(backbone.module, headless(name))
    assert backbone.metadata.feature_size == made(name).num_features
    assert backbone.metadata.weights == "weights.safetensors"
    assert backbone.metadata.weights_sha256 == file_digest(path).hex()


@pytest.mark.parametrize("key", ["state_dict", "model", "model_ema", None])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_nested_torch_checkpoints_are_read(tmp_path: Path, key: str | None, prefix: str) -> None:
    state = {prefix + name: value for name, value in state_of(made()).items()}
    path = tmp_path / "weights.pth"
    torch.save(state if key is None else {"epoch": 7, key: state}, path)
    assert same_features(load_backbone(Choice(MODEL, weights=path)).module, headless())


def test_batchnorm_counters_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    state = {key: value for key, value in state_of(made()).items() if "num_batches" not in key}
    assert len(state) < len(made().state_dict())
    save_file(state, path)
    assert same_features(load_backbone(Choice(MODEL, weights=path)).module, headless())


def test_mismatched_weights_are_listed(tmp_path: Path) -> None:
    state = state_of(made())
    state["other.weight"] = state.pop("conv1.0.weight")
    state["bn1.weight"] = torch.zeros(5)
    state["fc_other.weight"] = torch.zeros(5)  # not of the classifier, whose name is fc
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    with pytest.raises(ConfigError) as caught:
        load_backbone(Choice(MODEL, weights=path))
    message = str(caught.value)
    assert "does not fit test_resnet" in message
    assert "1 missing (conv1.0.weight)" in message
    assert "2 unexpected (fc_other.weight, other.weight)" in message
    assert "1 of another shape (bn1.weight 5 instead of" in message


def test_weights_of_another_network_are_summarized(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made("test_vit")), path)
    with pytest.raises(ConfigError, match=r"\d+ missing \(.*, \.\.\.\); \d+ unexpected") as caught:
        load_backbone(Choice(MODEL, weights=path))
    assert len(str(caught.value)) < 1000


class Evil:
    """A class that a pickle could name."""


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_files_without_weights_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="no weights at"):
        load_backbone(Choice(MODEL, weights=path))
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(ConfigError, match="neither safetensors nor a PyTorch checkpoint with weights only"):
        load_backbone(Choice(MODEL, weights=path))
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(ConfigError, match="neither safetensors nor a PyTorch checkpoint with weights only"):
        load_backbone(Choice(MODEL, weights=path))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("mobilnetv2_100", random=True), "did you mean .*mobilenetv2_100"),
        (Choice("qqqqqqqq", random=True), "look for one with --list"),
        (
            Choice("test_resnet.nothing", random=True),
            r"no weights 'nothing' of test_resnet: expected test_resnet\.r160_in1k",
        ),
        (Choice(MODEL), r"--weights FILE, --pretrained .* or --random"),
        (Choice(MODEL, random=True, pretrained=True), r"--weights FILE, --pretrained .* or --random"),
        (
            Choice(MODEL, random=True, model_kwargs={"color": "red"}),
            r"with {'color': 'red'}: .*'color'; check --model-kwargs",
        ),
        (
            Choice(MODEL, random=True, model_kwargs={"global_pool": ""}),
            r"no pooled feature: .* got \(2, \d+, 5, 5\); .*global_pool=avg",
        ),
        (Choice("test_convnext", random=True, image_size=8), "--image-size"),
    ],
)
def test_unsuitable_choice_is_refused(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_backbone(choice)


def test_image_size_resizes_position_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made("test_vit")), path)
    backbone = load_backbone(Choice("test_vit", weights=path, image_size=96))
    expected = headless("test_vit")
    expected.set_input_size(img_size=(96, 96))
    assert (backbone.metadata.preprocessing.height, backbone.metadata.preprocessing.width) == (96, 96)
    assert same_features(backbone.module, expected, edge=96)


@pytest.mark.parametrize(("size", "height", "width"), [(128, 128, 128), ((96, 128), 96, 128)])
def test_img_size_argument_sets_the_image_size(size: object, height: int, width: int) -> None:
    spec = load_backbone(
        Choice("test_vit", random=True, model_kwargs={"img_size": size})
    ).metadata.preprocessing
    assert (spec.height, spec.width) == (height, width)


def test_preprocessing_is_timms() -> None:
    config = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    backbone = load_backbone(Choice("vit_tiny_patch16_224", random=True))
    spec = backbone.metadata.preprocessing
    assert (3, spec.height, spec.width) == config.input_size
    assert (spec.crop_pct, spec.crop_mode) == (config.crop_pct, config.crop_mode)
    assert spec.interpolation == config.interpolation
    assert (backbone.metadata.mean, backbone.metadata.std) == (config.mean, config.std)


def test_preprocessing_can_be_overridden() -> None:
    half = (0.5, 0.5, 0.5)
    backbone = load_backbone(Choice(MODEL, random=True, mean=half, std=half, crop_pct=1.0, image_size=64))
    assert (backbone.metadata.mean, backbone.metadata.std) == (half, half)
    assert backbone.metadata.preprocessing.crop_pct == 1.0
    assert backbone.config["input_size"] == (3, 64, 64)
    assert backbone.config["mean"] == half


def test_preprocessing_is_the_one_in_the_config_that_timm_writes_beside_weights(tmp_path: Path) -> None:
    """With the arguments of the model; the choice overrides both."""
    recorded = {
        "input_size": (3, 64, 64), "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bilinear",
        "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.4, 0.3),
    }  # fmt: skip
    arguments = {"pad_type": "same"}
    source = timm.create_model("test_efficientnet", **arguments, pretrained_cfg_overlay=recorded)
    save_for_hf(source, tmp_path, model_args=arguments, safe_serialization=True)
    choice = Choice("test_efficientnet", weights=tmp_path / "model.safetensors")

    backbone = load_backbone(choice)

    assert backbone.settings == recorded | {"padding": "same"}
    assert backbone.assumed == ()
    source.reset_classifier(0)
    assert same_features(backbone.module, source.eval(), edge=64)
    overridden = load_backbone(replace(choice, crop_pct=1.0, model_kwargs={"pad_type": ""}))
    assert overridden.settings == recorded | {"crop_pct": 1.0, "padding": "symmetric"}


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("levit_128s", 224),  # has a normalization beside its classifier
        ("coat_tiny", 160),  # has position embeddings of its image size
    ],
)
def test_weights_are_loaded_as_timm_loads_them(tmp_path: Path, name: str, edge: int) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made(name)), path)
    expected = timm.create_model(
        name,
        pretrained=True,
        num_classes=0,
        img_size=edge,
        pretrained_cfg_overlay={"file": str(path), "source": "file"},
    )
    backbone = load_backbone(Choice(name, weights=path, image_size=edge))
    assert same_features(backbone.module, expected.eval(), edge=edge)


def test_weights_that_timm_cannot_adapt_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    state = {**state_of(made("test_vit")), "pos_embed": torch.zeros(3)}
    save_file(state, path)
    with pytest.raises(ConfigError, match=r"does not fit test_vit|timm cannot adapt .* to test_vit"):
        load_backbone(Choice("test_vit", weights=path))


def test_recorded_size_resizes_position_embeddings(tmp_path: Path) -> None:
    source = timm.create_model("test_vit", img_size=96)
    save_for_hf(source, tmp_path, model_args={"img_size": [96, 96]}, safe_serialization=True)
    backbone = load_backbone(Choice("test_vit", weights=tmp_path / "model.safetensors"))
    assert backbone.settings["input_size"] == (3, 96, 96)


def test_preprocessing_in_the_metadata_of_weights_is_used_and_the_rest_assumed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    notes = {"mean": "[0.4, 0.4, 0.4]", "interpolation": "lanczos", "note": "{draft"}
    save_file(state_of(made()), path, metadata=notes)
    backbone = load_backbone(Choice(MODEL, weights=path, crop_pct=1.0))
    assert (backbone.metadata.mean, backbone.settings["interpolation"]) == ((0.4, 0.4, 0.4), "lanczos")
    assert sorted(backbone.assumed) == ["crop_mode", "input_size", "padding", "std"]
    assert load_backbone(Choice(MODEL, random=True)).assumed == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot read the preprocessing in .*config.json"),
        ('{"model_args": ' + '{"a":' * 100_000, "cannot read the preprocessing in .*config.json"),
        ('{"architecture": "\xff"}', "cannot read the preprocessing in .*config.json"),
        ('{"pretrained_cfg": {"std": [0, 1, 1]}}', "cannot read the preprocessing in .*config.json: .*std"),
        ('{"architecture": "resnet18"}', "config.json is of 'resnet18', not of test_resnet: name that MODEL"),
        (r'{"architecture": "\u001b[2J"}', r"config.json is of '\\x1b\[2J', not of test_resnet"),
    ],
)
def test_config_that_does_not_fit_is_named(tmp_path: Path, config: str, message: str) -> None:
    save_file(state_of(made()), tmp_path / "weights.safetensors")
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        load_backbone(Choice(MODEL, weights=tmp_path / "weights.safetensors"))


def test_borders_have_timms_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "export.backbones.resolve_model_data_config",
        lambda *a, **k: resolve_model_data_config(*a, **k) | {"crop_mode": "border"},
    )
    spec = load_backbone(Choice(MODEL, random=True, mean=(0.485, 0.456, 0.406))).metadata.preprocessing
    assert (spec.crop_mode, spec.fill) == ("border", (124, 116, 104))


def test_weights_digest_identifies_weights() -> None:
    assert weights_digest(made()) == weights_digest(made())
    assert weights_digest(made()) != weights_digest(made(seed=2))


def test_models_are_listed_by_pattern_or_part() -> None:
    assert "resnet18" in list_models("resnet*")
    assert "seresnet18" not in list_models("resnet*")
    assert "tf_mobilenetv3_small_100" in list_models("mobilenetv3")
    with pytest.raises(ConfigError, match=r"no model like 'resnet18x'; did you mean .*resnet18"):
        list_models("resnet18x")


SHARED = Path(__file__).resolve().parents[4] / "shared"
WEIGHTS = Path(os.environ.get("PROTOFLEET_BENCH_WEIGHTS", SHARED / "weights"))
DATA = Path(os.environ.get("PROTOFLEET_BENCH_DATA", SHARED / "data"))
HALF = (0.5, 0.5, 0.5)
TRAIN, TEST = 50, 30
"""Images a class."""


def need(path: Path) -> Path:
    """Skip where a file that is not part of the project is absent."""
    if not path.is_file():
        pytest.skip(f"no {path}: see PROTOFLEET_BENCH_WEIGHTS and PROTOFLEET_BENCH_DATA")
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A published backbone, trained on pixels from -1 to 1, compared with torch on thirty photographs."""
    weights = need(WEIGHTS / "tf_mobilenetv3_small_100.google_qat_in1k.safetensors")
    folder = tmp_path_factory.mktemp("real")
    zipfile.ZipFile(need(DATA / "photos.zip")).extractall(folder)
    backbone = load_backbone(
        Choice("tf_mobilenetv3_small_100", weights, image_size=96, mean=HALF, std=HALF, crop_pct=1.0)
    )
    return export_module(
        backbone.module,
        backbone.metadata,
        path=folder / "backbone.onnx",
        reference=timm_reference(backbone.module, backbone.config),
        photos=itertools.islice(compared_photos(folder), 30),
    )


def test_published_weights_agree_with_torch(exported: Exported) -> None:
    parity = exported.metadata.parity
    assert parity is not None
    assert parity.images == 30
    assert parity.relative_error < 1e-4
    assert parity.cosine > 0.9999999


def cifar(part: str, count: int, spec: Preprocessing) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first images of each class, as a backbone wants them, and their classes."""
    with zipfile.ZipFile(need(DATA / "cifar10.zip")) as archive:
        names = sorted(name for name in archive.namelist() if f"{part}/" in name and name.endswith(".jpg"))
        classes = sorted({name.split("/")[-2] for name in names})
        taken = [[name for name in names if f"/{label}/" in name][:count] for label in classes]
        images = [
            preprocess(Image.open(io.BytesIO(archive.read(name))), spec) for same in taken for name in same
        ]
    return np.stack(images), np.repeat(np.arange(len(classes)), count)


def probe(features: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Ridge regression on one-hot classes: (L, C)."""
    gram = features.T.astype(np.float64) @ features + len(features) * np.eye(features.shape[1])
    targets = np.eye(10)[labels] - 0.1
    return np.asarray(np.linalg.solve(gram, features.T @ targets), dtype=np.float64)


def test_exported_features_separate_cifar10_classes(exported: Exported) -> None:
    session = onnxruntime.InferenceSession(exported.path)
    spec = exported.metadata.preprocessing
    (train, train_labels), (test, test_labels) = cifar("train", TRAIN, spec), cifar("test", TEST, spec)
    weights = probe(session.run(["feature"], {"image": train})[0], train_labels)
    scores = session.run(["feature"], {"image": test})[0] @ weights
    assert np.mean(scores.argmax(axis=1) == test_labels) > 0.4
