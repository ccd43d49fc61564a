"""`python -m research families`: pooled blocks of a small network of each family of timm, beside timm's own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.report import Table, json_option, write_json
from export.backbones import Choice, load_backbone
from export.layers import Graph
from protocol.errors import ProtofleetError

NETWORKS = (
    *("beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "caformer_s18", "coat_tiny", "convit_tiny"),
    *(
        "convmixer_768_32",
        "cpubone_nano",
        "crossvit_tiny_240",
        "cs3darknet_focus_s",
        "csatv2",
        "cspnext_tiny",
    ),
    *(
        "davit_tiny",
        "deit_tiny_distilled_patch16_224",
        "densenet121",
        "dla46x_c",
        "dpn48b",
        "edgenext_xx_small",
    ),
    *("efficientformer_l1", "efficientformerv2_s0", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0"),
    *("ese_vovnet19b_slim_dw", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t8", "focalnet_tiny_srf"),
    *("gcvit_xxtiny", "ghostnet_050", "gmlp_ti16_224", "halonet_h1", "hgnetv2_b0", "hiera_tiny_224"),
    *(
        "hrnet_w18_small",
        "iformer_t",
        "inception_next_atto",
        "inception_v3",
        "lcnetv2_small",
        "legacy_seresnet18",
    ),
    *("levit_128s", "lowformer_b0", "maxvit_rmlp_pico_rw_256", "mixer_s32_224", "mobilenetv3_small_050"),
    *("mobilevit_xxs", "mobilevitv2_050", "mvitv2_tiny", "naflexvit_base_patch16_gap", "nest_tiny"),
    *("nextvit_small", "pit_ti_224", "poolformerv2_s12", "pvt_v2_b0", "rdnet_tiny", "regnetx_002"),
    *(
        "repghostnet_050",
        "repvit_m1",
        "res2next50",
        "resmlp_12_224",
        "resnest14d",
        "resnetv2_18",
        "rexnet_100",
    ),
    *("sam2_hiera_tiny", "samvit_base_patch16_224", "selecsls42", "sequencer2d_s", "shvit_s1", "skresnet18"),
    *("starnet_s050", "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_ns_224"),
    *("swinv2_tiny_window8_256", "test_byobnet", "test_coatnet", "test_convnext", "test_efficientnet"),
    *(
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
        "test_vit",
        "tiny_vit_5m_224",
        "tnt_s_legacy_patch16_224",
    ),
    *(
        "tresnet_m",
        "twins_svt_small",
        "visformer_tiny",
        "vit_relpos_small_patch16_224",
        "vit_tiny_r_s16_p8_224",
    ),
    *("vitamin_small_224", "volo_d1_224", "xception41p", "xcit_nano_12_p16_224"),
)
TOLERANCE = 1e-5
"""Relative error of a pooled value."""

COLUMNS = {"network": "<32", "blocks": ">7", "compared": ">9", "worst error": ">12.1e"}


@click.command("families")
@click.option(
    "--network", "networks", multiple=True, default=NETWORKS, help="May be repeated.  [default: all]"
)
@json_option
def command(networks: Sequence[str], json_file: Path | None) -> None:
    """Compare pooled blocks with those of timm, in a small network of each family, with random weights.

    timm's `forward_intermediates` gives the outputs of some blocks as (n, C, H, W). The blocks that have the same
    values in any order must have the same means.
    """
    table, runs, differing = Table(COLUMNS), [], []
    for network in networks:
        errors = list(_errors(network))
        compared = [each for each in errors if each is not None]
        worst = max(compared, default=0.0)
        table.row(network, len(errors), len(compared), worst)
        runs.append({"network": network, "blocks": len(errors), "compared": len(compared), "worst": worst})
        differing += [network] * (worst > TOLERANCE)
    write_json(json_file, "families", runs=runs)
    if differing:
        raise ProtofleetError(f"means of blocks differ from timm's: {', '.join(differing)}")


def _errors(name: str) -> Iterator[float | None]:
    """Yield the relative error of each block's mean, or None if timm gives no output with its values."""
    torch.manual_seed(0)
    backbone = load_backbone(Choice(name, random=True))
    network: Any = backbone.module
    size = backbone.config["input_size"]
    graph = Graph(network, size)
    with torch.no_grad():
        given = network.forward_intermediates(graph.image, intermediates_only=True, output_fmt="NCHW")
    theirs = given["image_intermediates"] if isinstance(given, dict) else given
    for path in (graph.all() | graph.residual()).values():
        layout, output = graph.layout(path), graph.outputs[path].detach()
        ours = output[:, layout.prefix_tokens :] if layout.prefix_tokens else output
        same = [each for each in theirs if _same_values(each, ours)]
        if path != "" and same:
            mean = same[0].mean((2, 3))
            yield float((layout.pool(output) - mean).norm() / mean.norm())
        elif path != "":
            yield None


def _same_values(left: Tensor, right: Tensor) -> bool:
    return left.numel() == right.numel() and torch.allclose(
        left.flatten().sort().values, right.flatten().sort().values, rtol=1e-4, atol=1e-4
    )
