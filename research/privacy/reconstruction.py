"""The attack of FedTC's appendix C on every form of upload, and on what the server computes from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.training_set import TrainingSet
from benchmarks.data.images import DataSet
from edge_client.privacy.perturbation import perturb_prototypes
from protocol.wire.codec import digest_of
from protofleet.simulation.fleet import Features
from research.privacy.decoder import Decoder, as_values, decode, train_decoder
from research.privacy.leakage import (
    CANDIDATES,
    Knowledge,
    Linkage,
    Release,
    best_ssim,
    by_cosine,
    by_likelihood,
    link,
    release_prototypes,
    rounded,
    study,
)
from research.privacy.noisy_prototypes import Mechanism, private_prototypes
from research.privacy.private_fleet import PAPER, noise_multiplier

COMPARED = 200
"""Prototypes of a form whose images are compared, drawn at random: more would hardly change the means."""
PRIVATE_BATCH = 25


@dataclass(frozen=True)
class Scene:
    """Division of a data set between device, attacker and non-members, whose images are not uploaded."""

    public: tuple[NDArray[np.float32], NDArray[np.int64]]
    """Features (p, L) and classes (p,) of the images that the attacker has."""
    public_images: NDArray[np.uint8]
    features: NDArray[np.float32]
    """Features of the device's images and of non-members, (n, L)."""
    labels: NDArray[np.int64]
    images: NDArray[np.float32]
    """(n, H, W) or (n, H, W, 3), in 0 to 1."""
    device: NDArray[np.intp]
    """Rows of the device, equally many of each class."""
    non_members: Mapping[int, NDArray[np.intp]]
    """Rows of non-members, of each class."""


@dataclass(frozen=True)
class Form:
    """Prototypes in one of the forms in which they are available."""

    name: str
    release: Release
    guess: NDArray[np.float32]
    """The attacker's input for the decoder, (m, L)."""
    features: NDArray[np.float32]
    """Features of all images, (n, L), clipped if the device clips them."""
    knowledge: Knowledge
    """The attacker's, of such features."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Disclosure by one form of upload."""

    form: str
    own: float
    """Mean of the best SSIM of a reconstructed image to the images in its prototype."""
    others: float
    """The same to as many non-members of its class."""
    class_look: float
    """The same of the mean public image of the class to the images in the prototype."""
    own_first: float
    """Share of the prototypes whose images are more similar than the non-members; chance is a half."""
    cosine: Linkage
    likelihood: Linkage
    """The linkage by an attacker with knowledge of the distribution of features."""


def set_scene(data: DataSet, features: Features, *, public: int, per_class: int, seed: int) -> Scene:
    """Divide the training images: `public` for the attacker, `per_class` of each class for the device, non-members.

    Of each class, there are as many non-members as images on the device, and at least 100.
    """
    order = np.random.default_rng(seed).permutation(len(features.train_labels))
    known, hidden = order[:public], order[public:]
    of_class = [hidden[features.train_labels[hidden] == label] for label in range(features.classes)]
    sent = np.concatenate([rows[:per_class] for rows in of_class])
    unsent = np.concatenate([rows[per_class : per_class + max(per_class, CANDIDATES)] for rows in of_class])
    rows = np.concatenate([sent, unsent])
    labels = features.train_labels[rows]
    unused = np.arange(len(rows)) >= len(sent)
    return Scene(
        public=(features.train[known], features.train_labels[known]),
        public_images=data.train.images[known],
        features=features.train[rows],
        labels=labels,
        images=as_values(data.train.images[rows]),
        device=np.flatnonzero(~unused),
        non_members={label: np.flatnonzero(unused & (labels == label)) for label in range(features.classes)},
    )


