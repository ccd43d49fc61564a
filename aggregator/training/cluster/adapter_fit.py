"""Trains FedTC's adapter with several workers of a Ray cluster, which take each step together.

Each worker holds all prototypes, in a file where they are large, and computes a share of each step's rows. Gradients
are added by `torch.distributed`: gloo between processors, NCCL between GPUs. The job keeps the state after each epoch.
Where a worker or its machine ends, others continue from there.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.adapter import Report
from aggregator.algorithms.fedtc.adapter_steps import (
    AdapterTraining,
    Head,
    Share,
    SortedPrototypes,
    torch_device,
)
from aggregator.algorithms.fedtc.arrays import Arrays, is_in_file
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.training.cluster.connection import connected, last_line, ray, require_version
from protocol import __version__
from protocol.errors import ProtofleetError

RESTARTS = 3
"""Times that a training continues with other workers after one has ended."""

CHUNK_BYTES = 64 * 2**20
"""Bytes of the prototypes that are on their way to the workers at once."""

STEP_TIMEOUT_S = 300.0
"""Seconds after which a worker that waits for another one in a step gives up."""

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""

distributed: Any = torch.distributed  # partly annotated

State = Sequence[NDArray[np.generic]]


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    options: Mapping[str, Any]
    """Ray's options of the actor."""
    device: str
    threads: int
    """Of PyTorch on the CPU."""


@contextlib.contextmanager
def ray_fit() -> Iterator["RayFit"]:
    """Yield a `Fit` on the cluster at RAY_ADDRESS, else on one of this machine that ends with the block.

    Raises:
        ProtofleetError: there is no cluster, or it has failed.
    """
    with connected():
        yield RayFit()


class RayFit:
    """Trains with one worker for each GPU of the cluster, or, without GPUs, for each machine."""

    def __init__(self, *, workers: int = 0) -> None:
        self._workers = workers

    def __call__(
        self, data: SortedPrototypes, *, recipe: Recipe, seed: int, device: str, report: Report
    ) -> tuple[Head, int]:
        """Train on the workers.

        Raises:
            ProtofleetError: a CUDA device is configured and there is none, or too many workers have ended.
        """
        # Takes no step: it has the state after the last epoch, and the head in the end.
        whole = AdapterTraining(data, recipe=recipe, seed=seed, device="cpu")
        for restarts in range(RESTARTS + 1):
            try:
                with _group(self._places(device)) as group:
                    group.load(data, recipe, seed, whole.state())
                    while whole.done < whole.epochs:
                        figures, state = group.epoch()
                        whole.restore(state)
                        report(figures)
                break
            except ray.exceptions.RayError as error:
                if isinstance(getattr(error, "cause", None), ProtofleetError) or restarts == RESTARTS:
                    raise
                sys.stderr.write(f"a worker has failed after epoch {whole.done}: {last_line(error)}\n")
        return whole.head, whole.epochs

    def _places(self, device: str) -> list[Place]:
        """Return where workers run: on machines that can be reached now."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
        if device != "cpu" and gpus:
            return [Place({"num_gpus": 1}, "cuda", 1) for _ in range(self._workers or gpus)]
        device = "cpu" if device == "auto" else device
        if self._workers:
            return [Place({"num_cpus": 1}, device, 1) for _ in range(self._workers)]
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return [
            Place(
                {"num_cpus": 1, "scheduling_strategy": at(node["NodeID"], soft=False)},
                device,
                int(node["Resources"]["CPU"]),
            )
            for node in nodes
        ]


@contextlib.contextmanager
def _group(places: Sequence[Place]) -> Iterator["_Group"]:
    """Start workers, and end them with the block."""
    actors: list[Any] = []
    try:
        actors.extend(ray.remote(AdapterWorker).options(**place.options).remote() for place in places)
        yield _Group(actors, places)
    finally:
        for actor in actors:
            ray.kill(actor)


class _Group:
    """Workers that train together."""

    def __init__(self, actors: Sequence[Any], places: Sequence[Place]) -> None:
        self._actors = actors
        self._places = places

    def load(self, data: SortedPrototypes, recipe: Recipe, seed: int, state: State) -> None:
        """Send the prototypes in chunks, and the state to continue with."""
        small = {each.name: getattr(data, each.name) for each in fields(data) if each.name != "deviations"}
        shape, rows = tuple(data.deviations.shape), max(1, CHUNK_BYTES // (4 * data.deviations.shape[1]))
        self._all("prepare", __version__, small, shape)
        for start in range(0, shape[0], rows):
            chunk = ray.put(data.deviations[start : start + rows].numpy())
            self._all("receive", start, chunk)
        store = _get([self._actors[0].store.remote()])[0]
        _get(
            [
                actor.join.remote(number, len(self._actors), store, place, recipe, seed, state)
                for number, (actor, place) in enumerate(zip(self._actors, self._places, strict=True))
            ]
        )

    def epoch(self) -> tuple[dict[str, Any], State]:
        """Train for an epoch; return its figures and the state after it."""
        first: tuple[dict[str, Any], State] = self._all("epoch")[0]
        return first

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return _get([getattr(actor, method).remote(*arguments) for actor in self._actors])


def _get(references: list[Any]) -> list[Any]:
    """Return the results; the first error is raised at once, while others may wait for the worker that failed."""
    waiting = references
    while waiting:
        ended, waiting = ray.wait(waiting)
        ray.get(ended)
    results: list[Any] = ray.get(references)
    return results


class AdapterWorker:
    """One process of a training; its methods are called in this order."""

    def prepare(self, version: str, small: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Make room for the prototypes.

        Raises:
            ProtofleetError: this is another version, or there is no room.
        """
        require_version(version)
        self._deviations = Arrays(Path(tempfile.gettempdir())).empty(shape)
        self._small = small

    def receive(self, start: int, rows: NDArray[np.float32]) -> None:
        """Store some of the prototypes."""
        self._deviations[start : start + len(rows)] = rows

    def store(self) -> tuple[str, int]:
        """Start what the workers find each other by; return its address."""
        host = _use_clusters_network()
        self._store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(
        self,
        index: int,
        number: int,
        store: tuple[str, int],
        place: Place,
        recipe: Recipe,
        seed: int,
        state: State,
    ) -> None:
        """Join the others, and continue with a state.

        Raises:
            ProtofleetError: a CUDA device is configured and there is none.
        """
        _use_clusters_network()
        torch.set_num_threads(place.threads)
        device = torch_device(place.device)
        distributed.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            store=self._store if index == 0 else distributed.TCPStore(*store),
            rank=index,
            world_size=number,
            timeout=timedelta(seconds=STEP_TIMEOUT_S),
        )
        deviations = torch.as_tensor(self._deviations)
        data = SortedPrototypes(
            **{**self._small, "deviations": deviations, "in_file": is_in_file(self._deviations)}
        )
        share = Share(index, number, distributed.all_reduce)
        self._training = AdapterTraining(data, recipe=recipe, seed=seed, device=device, share=share)
        self._training.restore(state)
        self._is_first = index == 0

    def epoch(self) -> tuple[dict[str, Any], State]:
        """Train for an epoch; return its figures, and in the first worker the state."""
        figures = self._training.epoch()
        return figures, self._training.state() if self._is_first else ()


def _use_clusters_network() -> str:
    """Return the machine's address in the cluster, and let gloo use it: a host's name may stand for loopback."""
    address = str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return address
