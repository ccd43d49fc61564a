"""Rounds of one of Flower's strategies, as the program of its server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx

from .task import Head

app = ServerApp()


@app.main()
def run_rounds(grid: Grid, context: Context) -> None:
    """Run the rounds of a strategy; write the head of each round, and when it was there, to a folder."""
    settings: Any = context.run_config
    clients = settings["clients"]
    answers = [clients]

    def count(replies: list[RecordDict], _key: str) -> MetricRecord:
        answers.append(len(replies))
        return MetricRecord({"clients": len(replies)})

    common: dict[str, Any] = {
        "train_metrics_aggr_fn": count,
        "fraction_evaluate": 0.0,
        "min_train_nodes": clients,
        "min_available_nodes": clients,
    }
    mu = settings["mu"]
    strategy = FedProx(**common, proximal_mu=mu) if mu else FedAvg(**common)
    torch.manual_seed(0)
    head = Head(settings["feature-size"], settings["classes"])

    def write(number: int, arrays: ArrayRecord) -> None:
        seconds = time.time()
        file = Path(settings["out"]) / f"{number:03}.npz"
        state = {name: array.numpy() for name, array in arrays.to_torch_state_dict().items()}
        np.savez(file.with_suffix(".part.npz"), seconds=seconds, clients=answers[-1], **state)
        file.with_suffix(".part.npz").rename(file)

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(head.state_dict()),
        num_rounds=settings["rounds"],
        evaluate_fn=write,
    )
