"""`python -m research privacy`: attacks on features and prototypes, and the accuracy protection costs."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from aggregator.algorithms.fedtc.adapter import torch_device
from aggregator.algorithms.fedtc.recipe import RECIPES
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import NAMES, load_data
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from research.privacy.differencing import Resubmitted, resubmit
from research.privacy.explained import explained, fit_linear
from research.privacy.noisy_prototypes import Mechanism
from research.privacy.plots import Rows, draw_accuracies, draw_images, rows_of
from research.privacy.private_fleet import (
    PAPER,
    Accuracy,
    Fleet,
    Protection,
    noise_multiplier,
    run_private,
)
from research.privacy.reconstruction import (
    PRIVATE_BATCH,
    attack,
    forms_of,
    learn_decoder,
    set_scene,
)
from research.privacy.sums import NON_MEMBERS, SIZES, SumLeak, attack_sums

BATCHES = (2, 5, 25, 100)
LEAKS = {
    "": "<22",
    "SSIM own": ">9.3f",
    "others": ">8.3f",
    "class": ">8.3f",
    "own first": ">11.1%",
    "R2 linear": ">11.3f",
    "R2": ">8.3f",
    "AUC cos": ">9.3f",
    "AUC lik": ">9.3f",
    "1/100 cos": ">11.1%",
    "1/100 lik": ">11.1%",
}
RESUBMITTED = {
    "an image more": "<22",
    "error": ">9.2%",
    "SSIM": ">8.3f",
    "1/100": ">8.1%",
    "times": ">8",
    "all, error": ">12.2%",
}
SUMS = {"images": ">8,", "values": ">8,", "rank": ">8,", "AUC": ">8.3f"}
ACCURACIES = {"": "<22", "of a class": ">11", "B": ">5", "epsilon": ">9g", "top-1": ">9.2%"}
AGAIN = (5, 25)
"""B of the device that uploads again."""
ATTACKED_EPSILONS = (1.0, 8.0, 32.0)
"""Values of epsilon that are attacked; accuracy is measured at more."""
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PARTS = ("attack", "sums", "accuracy")


@click.command("privacy")
@repeated("--data", "names", type=click.Choice(NAMES), default=("fashion_mnist", "cifar10"))
@repeated("--part", "parts", type=click.Choice(PARTS), default=PARTS)
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option("--public", type=int, default=10_000, show_default=True, help="Images the attacker has.")
@click.option("--images", type=int, default=200, show_default=True, help="Of a class, on the device.")
@click.option("--decoder-epochs", type=click.IntRange(min=1), default=4, show_default=True)
@repeated(
    "--batch", "batches", type=click.IntRange(min=2), default=BATCHES, help="Images in an attacked prototype."
)
@repeated("--per-class", type=int, default=(20, 100, 600), help="Of a class, on each device of a fleet.")
@click.option("--devices", type=click.IntRange(min=1), default=10, show_default=True, help="Of a fleet.")
@repeated("--epsilon", "epsilons", type=click.FloatRange(0, min_open=True), default=EPSILONS)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="Where to train: auto, cpu, cuda.")
@json_option
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Draw into this folder.")
def command(
    *,
    names: tuple[str, ...],
    parts: tuple[str, ...],
    backbone: str,
    image_size: int,
    public: int,
    images: int,
    decoder_epochs: int,
    batches: tuple[int, ...],
    per_class: tuple[int, ...],
    devices: int,
    epsilons: tuple[float, ...],
    seed: int,
    device: str,
    json_file: Path | None,
    plots: Path | None,
) -> None:
    """Attack a device's uploads, and measure the accuracy that protection costs."""
    where = torch_device(device)
    report: dict[str, Any] = {"backbone": backbone, "image_size": image_size, "seed": seed}
    reconstructions: list[Rows] = []
    accuracies: dict[str, list[Accuracy]] = {}
    for name in names:
        features = load_features(name, backbone=backbone, image_size=image_size)
        figures: dict[str, Any] = {}
        if "attack" in parts:
            leaks, again, rows = _attack(
                *(name, features),
                public=public,
                images=images,
                batches=batches,
                epochs=decoder_epochs,
                seed=seed,
                device=where,
            )
            reconstructions.append(rows)
            figures |= {"leaks": leaks, "resubmitted": list(map(asdict, again))}
        if "sums" in parts:
            figures["sums"] = list(map(asdict, _sums(name, features, seed=seed)))
        if "accuracy" in parts:
            accuracies[name] = _accuracies(
                name,
                features,
                per_class=per_class,
                devices=devices,
                epsilons=epsilons,
                seed=seed,
                device=where,
            )
            figures["accuracies"] = list(map(asdict, accuracies[name]))
        report[name] = figures
    write_json(json_file, "privacy", **report)
    if plots and reconstructions:
        draw_images(reconstructions, plots / "reconstruction.png")
    if plots and accuracies:
        draw_accuracies(accuracies, plots / "privacy-accuracy.png")