def forms_of(
    scene: Scene, *, batches: Sequence[int], epsilons: Sequence[float], clip_norm: float, seed: int
) -> list[Form]:
    """Return every form of upload of the device's images, with the attacker's best input from each."""
    whole = scene.features
    knowledge = study(*scene.public)
    forms = []
    for batch in (1, *batches):
        release = release_prototypes(whole, scene.labels, scene.device, batch=batch, seed=seed)
        name = f"prototypes, B {batch}" if batch > 1 else "single features"
        forms.append(Form(name, release, release.values, whole, knowledge))
        if batch > 1:
            restored = TrainingSet(
                release.values, release.labels, release.counts, int(release.labels.max()) + 1, restore=True
            ).features
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
    """Train the attacker's decoder on the public images."""
    return train_decoder(scene.public[0], scene.public_images, epochs=epochs, seed=seed, device=device)


def class_looks(scene: Scene) -> NDArray[np.float32]:
    """Return the mean public image of each class, (C, H, W) or (C, H, W, 3)."""
    labels = scene.public[1]
    return np.stack(
        [as_values(scene.public_images[labels == label]).mean(axis=0) for label in scene.non_members]
    )


def attack(scene: Scene, form: Form, decoder: Decoder, *, seed: int) -> Leak:
    """Measure what a form discloses."""
    rng = np.random.default_rng(seed)
    release = form.release
    own, other, look = _similarities(scene, release, form.guess, decoder, rng)
    by_both = (
        by_cosine(release, form.features),
        by_likelihood(release, form.features, scene.labels, form.knowledge),
    )
    cosine, likelihood = (link(score, release, scene.non_members, rng=rng) for score in by_both)
    return Leak(
        form=form.name,
        own=float(own.mean()),
        others=float(other.mean()),
        class_look=float(look.mean()),
        own_first=float((own > other).mean()),
        cosine=cosine,
        likelihood=likelihood,
    )


def own_first(
    scene: Scene, release: Release, guess: NDArray[np.float32], decoder: Decoder, *, seed: int
) -> float:
    """Return the share of reconstructions from `guess` that are most similar to an image in their prototype."""
    own, others, _ = _similarities(scene, release, guess, decoder, np.random.default_rng(seed))
    return float((own > others).mean())


def _similarities(
    scene: Scene,
    release: Release,
    guess: NDArray[np.float32],
    decoder: Decoder,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return the best SSIM of some reconstructions to their images, to others, and of the class's look, (3, m)."""
    some = rng.permutation(len(release.labels))[:COMPARED]
    decoded = decode(decoder, guess[some], scene.images.shape[1:])
    looks = class_looks(scene)
    similar = []
    for image, prototype in zip(decoded, some, strict=True):
        members, label = release.members[prototype], int(release.labels[prototype])
        others = rng.choice(scene.non_members[label], size=len(members), replace=False)
        similar.append(
            (
                best_ssim(image, scene.images[members]),
                best_ssim(image, scene.images[others]),
                best_ssim(looks[label], scene.images[members]),
            )
        )
    return np.array(similar).T


def _perturbed(release: Release) -> Release:
    """Perturb prototypes as in FedTC's table, and undo the shrinking, which is known."""
    values = perturb_prototypes(
        release.values, release.labels.astype(np.uint32), PAPER, secret=digest_of(b"a device")
    )
    grown = values.astype(np.float32) / (1 - PAPER.shrink)
    return replace(release, values=grown, noise=np.full(len(grown), PAPER.scale / (1 - PAPER.shrink)))


def _private(
    scene: Scene, features: NDArray[np.float32], mechanism: Mechanism, *, seed: int
) -> Release | None:
    """Return differentially private prototypes with the images in each; None where nothing is sent.

    The members are found by using the same noise twice, which no device does.
    """
    values, labels, counts, members = [], [], [], []
    for label in scene.non_members:
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
        rounded(np.stack(values)),
        np.array(labels),
        sizes,
        noise=mechanism.clip_norm * mechanism.noise / sizes,
        members=tuple(members),
    )


def _clip(features: NDArray[np.float32], clip_norm: float) -> NDArray[np.float32]:
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    clipped: NDArray[np.float32] = features * np.minimum(1, clip_norm / np.maximum(norms, 1e-12))
    return clipped
