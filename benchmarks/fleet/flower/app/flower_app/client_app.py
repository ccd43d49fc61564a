"""Local training as the program of each client, made like that of Flower's PyTorch quickstart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import Head, train

app = ClientApp()


@app.train()
def train_locally(message: Message, context: Context) -> Message:
    """Train the received head on this client's features, and reply with it."""
    with np.load(str(context.node_config["data"])) as data:
        features, labels = (torch.from_numpy(data[name]) for name in ("features", "labels"))
    settings: Any = context.run_config
    config: Any = message.content["config"]
    head = Head(features.shape[1], int(settings["classes"]))
    head.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(
        head,
        features,
        labels,
        learning_rate=settings["learning-rate"],
        epochs=settings["epochs"],
        mu=config.get("proximal-mu", 0.0),
        seed=config["server-round"],
    )
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(head.state_dict()), "metrics": metrics}), reply_to=message
    )
