"""Use pooled outputs of a network's blocks, each scaled by itself, as features."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from export.layout import Layout, find_layout
from export.to_onnx import suggestion, to_onnx
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import Block

LAST = "last"
"""The network's own pooled feature, as a block; its path in the network is empty."""

SPACED_BLOCKS = 4
"""Blocks that `residual` takes of a network whose blocks all have one width."""

DEEPEST = 3
"""Blocks that `depthwise` takes."""

DEFAULT_LAYERS = (("depthwise",), (LAST, "residual"))
"""Defaults of `--layers`, of which the first that a network has is used (ADR 0057), or else LAST."""


class Blocks(nn.Module):
    """A network whose features are its modules' pooled outputs: signed root, LayerNorm, concatenated by `paths`."""

    def __init__(
        self,
        network: nn.Module,
        paths: Iterable[str],
        *,
        layouts: Mapping[str, Layout],
        widths: Iterable[int],
    ) -> None:
        super().__init__()
        self.network = network
        self.paths = tuple(paths)
        self.widths = tuple(widths)  # constants of the graph, which PyTorch's older exporter requires
        self._pooled: dict[str, Tensor] = {}
        for path, layout in layouts.items():
            network.get_submodule(path).register_forward_hook(
                # Pools at once: an activation that follows may overwrite the output.
                lambda _module, _inputs, output, path=path, layout=layout: self._pooled.update(
                    {path: layout.pool(output)}
                )
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (n, L)."""
        self.network(images)
        pooled = [self._pooled[path] for path in self.paths]
        self._pooled.clear()
        roots = [each.sign() * each.abs().sqrt() for each in pooled]
        scaled = [
            functional.layer_norm(root, [width]) for root, width in zip(roots, self.widths, strict=True)
        ]
        return torch.cat(scaled, dim=1)


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]  # it has no types
    """Notes which module each sum of two hidden activations is in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        """Paths of the modules that are being called, the innermost last."""
        self.found: dict[str, list[torch.Size]] = {}
        """Shapes of the sums in each module."""

    def __torch_dispatch__(self, operator: Any, _types: Any, values: Any = (), options: Any = None) -> Any:
        if operator.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and all(
            isinstance(term, Tensor) and not isinstance(term, nn.Parameter) and term.ndim > 2
            for term in values[:2]
        ):
            total = operator(*values, **(options or {}))
            self.found.setdefault(self.running[-1], []).append(total.shape)
            return total
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
        with torch.inference_mode(mode=False), torch.enable_grad(), sums:
            self.image = torch.linspace(-2, 2, math.prod(input_size)).reshape(1, *input_size)
            network(self.image)
        for handle in handles:
            handle.remove()
        self.outputs = {path: output for path, _, output in self.calls}
        self.stages = [entry["module"] for entry in getattr(network, "feature_info", [])]
        self._adding = list(sums.found)
        self.sums = [path for path, shapes in sums.found.items() if path and self._has_residual(path, shapes)]
        """Modules with residual sums, but for those that are given parts of an image in place of images."""
        self._aspect = input_size[-2] / input_size[-1]
        self._layouts: dict[str, Layout | None] = {}

    def _has_residual(self, path: str, sums: Iterable[torch.Size]) -> bool:
        """Return whether a module's output has one of its sums as all, or as the first of its channels.

        Others are those of scores of an attention, or of a class token.
        """
        output = self.outputs.get(path)
        return (
            output is not None
            and len(output) == 1
            and any(
                total.numel() == output.numel()
                or (len(total) == output.ndim == 4 and total[2:] == output.shape[2:])
                for total in sums
            )
        )

    def layout(self, path: str) -> Layout:
        """Return the layout of a module's output; raises ConfigError if it cannot be known."""
        if layout := self._known_layout(path):
            return layout
        shape = "x".join(map(str, self.outputs[path].shape))
        raise ConfigError(
            f"cannot pool the output of {path!r}, {shape} for one image: which of its dimensions are positions of the "
            "image cannot be known; choose other --layers, such as last"
        )

    def _known_layout(self, path: str) -> Layout | None:
        if path not in self._layouts:
            self._layouts[path] = find_layout(
                self.outputs[path],
                self._parameters_before(path),
                prefix_tokens=getattr(self.network, "num_prefix_tokens", 0),
                aspect=self._aspect,
            )
        return self._layouts[path]

    def _parameters_before(self, path: str) -> Iterator[nn.Parameter]:
        """Yield the parameters of each module that was called up to a module's output, the last one first."""
        end = max(number for number, call in enumerate(self.calls) if call[0] == path)
        for called in dict.fromkeys(call[0] for call in reversed(self.calls[: end + 1])):
            for parameter in self.network.get_submodule(called).parameters(recurse=False):
                if parameter.requires_grad and len(parameter) > 1:
                    yield parameter

    def pooled(self, path: str) -> Tensor:
        """Return a module's pooled output (1, C)."""
        return self.layout(path).pool(self.outputs[path]).detach()

    def resolution(self, path: str) -> tuple[int, ...]:
        """Return the height and width of a module's output, its number of tokens, or nothing if it is pooled."""
        return tuple(self.outputs[path].shape[number] for number in self.layout(path).positions)

    def all(self) -> dict[str, str]:
        """Return the paths of timm's stages, `residual`, `depthwise` and the network by name, in its order."""
        stages = [path for path in self.stages if path in self.outputs and self._known_layout(path)]
        paths = {path: path for path in stages} | self.residual() | self.depthwise() | {LAST: ""}
        order = list(self.outputs)
        return dict(sorted(paths.items(), key=lambda entry: order.index(entry[1])))

    def residual(self) -> dict[str, str]:
        """Return the modules that end with each width's last residual sum, or four evenly spaced ones of one width."""
        sums = [path for path in self.sums if self._known_layout(path)]
        last = {self.pooled(path).shape[1]: path for path in sums}
        ends = [self._stage_of(path) for path in last.values()]
        if len(last) == 1 and (count := len(sums)) > SPACED_BLOCKS:
            ends = [sums[count * number // SPACED_BLOCKS - 1] for number in range(1, SPACED_BLOCKS + 1)]
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
                if activation and self._known_layout(activation):
                    found[f"c{layer.out_channels}"] = activation
        return found

    def deepest(self) -> dict[str, str]:
        """Return the last DEEPEST of `depthwise`; none of a network whose last blocks have no such activation.

        At most one residual sum follows the last activation of such a block: the block's own.
        """
        order = list(self.outputs)
        last = sorted(self.depthwise().items(), key=lambda entry: order.index(entry[1]))[-DEEPEST:]
        ends = set(order[order.index(last[-1][1]) :]) if last else set()
        return dict(last) if len(ends.intersection(self._adding)) <= 1 else {}

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


def select_default(backbone: Backbone) -> Backbone:
    """Return a backbone with the first of DEFAULT_LAYERS that its network has, or with LAST."""
    graph = Graph(backbone.module, backbone.config["input_size"])
    for layers in DEFAULT_LAYERS:
        with contextlib.suppress(ConfigError):
            return _with_blocks(backbone, graph, _paths(graph, layers, model=backbone.metadata.model))
    return backbone


def _paths(graph: Graph, layers: Sequence[str], *, model: str) -> dict[str, str]:
    """Return the paths of the blocks that `--layers` names, by name."""
    known, paths = graph.all(), dict[str, str]()
    named = {path: path for path in graph.outputs if path} | known
    for layer in layers:
        if layer in named:
            paths[layer] = named[layer]
            continue
        groups = {"all": known, "residual": graph.residual(), "depthwise": graph.deepest()}
        group = groups.get(layer)
        if not group:
            raise ConfigError(f"{model} has no block {layer!r} for --layers; {suggestion(layer, known)}")
        # The network's own feature may be the mean of its last block.
        others = paths | ({LAST: ""} if LAST in (*layers, *group) else {})
        paths |= _distinct(graph, group, others)
    return paths


def _distinct(graph: Graph, group: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the blocks of a group without those that equal one of the others or an earlier one."""
    distinct = dict[str, str]()
    for name, path in group.items():
        before = [other for known, other in {**others, **distinct}.items() if known != name]
        if not any(torch.equal(graph.pooled(path), graph.pooled(other)) for other in before):
            distinct[name] = path
    return distinct


def _with_blocks(backbone: Backbone, graph: Graph, paths: Mapping[str, str]) -> Backbone:
    residual, depthwise = set(graph.residual().values()), set(graph.deepest().values())
    blocks = tuple(
        Block(
            name=name,
            width=graph.pooled(path).shape[1],
            residual=path in residual,
            depthwise=path in depthwise,
        )
        for name, path in paths.items()
    )
    size = sum(block.width for block in blocks)
    metadata = msgspec.structs.replace(backbone.metadata, feature_size=size, blocks=blocks)
    layouts = {path: graph.layout(path) for path in paths.values()}
    widths = [block.width for block in blocks]
    module = Blocks(backbone.module, paths.values(), layouts=layouts, widths=widths).eval()
    return replace(backbone, module=module, metadata=metadata)


def list_layers(backbone: Backbone) -> list[dict[str, Any]]:
    """Return name, width, resolution, bytes and share of the time of each block that `all` takes.

    The bytes are those of the file that ends with the block. The share is its least processor time for one image in
    ONNX Runtime, divided by that of the whole network.
    """
    graph = Graph(backbone.module, backbone.config["input_size"])
    paths = _paths(graph, ["all"], model=backbone.metadata.model)
    whole = _with_blocks(backbone, graph, paths)
    model = onnx.load_from_string(to_onnx(whole.module, whole.metadata))
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
