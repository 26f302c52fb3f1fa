"""Do the outputs verify? One network of every torchvision family, optimized in both lanes.

    python -m benchmarks.families [--device cpu|cuda] [--models NAME ...] [--budget 15] [--out DIR]

Writes DIR/<device>/families.json and a table, network by network; networks not run this time keep their rows.
Ways to run (TorchScript, ONNX Runtime, inductor) are left out, so that every family takes seconds; each
network runs in this process.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from ampopt import AmpoptError, optimize
from ampopt.passes import PIPELINE
from ampopt.system.environment import environment
from benchmarks import cold_lines, cold_start
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.models import randomize_batch_norm
from benchmarks.results_files import commit, results_folder, write_table

CLASSIFIERS = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
    *("inception_v3", "maxvit_t", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "regnet_x_400mf"),
    *("regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1"),
    *("swin_t", "swin_v2_t", "vgg11_bn", "vit_b_16", "wide_resnet50_2"),
)
SEGMENTERS = (
    *("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"),
)


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A torchvision network with random weights and non-trivial BN statistics, and an input for it."""
    import torchvision

    generator = torch.Generator().manual_seed(1)
    side = 224 if name in CLASSIFIERS else 192
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        extra: dict[str, Any] = {"weights_backbone": None} if name in SEGMENTERS else {}
        if name in ("googlenet", "inception_v3"):
            extra = {"init_weights": False}
        model = torchvision.models.get_model(name, weights=None, **extra).eval()
        x = torch.randn(1, 3, side, side, generator=generator)
        randomize_batch_norm(model, (x,), generator)
        for layer in model.modules():  # ViT's head begins as zero, and would hide every mistake
            if isinstance(layer, nn.Linear) and not layer.weight.any():
                nn.init.normal_(layer.weight, std=0.02)
    return model, x


def measure(name: str, device: torch.device, budget_s: float) -> dict[str, Any]:
    """One network in both lanes: errors, limits, verdicts, latency."""
    model, x = build(name)
    row: dict[str, Any] = {"model": name, "environment": environment(device), "commit": commit()}
    for lane in ("fp32", "amp"):
        try:
            fast = optimize(
                model.to(device),
                (x.to(device),),
                precision=lane,
                budget_s=budget_s,
                exclude=tuple(step.name for step in PIPELINE.engines),
                cache=False,
                progress=False,
            )
            summary = fast.report.lanes[lane]
            row[lane] = {"error": summary.error, "eager_error": summary.eager_error, "verified": True}
            row[lane] |= {"passes": list(summary.passes), "eager_ms": summary.eager.median * 1e3}
            row[lane] |= {"ms": summary.best.median * 1e3}
        except AmpoptError as error:
            row[lane] = {"verified": False, "reason": str(error)}
    return row


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """A line for each network: error (eager's own) and latency in ms (eager's) of both lanes."""
    facts = rows[0]["environment"]
    lines = [
        f"# Verification of torchvision's families on {facts['device']}",
        "",
        f"torch {facts['torch']}; commit {', '.join(sorted({row['commit'] for row in rows}))}.",
        "Relative error against float64 (eager's own in the same precision), latency in ms (eager's).",
        "",
        "| network | fp32 error | fp32 ms | amp error | amp ms |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"]]
        for lane in ("fp32", "amp"):
            result = row[lane]
            if result["verified"]:
                cells.append(f"{result['error']:.1e} ({result['eager_error']:.1e})")
                cells.append(f"{result['ms']:.2f} ({result['eager_ms']:.2f})")
            else:
                cells += [f"NOT VERIFIED: {result['reason']}", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    good = sum(row[lane]["verified"] for row in rows for lane in ("fp32", "amp"))
    told = [*lines, "", f"{good} of {2 * len(rows)} verified.", *cold_lines.lines(rows)]
    return "\n".join(told) + "\n"


def main() -> None:
    """Measure every network asked for and write the results."""
    parser = parser_for(__doc__)
    names = [*CLASSIFIERS, *SEGMENTERS]
    add_place(parser)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for each lane of each network")
    cold_start.add_option(parser)
    options = parser.parse_args()
    device = device_of(options)
    folder = results_folder(options.out, device)
    for name in options.models:
        row = measure(name, device, options.budget)
        if name == options.models[0] and options.default_call:
            row = cold_start.beside(row, f"torchvision/{name}", device)
        write_table(folder, "families", [row], operator.itemgetter("model"), names, to_markdown)
        print(to_markdown([row]).splitlines()[-3], flush=True)


if __name__ == "__main__":
    main()