def _attack(
    name: str,
    features: Features,
    *,
    public: int,
    images: int,
    batches: tuple[int, ...],
    epochs: int,
    seed: int,
    device: str,
) -> tuple[list[dict[str, Any]], list[Resubmitted], Rows]:
    """Return what each form discloses, the attack on two submissions, and reconstructed images."""
    scene = set_scene(load_data(name), features, public=public, per_class=images, seed=seed)
    decoder = learn_decoder(scene, epochs=epochs, seed=seed, device=device)
    linear = fit_linear(scene)
    forms = forms_of(
        scene,
        batches=[batch for batch in batches if batch <= images],
        epsilons=ATTACKED_EPSILONS,
        clip_norm=_usual_norm(features),
        seed=seed,
    )
    table = Table(LEAKS, title=f"{name}: {public:,} public images, a device with {images} of each class")
    leaks = []
    for form in forms:
        leak = attack(scene, form, decoder, seed=seed)
        by_line, by_network = explained(scene, form, linear=linear, decoder=decoder)
        leaks.append({**asdict(leak), "linear_r2": by_line, "decoder_r2": by_network})
        table.row(
            *(leak.form, leak.own, leak.others, leak.class_look, leak.own_first, by_line, by_network),
            *(leak.cosine.auc, leak.likelihood.auc, leak.cosine.top_1, leak.likelihood.top_1),
        )
    table = Table(RESUBMITTED, title="the same device uploads again")
    again = []
    for batch in AGAIN:
        found = resubmit(scene, decoder, batch=batch, images=min(60, images // 2), seed=seed)
        again.append(found)
        table.row(f"B {batch}", found.error, found.ssim, found.top_1, found.submissions, found.all_error)
    return leaks, again, rows_of(name, scene, forms, decoder)


def _sums(name: str, features: Features, *, seed: int) -> list[SumLeak]:
    table = Table(SUMS, title=f"{name}: sums of single images, {NON_MEMBERS:,} other images")
    leaks = []
    for images in SIZES:
        if images + NON_MEMBERS <= len(features.train_labels):
            leaks.append(attack_sums(features, images=images, seed=seed))
            table.row(*asdict(leaks[-1]).values())
    return leaks


def _accuracies(
    name: str,
    features: Features,
    *,
    per_class: tuple[int, ...],
    devices: int,
    epsilons: tuple[float, ...],
    seed: int,
    device: str,
) -> list[Accuracy]:
    measured = []
    table = Table(ACCURACIES, title=f"{name}: accuracy, {devices} devices")
    plain = RECIPES["default"]
    # Restoring the variance would amplify the noise as well.
    without_restoring = replace(plain, restore=False, mix=False)
    clip_norm = _usual_norm(features)
    for images in per_class:
        fleets = [Fleet(devices=devices, images=images, batch=batch) for batch in (5, PRIVATE_BATCH)]
        # A device that has fewer images of a class than B, or seems to, sends none of it.
        small = replace(fleets[1], batch=max(2, min(PRIVATE_BATCH, images // 2)))
        plans: list[tuple[str, Fleet, float | None, Protection]] = []
        for fleet in fleets:
            plans += [("none", fleet, None, None), ("perturbed", fleet, None, PAPER)]
        for epsilon in epsilons:
            mechanism = Mechanism(
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier(epsilon),
                batch_size=small.batch,
                min_images=2,
            )
            plans.append(("differential privacy", small, epsilon, mechanism))
        for protection, fleet, cost, how in plans:
            recipe = plain if cost is None else without_restoring
            accuracy = run_private(features, fleet, how=how, recipe=recipe, seed=seed, device=device)
            sizes = {"batch": fleet.batch, "images": images}
            measured.append(Accuracy(protection=protection, epsilon=cost, accuracy=accuracy, **sizes))
            table.row(protection, images, fleet.batch, cost, accuracy)
    return measured


def _usual_norm(features: Features) -> float:
    return float(np.median(np.linalg.norm(features.test, axis=1)))
