"""FedTC on arrays: four devices average features to prototypes, and a head is trained on all of them.

Run: python examples/python/fedtc_arrays.py
"""

import numpy as np
from sklearn.datasets import load_digits

import protofleet

pixels, labels = load_digits(return_X_y=True)
features = (pixels / 16).astype(np.float32)  # (n, L): here 64 pixels, else those of extract_features
devices = np.array_split(np.random.default_rng(0).permutation(600), 4)
prototypes = [protofleet.batch_prototypes(features[mine], labels[mine]) for mine in devices]
head = protofleet.train_head(prototypes, classes=10)
accuracy = (head.predict(features[600:]) == labels[600:]).mean()
uploaded = sum(len(part.values) for part in prototypes)
print(f"{uploaded} prototypes of 600 images: accuracy {accuracy:.1%} on {len(labels) - 600} others")
