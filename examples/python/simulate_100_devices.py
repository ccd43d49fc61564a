"""One hundred simulated devices whose images differ more and less, and a plot of what they reach.

Run: python examples/python/simulate_100_devices.py simulation.png
"""

import sys

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import protofleet

ALGORITHMS = ("statistics", "alone")
BETAS = (0.05, 0.2, 1.0, 5.0)

pixels, labels = load_digits(return_X_y=True)
data = protofleet.Dataset(  # of a folder of images: protofleet.load_dataset("photos", "backbone.onnx")
    features=(pixels / 16).astype(np.float32), labels=labels, classes=tuple("0123456789")
)
runs = [
    protofleet.simulate(data, devices=100, partition=f"dirichlet:{beta}", algorithms=ALGORITHMS)
    for beta in BETAS
]
figure = Figure()
axes = figure.subplots()
for name in ALGORITHMS:
    accuracies = [run[name].accuracy for run in runs]
    print(f"{name}: " + ", ".join(f"{each:.1%}" for each in accuracies))
    axes.semilogx(BETAS, accuracies, marker="o", label=name)
axes.set(xlabel="Dirichlet concentration", ylabel="accuracy on all held-out images", ylim=(0, 1))
axes.legend()
figure.savefig(sys.argv[1])
