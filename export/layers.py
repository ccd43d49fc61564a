"""Use pooled outputs of a network's blocks, each scaled by itself, as features."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from export.backbones import Backbone
from export.block_files import block_tensors, cut, fastest_seconds
from export.to_onnx import suggestion, to_onnx
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import Block

LAST = "last"
"""The network's own pooled feature, as a block; its path in the network is empty."""

SPACED_BLOCKS = 4
"""Blocks that `residual` takes of a network whose blocks all have one width."""


class Blocks(nn.Module):
    """A network whose features are its modules' pooled outputs: signed root, LayerNorm, concatenated by `paths`."""

    def __init__(self, network: nn.Module, paths: Iterable[str]) -> None:
        super().__init__()
        self.network = network
        self.paths = tuple(paths)
        self._pooled: dict[str, Tensor] = {}
        for path in set(self.paths):
            network.get_submodule(path).register_forward_hook(
                # Pools at once: an activation that follows may overwrite the output.
                lambda _module, _inputs, output, path=path: self._pooled.update({path: pool(network, output)})
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (n, L)."""
        self.network(images)
        pooled = [self._pooled[path] for path in self.paths]
        self._pooled.clear()
        roots = [each.sign() * each.abs().sqrt() for each in pooled]
        return torch.cat([functional.layer_norm(root, root.shape[1:]) for root in roots], dim=1)


def pool(network: Any, output: Tensor) -> Tensor:
    """Return the mean (n, C) of a module's output over positions, or over tokens of the image."""
    if output.ndim == 3:
        tokens = output[:, getattr(network, "num_prefix_tokens", 0) :]
        return tokens.mean(1)
    return output.mean(_positions(network)) if output.ndim == 4 else output


def _positions(network: Any) -> tuple[int, int]:
    """Return the dimensions of height and width in outputs with four dimensions."""
    return (1, 2) if getattr(network, "output_fmt", "NCHW") == "NHWC" else (2, 3)


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]  # it has no types
    """Notes which module each sum of two hidden activations is in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        """Paths of the modules that are being called, the innermost last."""
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, operator: Any, _types: Any, values: Any = (), options: Any = None) -> Any:
        if operator.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and all(
            isinstance(term, Tensor) and not isinstance(term, nn.Parameter) and term.ndim > 2
            for term in values[:2]
        ):
            self.found[self.running[-1]] = None
        return operator(*values, **(options or {}))


class Graph:
    """A network's modules, as one image (3, H, W) passes through them."""

    def __init__(self, network: nn.Module, input_size: Sequence[int]) -> None:
        self.network: Any = network
        self.calls: list[tuple[str, Any, Tensor]] = []
        """Path, first input and output of each call, in the order of returns."""
        handles, sums = [], _Sums()

        def returned(path: str, inputs: tuple[Any, ...], output: Any) -> None:
            sums.running.pop()
            if isinstance(output, Tensor) and 2 <= output.ndim <= 4:
                self.calls.append((path, inputs[0] if inputs else None, output))

        for path, module in network.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda _module, _in, path=path: sums.running.append(path)),
                module.register_forward_hook(
                    lambda _module, inputs, out, path=path: returned(path, inputs, out)
                ),
            ]
        with torch.no_grad(), sums:
            network(torch.linspace(-2, 2, math.prod(input_size)).reshape(1, *input_size))
        for handle in handles:
            handle.remove()
        self.outputs = {path: output for path, _, output in self.calls}
        self.stages = [entry["module"] for entry in getattr(network, "feature_info", [])]
        self.sums = [path for path in sums.found if path in self.outputs]

    def pooled(self, path: str) -> Tensor:
        """Return a module's pooled output (1, C)."""
        return pool(self.network, self.outputs[path])

    def resolution(self, path: str) -> tuple[int, ...]:
        """Return the height and width of a module's output, its number of tokens, or nothing if it is pooled."""
        shape = self.outputs[path].shape
        return tuple(shape[d] for d in _positions(self.network)) if len(shape) == 4 else tuple(shape[1:-1])

    def all(self) -> dict[str, str]:
        """Return the paths of timm's stages, `residual`, `depthwise` and the network by name, in its order."""
        stages = [path for path in self.stages if path in self.outputs]
        paths = {path: path for path in stages} | self.residual() | self.depthwise() | {LAST: ""}
        order = list(self.outputs)
        return dict(sorted(paths.items(), key=lambda entry: order.index(entry[1])))

    def residual(self) -> dict[str, str]:
        """Return the modules that end with each width's last residual sum, or four evenly spaced ones of one width."""
        last = {self.pooled(path).shape[1]: path for path in self.sums}
        ends = [self._stage_of(path) for path in last.values()]
        if len(last) == 1 and (count := len(self.sums)) > SPACED_BLOCKS:
            ends = [self.sums[count * number // SPACED_BLOCKS - 1] for number in range(1, SPACED_BLOCKS + 1)]
        return {path: path for path in ends}

    def _stage_of(self, path: str) -> str:
        """Return the stage that ends with a block, or the block."""
        while path not in self.stages:
            parent = path.rpartition(".")[0]
            if self.outputs.get(parent) is not self.outputs[path] or not (
                "." in parent or parent in self.stages
            ):
                break
            path = parent
        return path

    def depthwise(self) -> dict[str, str]:
        """Return the activations after the last depthwise convolution of each number N of channels, by names cN."""
        found: dict[str, str] = {}
        for number, (path, _, output) in enumerate(self.calls):
            layer = self.network.get_submodule(path)
            if isinstance(layer, nn.Conv2d) and layer.groups == layer.out_channels > 1:
                activation = self._activation_of(output, self.calls[number + 1 :])
                found |= {f"c{layer.out_channels}": activation} if activation else {}
        return found

    def _activation_of(self, value: Tensor, calls: Iterable[tuple[str, Any, Tensor]]) -> str | None:
        """Return the module that has the activation of a value, with only normalization before it."""
        for path, given, output in calls:
            if given is value:
                parts = list(self.network.get_submodule(path).modules())
                if any(isinstance(part, nn.Conv2d | nn.Linear) for part in parts):
                    return None
                if any("activation" in type(part).__module__ for part in parts):
                    return path
                value = output
        return None


def select_layers(backbone: Backbone, layers: Sequence[str]) -> Backbone:
    """Return a backbone whose features are those of the blocks that `--layers` names.

    Raises:
        ConfigError: the network has no such block.
    """
    graph = Graph(backbone.module, backbone.config["input_size"])
    return _with_blocks(backbone, graph, _paths(graph, layers, model=backbone.metadata.model))


def _paths(graph: Graph, layers: Sequence[str], *, model: str) -> dict[str, str]:
    """Return the paths of the blocks that `--layers` names, by name."""
    known, paths = graph.all(), dict[str, str]()
    named = {path: path for path in graph.outputs if path} | known
    for layer in layers:
        found = {"all": known, "residual": graph.residual()}.get(layer, {})
        if LAST in (*layers, *found):  # it may be the mean of the network's last block
            copies = {path for path in found.values() if torch.equal(graph.pooled(path), graph.pooled(""))}
            found = {name: path for name, path in found.items() if path not in copies or not path}
        if layer in named:
            found = {layer: named[layer]}
        if not found:
            raise ConfigError(f"{model} has no block {layer!r} for --layers; {suggestion(layer, known)}")
        paths |= found
    return paths


def _with_blocks(backbone: Backbone, graph: Graph, paths: Mapping[str, str]) -> Backbone:
    residual = set(graph.residual().values())
    blocks = tuple(
        Block(name=name, width=graph.pooled(path).shape[1], residual=path in residual)
        for name, path in paths.items()
    )
    size = sum(block.width for block in blocks)
    metadata = msgspec.structs.replace(backbone.metadata, feature_size=size, blocks=blocks)
    return replace(backbone, module=Blocks(backbone.module, paths.values()).eval(), metadata=metadata)


def list_layers(backbone: Backbone, *, opset: int) -> list[dict[str, Any]]:
    """Return name, width, resolution, bytes and share of the time of each block that `all` takes.

    The bytes are those of the file that ends with the block. The share is its least processor time for one image in
    ONNX Runtime, divided by that of the whole network.
    """
    graph = Graph(backbone.module, backbone.config["input_size"])
    paths = _paths(graph, ["all"], model=backbone.metadata.model)
    whole = _with_blocks(backbone, graph, paths)
    model = onnx.load_from_string(to_onnx(whole.module, whole.metadata, opset=opset))
    files = [cut(model, [tensor]) for tensor in block_tensors(model)]
    seconds = fastest_seconds(files, backbone.config["input_size"][1:])
    return [
        {
            "name": name,
            "width": graph.pooled(path).shape[1],
            "resolution": graph.resolution(path),
            "size_bytes": len(files[number]),
            "time_share": round(seconds[number] / seconds[-1], 3),
        }
        for number, (name, path) in enumerate(paths.items())
    ]
