"""The attack of FedTC's appendix C on everything that a device may send, and on what the server makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc import restore_variance
from benchmarks.data.features import Features
from benchmarks.data.images import DataSet
from benchmarks.research.decoder import Decoder, as_values, decode, train_decoder
from benchmarks.research.leakage import (
    CANDIDATES,
    Knowledge,
    Linkage,
    Release,
    best_ssim,
    by_cosine,
    by_likelihood,
    deal,
    link,
    study,
)
from benchmarks.research.private_fleet import PAPER, noise_multiplier
from edge_client.privacy.gaussian_mechanism import Mechanism, private_prototypes
from edge_client.privacy.perturbation import perturb_prototypes
from protocol.wire.codec import digest_of

MOST_PAINTED = 200
"""Prototypes of a form whose images are compared, drawn at random: more would hardly change the means."""
PRIVATE_BATCH = 25


@dataclass(frozen=True)
class Scene:
    """Division of a data set between device, attacker and others.

    Attributes:
        public: features (p, L) and classes (p,) of the images that the attacker has as well.
        public_images: uint8 (p, H, W) or (p, H, W, 3).
        features: float32 (n, L), of the device's images and of non-members, which are not uploaded.
        labels: int64 (n,).
        images: float32 (n, H, W) or (n, H, W, 3), in 0 to 1.
        device: rows of the device, as many of each class.
        strangers: rows of strangers, of each class.
    """

    public: tuple[NDArray[np.float32], NDArray[np.int64]]
    public_images: NDArray[np.uint8]
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    images: NDArray[np.float32]
    device: NDArray[np.intp]
    strangers: Mapping[int, NDArray[np.intp]]


@dataclass(frozen=True)
class Form:
    """Prototypes in one of the forms in which they may be had.

    Attributes:
        name: of the form.
        release: what leaves the device.
        guess: float32 (m, L), what the attacker makes of it for the decoder.
        features: float32 (n, L), of all images, as they go into it: clipped or not.
        knowledge: the attacker's, of such features.
    """

    name: str
    release: Release
    guess: NDArray[np.float32]
    features: NDArray[np.float32]
    knowledge: Knowledge


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Disclosure by one form of upload.

    Attributes:
        form: its name.
        own: mean of the best SSIM of a painted image to the images in its prototype.
        others: the same to as many images of its class that are not in it.
        class_look: the same of the mean public image of the class to the images in it.
        own_first: share of the prototypes whose own images come out more alike than the others: half is chance.
        cosine: what cosines tell.
        likelihood: what an attacker tells who knows how features spread.
    """

    form: str
    own: float
    others: float
    class_look: float
    own_first: float
    cosine: Linkage
    likelihood: Linkage


def set_scene(data: DataSet, features: Features, *, public: int, per_class: int, seed: int) -> Scene:
    """Deal the training images out to the attacker, the device, and neither.

    Args:
        data: the images.
        features: theirs.
        public: images that the attacker has.
        per_class: images of each class that the device has; at most as many are strangers, and at least 100.
        seed: of the deal.
    """
    order = np.random.default_rng(seed).permutation(len(features.train_labels))
    known, hidden = order[:public], order[public:]
    of_class = [hidden[features.train_labels[hidden] == label] for label in range(features.classes)]
    sent = np.concatenate([rows[:per_class] for rows in of_class])
    unsent = np.concatenate([rows[per_class : per_class + max(per_class, CANDIDATES)] for rows in of_class])
    rows = np.concatenate([sent, unsent])
    labels = features.train_labels[rows]
    strange = np.arange(len(rows)) >= len(sent)
    return Scene(
        public=(features.train[known], features.train_labels[known]),
        public_images=data.train.images[known],
        features=features.train[rows],
        labels=labels,
        images=as_values(data.train.images[rows]),
        device=np.flatnonzero(~strange),
        strangers={label: np.flatnonzero(strange & (labels == label)) for label in range(features.classes)},
    )


def forms_of(
    scene: Scene, *, batches: Sequence[int], epsilons: Sequence[float], clip_norm: float, seed: int
) -> list[Form]:
    """Return every form of upload of the device's images, with the attacker's best input from each."""
    whole = scene.features
    knowledge = study(*scene.public)
    forms = []
    for batch in (1, *batches):
        release = deal(whole, scene.labels, scene.device, batch=batch, seed=seed)
        name = f"prototypes, B {batch}" if batch > 1 else "single features"
        forms.append(Form(name, release, release.values, whole, knowledge))
        if batch > 1:
            restored = restore_variance(release.values, release.labels, release.counts)
            forms.append(Form(f"restored, B {batch}", release, restored, whole, knowledge))
        if batch in (1, 5):
            perturbed = _perturbed(release)
            guess = knowledge.denoise(perturbed)
            forms.append(Form(f"perturbed, B {batch}", perturbed, guess, whole, knowledge))
    clipped = _clip(whole, clip_norm)
    of_clipped = study(_clip(scene.public[0], clip_norm), scene.public[1])
    for epsilon in epsilons:
        mechanism = Mechanism(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier(epsilon),
            batch_size=PRIVATE_BATCH,
            min_images=2,
        )
        private = _private(scene, whole, mechanism, seed=seed)
        if private is None:
            continue
        name = f"epsilon {epsilon:g}, B {PRIVATE_BATCH}"
        forms.append(Form(name, private, of_clipped.denoise(private), clipped, of_clipped))
    return forms


