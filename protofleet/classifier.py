"""A classifier of features by scikit-learn's conventions, trained as a fleet trains its head."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregator.algorithms.algorithm import OneShot
from aggregator.algorithms.registry import configured
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import Robust
from protocol.errors import ConfigError
from protofleet.head import ROBUST, Head, train_head
from protofleet.packages import needed_packages
from protofleet.prototypes import Prototypes, batch_prototypes, device_prototypes
from protofleet.simulation.fleet import Features


class InvalidArrays(ConfigError, ValueError):
    """Arrays that a classifier cannot be fitted to or used on; scikit-learn expects a ValueError."""


class NotFitted(ConfigError, ValueError, AttributeError):
    """A classifier is used before `fit`; where scikit-learn is loaded, its NotFittedError is raised."""


class FederatedClassifier:
    """The classifier that a fleet would train on these features, by scikit-learn's conventions.

    `fit` makes the upload of each device in `groups` of its rows alone, and trains the head of these as the aggregator
    does. Estimators of scikit-learn, such as a pipeline or a search over parameters, take it; it does not need
    scikit-learn.

    Args:
        algorithm: a one-shot algorithm: `fedtc`, `fedncm`, `statistics`, or an installed one. With those of rounds,
            each device has a head of its own: `protofleet.simulate` has them.
        batch_size: images in a prototype, or in a group of `statistics`, as `[client]` in a task file.
        alpha: of prototypes: share of each class of a device that outlier filtering keeps.
        min_images: of prototypes: a class with fewer images on a device is not uploaded.
        widths: the number of values of each layer of an `export-backbone --layers` backbone, which has normalized them;
            empty for other features.
        recipe: `default`, or `paper` for the training that the FedTC paper describes, of batches alone.
        robust: protection against incorrect devices, as `[robust]` in a task file; None for its defaults.
        seed: of batches and training.
        device: where an adapter is trained: `cpu`, `cuda`, or `auto`.
        settings: the algorithm's table in a task file by name, such as `features=512` of `statistics`.

    Attributes:
        classes_: the C labels in `y`, sorted.
        n_features_in_: L, the length of a feature.
        head_: the `Head`, whose classes are `classes_` as text; `head_.quarantined` has devices that were left out.
    """

    _estimator_type = "classifier"

    def __init__(  # noqa: PLR0913 - scikit-learn takes every parameter by its name
        self,
        algorithm: str = "fedtc",
        *,
        batch_size: int = 5,
        alpha: float = 0.99,
        min_images: int = 2,
        widths: Sequence[int] = (),
        recipe: Literal["default", "paper"] = "default",
        robust: Robust | None = None,
        seed: int = 0,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        self.algorithm = algorithm
        self.batch_size = batch_size
        self.alpha = alpha
        self.min_images = min_images
        self.widths = widths
        self.recipe: Literal["default", "paper"] = recipe
        self.robust = robust
        self.seed = seed
        self.device = device
        vars(self).update(settings)

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - scikit-learn's signature
        """Return the parameters by name, including the algorithm's settings."""
        del deep
        return {
            name: value for name, value in vars(self).items() if not name.startswith("_") and name[-1] != "_"
        }

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name, and return the classifier; `fit` checks them."""
        vars(self).update(params)
        return self

    @needed_packages("FederatedClassifier")
    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:  # noqa: N803
        """Train the head of these devices' images, and return the classifier.

        Args:
            X: (n, L), the feature of each image, of `extract_features`.
            y: (n,), the class of each, of any type that can be sorted.
            groups: (n,), the device of each; without it, all are on one device.

        Raises:
            ConfigError: a parameter cannot be used, or no class has enough images on a device.
            ValueError: the arrays do not fit each other, are not finite, or have less than two classes.
        """
        features = _features(X)
        labels = _labels(y, len(features))
        names, devices = _numbered(_devices(groups, len(features)), "groups")
        self.classes_, numbers = _numbered(labels, "y")
        if len(self.classes_) < 2:
            raise InvalidArrays("expected at least 2 classes in y, got 1 class")
        self.n_features_in_ = features.shape[1]
        self.head_ = self._train(features, numbers, devices, names)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Return the most probable class, (n,), of each feature in X, (n, L)."""
        features = self._checked(X)
        return np.asarray(self.classes_[self.head_.predict(features)])

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float32]:  # noqa: N803
        """Return probabilities, float32 (n, C) in the order of `classes_`, of features X, (n, L)."""
        features = self._checked(X)
        return self.head_.predict_proba(features)

    def score(self, X: ArrayLike, y: ArrayLike) -> float:  # noqa: N803
        """Return the accuracy on features X, (n, L), of the classes y, (n,)."""
        found = self.predict(X)
        return float((found == _labels(y, len(found))).mean())

    def __repr__(self) -> str:
        defaults = FederatedClassifier().get_params()
        changed = {
            name: value
            for name, value in self.get_params().items()
            if name not in defaults or repr(value) != repr(defaults[name])
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type=self._estimator_type,
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(),
        )

    def get_metadata_routing(self) -> Any:
        """Return the request of `groups` for `fit`, where scikit-learn's metadata routing is enabled."""
        from sklearn.utils.metadata_routing import MetadataRequest

        request = MetadataRequest(owner=type(self).__name__)
        request.fit.add_request(param="groups", alias=True)
        return request

    def _train(
        self,
        features: NDArray[np.float32],
        labels: NDArray[np.int64],
        devices: NDArray[np.int64],
        names: NDArray[Any],
    ) -> Head:
        own = FederatedClassifier().get_params()
        settings = {name: value for name, value in self.get_params().items() if name not in own}
        try:
            method = configured(self.algorithm, settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.algorithm} cannot be used with these parameters: {error}") from error
        if not isinstance(method, OneShot):
            raise ConfigError(
                f"expected an algorithm of one head for all devices, got {method.name!r}: use protofleet.simulate for "
                "algorithms of rounds"
            )
        if isinstance(method, Statistics):
            return self._train_statistics(method, features, labels, devices, names)
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("batch_size", "alpha", "min_images")
        }
        make: Callable[..., Prototypes] = batch_prototypes
        if method.blocks and self.recipe == "default":
            make, options["widths"] = device_prototypes, self.widths
        parts = {}
        for number, name in enumerate(names):
            mine = devices == number
            parts[str(name)] = make(features[mine], labels[mine], seed=(self.seed, number), **options)
        return train_head(
            parts,
            classes=tuple(map(str, self.classes_)),
            algorithm=method,
            recipe=self.recipe,
            robust=self.robust or ROBUST,
            seed=self.seed,
            device=self.device,
        )

    def _train_statistics(
        self,
        method: Statistics,
        features: NDArray[np.float32],
        labels: NDArray[np.int64],
        devices: NDArray[np.int64],
        names: NDArray[Any],
    ) -> Head:
        from protofleet.simulation.statistics import map_features, solve_fleet

        if self.batch_size < 1:
            raise ConfigError(f"expected a batch_size from 1, got {self.batch_size}")
        normalized = len(self.widths) > 0
        source = Features(features, labels, features[:0], labels[:0], normalized=normalized)
        data = map_features(source, random_features=method.features, seed=self.seed)
        solved = solve_fleet(
            data, devices, batch_size=self.batch_size, seed=self.seed, robust=self.robust or ROBUST
        )
        return Head(
            classes=tuple(map(str, self.classes_)),
            layers=(solved.ridge.layer,),
            loss=solved.ridge.error,
            quarantined={
                str(names[int(number)]): reason for number, reason in solved.sums.quarantined.items()
            },
            warning="; ".join(solved.sums.warnings),
            directions=solved.directions,
            feature_map=data.feature_map,
        )

    def _checked(self, rows: ArrayLike) -> NDArray[np.float32]:
        """Return the features to predict from; raises NotFitted or InvalidArrays."""
        if not hasattr(self, "head_"):
            text = f"this {type(self).__name__} is not fitted yet: call fit first"
            raise _of_sklearn("NotFittedError", NotFitted)(text)
        features = _features(rows)
        if features.shape[1] != self.n_features_in_:
            raise InvalidArrays(
                f"X has {features.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        return features


def _features(rows: ArrayLike) -> NDArray[np.float32]:
    """Return features as float32 (n, L), finite and not empty."""
    if hasattr(rows, "tocsr"):
        raise InvalidArrays("expected a dense array of features, got a sparse one: sparse X is not supported")
    array = np.asarray(rows)
    if array.dtype.kind == "c":
        raise InvalidArrays("expected real features, got complex ones: Complex data not supported")
    with np.errstate(over="ignore"):  # refused below
        array = array.astype(np.float32)
    if array.ndim != 2:
        raise InvalidArrays(
            f"expected features (n, L), got an array of {array.ndim} dimensions. Reshape your data"
        )
    for count, what in zip(array.shape, ("sample", "feature"), strict=True):
        if not count:
            raise InvalidArrays(
                f"Found array with {count} {what}(s) (shape={array.shape}) while a minimum of 1 is required."
            )
    if not np.isfinite(array).all():
        raise InvalidArrays("expected finite features, got NaN or infinity, or values beyond float32")
    return array


def _labels(labels: ArrayLike | None, images: int) -> NDArray[Any]:
    """Return the class of each image, (n,)."""
    if labels is None:
        raise InvalidArrays("fit requires y to be passed, but the target y is None")
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        text = "A column-vector y was passed when a 1d array was expected: pass y.ravel()"
        warnings.warn(text, _of_sklearn("DataConversionWarning", UserWarning), stacklevel=3)
        array = array.ravel()
    if array.shape != (images,):
        raise InvalidArrays(f"expected y of shape ({images},), a class for each feature, got {array.shape}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InvalidArrays("expected classes in y, got NaN or infinity")
        if (array != np.rint(array)).any():
            raise InvalidArrays("Unknown label type: continuous. Expected classes in y, got fractions")
    return array


def _devices(groups: ArrayLike | None, images: int) -> NDArray[Any]:
    """Return the device of each image, (n,)."""
    array = np.zeros(images, np.int64) if groups is None else np.asarray(groups)
    if array.shape != (images,):
        raise InvalidArrays(
            f"expected groups of shape ({images},), a device for each feature, got {array.shape}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArrays("expected a device for each feature in groups, got NaN or infinity")
    return array


def _numbered(values: NDArray[Any], name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the different values, sorted, and the place of each value, (n,), among them."""
    try:
        found, numbers = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise InvalidArrays(
            f"expected values of one type in {name}, got some that cannot be sorted"
        ) from error
    return found, numbers.astype(np.int64)


def _of_sklearn(name: str, default: type[Any]) -> type[Any]:
    """Return a class of `sklearn.exceptions` where that is loaded, for code that expects it."""
    return getattr(sys.modules.get("sklearn.exceptions"), name, default)