def learn_decoder(scene: Scene, *, epochs: int, seed: int, device: str) -> Decoder:
    """Train the attacker's decoder on what it has."""
    return train_decoder(scene.public[0], scene.public_images, epochs=epochs, seed=seed, device=device)


def class_looks(scene: Scene) -> NDArray[np.float32]:
    """Return the mean public image of each class, (C, H, W) or (C, H, W, 3)."""
    labels = scene.public[1]
    return np.stack(
        [as_values(scene.public_images[labels == label]).mean(axis=0) for label in scene.strangers]
    )


def attack(scene: Scene, form: Form, decoder: Decoder, *, seed: int) -> Leak:
    """Measure what a form gives away.

    Args:
        scene: who has what.
        form: what is attacked.
        decoder: the attacker's.
        seed: draws who is compared.
    """
    rng = np.random.default_rng(seed)
    release = form.release
    some = rng.permutation(len(release.labels))[:MOST_PAINTED]
    painted = decode(decoder, form.guess[some], scene.images.shape[1:])
    looks = class_looks(scene)
    similar = []
    for image, prototype in zip(painted, some, strict=True):
        members, label = release.members[prototype], int(release.labels[prototype])
        others = rng.choice(scene.strangers[label], size=len(members), replace=False)
        similar.append(
            (
                best_ssim(image, scene.images[members]),
                best_ssim(image, scene.images[others]),
                best_ssim(looks[label], scene.images[members]),
            )
        )
    own, other, look = np.array(similar).T
    by_both = (
        by_cosine(release, form.features),
        by_likelihood(release, form.features, scene.labels, form.knowledge),
    )
    cosine, likelihood = (link(score, release, scene.strangers, rng=rng) for score in by_both)
    return Leak(
        form=form.name,
        own=float(own.mean()),
        others=float(other.mean()),
        class_look=float(look.mean()),
        own_first=float((own > other).mean()),
        cosine=cosine,
        likelihood=likelihood,
    )


def _perturbed(release: Release) -> Release:
    """Perturb prototypes as in FedTC's table, and undo what everybody knows how to undo: the shrinking."""
    values = perturb_prototypes(
        release.values, release.labels.astype(np.uint32), PAPER, secret=digest_of(b"a device")
    )
    grown = values.astype(np.float32) / (1 - PAPER.shrink)
    return replace(release, values=grown, noise=np.full(len(grown), PAPER.scale / (1 - PAPER.shrink)))


def _private(
    scene: Scene, features: NDArray[np.float32], mechanism: Mechanism, *, seed: int
) -> Release | None:
    """Make differentially private prototypes, and note which images are in each; None where nothing is sent.

    It is measured with the same noise twice, which no device ever uses.
    """
    values, labels, counts, members = [], [], [], []
    for label in scene.strangers:
        mine = scene.device[scene.labels[scene.device] == label]
        key = digest_of(f"{seed}/{label}".encode())
        each = np.eye(len(mine), dtype=np.float32) * mechanism.clip_norm
        released, nothing, everyone = (
            private_prototypes(part, [str(row) for row in mine], mechanism, secret=key, key=key)
            for part in (features[mine], np.zeros_like(each), each)
        )
        for row in range(len(released[0])):
            inside = mine[everyone[0][row] - nothing[0][row] > mechanism.clip_norm / 1e6]
            if len(inside):
                values.append(released[0][row])
                counts.append(int(released[1][row]))
                labels.append(label)
                members.append(inside)
    if not values:
        return None
    sizes = np.array(counts)
    return Release(
        np.stack(values).astype(np.float16).astype(np.float32),
        np.array(labels),
        sizes,
        noise=mechanism.clip_norm * mechanism.noise / sizes,
        members=tuple(members),
    )


def _clip(features: NDArray[np.float32], clip_norm: float) -> NDArray[np.float32]:
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    clipped: NDArray[np.float32] = features * np.minimum(1, clip_norm / np.maximum(norms, 1e-12))
    return clipped
