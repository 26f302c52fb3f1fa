"""The deployment commands: `ampopt export` and `ampopt verify`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from typer import Argument, Exit, Option

import ampopt
from ampopt.bundle.destinations import check_bundle, check_distinct, check_file, check_onnx, is_onnx
from ampopt.bundle.files import open_bundle
from ampopt.cli import options as cli
from ampopt.cli.options import (
    check_lane_io,
    check_request,
    console,
    fixed,
    model_and_call,
    ranges,
    readable_errors,
    write,
    write_report,
)
from ampopt.document.render import finite
from ampopt.errors import ExportError, InputError
from ampopt.measure.field_document import to_document
from ampopt.measure.field_test import FieldReport, Judgment, check_field_test, field_test

if TYPE_CHECKING:
    from ampopt.deploy.loaded_model import LoadedModel
    from ampopt.document.model import Document

Backend = Literal["auto", "ampopt", "onnxruntime", "openvino", "original"]
"""`ampopt.bundle_load.BACKENDS`, copied because that module takes seconds to import."""


def export(
    model: cli.Model,
    output: Annotated[
        Path, Option("--output", "-o", help="model.onnx for ONNX alone; any other name for a bundle.")
    ],
    shapes: cli.Shapes = None,
    image: cli.Image = None,
    npz: cli.Npz = None,
    normalize: cli.Normalize = True,
    weights: cli.Weights = None,
    trust_model_file: cli.TrustModelFile = False,
    precision: cli.Precision = "auto",
    tolerance: cli.Tolerance = None,
    budget: cli.Budget = None,
    policy: cli.Policy = "amp",
    nan: cli.Nan = "keep",
    device: cli.Device = None,
    exclude: cli.Exclude = None,
    passes: cli.Passes = None,
    cache: cli.Cache = True,
    onnx: Annotated[
        Literal["auto", "fp32", "fp16"], Option(help="What the ONNX model computes in; auto: as the lane.")
    ] = "auto",
    io: Annotated[
        Literal["original", "lane", "fp32", "fp16"],
        Option(
            help="Floating-point inputs and outputs: original: in the model's dtypes; lane: in that of the "
            "one lane of --precision; fp32, fp16: of model.onnx alone."
        ),
    ] = "original",
    target: Annotated[
        Literal["onnxruntime", "tensorrt", "openvino"], Option(help="What will run it; decides the opset.")
    ] = "onnxruntime",
    dynamic_batch: Annotated[
        bool, Option("--dynamic-batch", help="Any size of dimension 0 (ONNX alone).")
    ] = False,
    dynamic: cli.Dynamic = None,
    part: Annotated[
        str | None,
        Option("--part", metavar="NAME", help="The submodule to write, of a model that is not one graph."),
    ] = None,
    cpp: Annotated[
        bool, Option("--cpp", help="Put the TorchScript program for C++ into the bundle.")
    ] = False,
    sign: Annotated[
        Path | None, Option("--sign", metavar="KEY", help="Private Ed25519 key (PEM) to sign with.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Keep a model.onnx that failed its verification, marked.")
    ] = False,
    json_file: cli.JsonFile = None,
    verbose: cli.Verbose = False,
) -> None:
    """Optimize a model and write it as verified ONNX, or as a bundle that a robot can trust."""
    with readable_errors(verbose):
        places = {"--output": output, "--json": json_file}
        check_distinct(places, {"--sign": sign})
        sizes = ranges(dynamic)
        _check_output(output, io, target, dynamic_batch, sizes is not None, force, cpp, sign)
        source = (model, shapes, image, npz, normalize, weights, trust_model_file, device)
        check_request(*source, budget, exclude, passes, places)
        own: Literal["original", "lane"] = "lane" if io == "lane" else "original"
        check_lane_io(own, precision)
        place, (json_file, sign) = output.absolute(), fixed(json_file, sign)
        loaded, args, kwargs, where = model_and_call(*source)
        from ampopt.deploy.runtime import OptimizedModule

        fast = ampopt.optimize(
            loaded,
            args,
            example_kwargs=kwargs,
            precision=precision,
            tolerance=tolerance,
            budget_s=budget,
            policy=policy,
            nan=nan,
            device=where,
            exclude=tuple(exclude or ()),
            passes=passes,
            cache=cache,
            io=own,
            dynamic=sizes,
        )
        if sizes is not None and not (isinstance(fast, OptimizedModule) and fast.sizes):
            why = "; ".join(fast.report.notes)
            other = ", or give --dynamic-batch, which does not ask whether one program is as fast here"
            raise ExportError(
                f"{output} would hold for the example's sizes alone ({why}): leave --dynamic out"
                f"{other if is_onnx(output) else ''}"
            )
        if not is_onnx(output):
            fast.save(place, part=part, onnx=onnx, cpp=cpp, sign_key=sign)
            lines = [f"{output}: saved, {place.stat().st_size / 1e6:.1f} MB"]
            facts = (fast.report if part is None else fast.report.regions[part]).to_dict()
        else:
            written = fast.export_onnx(
                place,
                part=part,
                precision=None if onnx == "auto" else onnx,
                io=io if io in ("fp32", "fp16") else None,
                target=target,
                dynamic="batch" if dynamic_batch else None,
                force=force,
            )
            facts = written.to_dict()
            state = "verified" if written.verified else f"FAILED: {written.reason}"
            lines = [
                f"{output}: {state}; {written.precision}, opset {written.opset}, {written.nodes} nodes, "
                f"error {written.error:.2g} on {', '.join(written.providers)}",
                *(f"note: {note}" for note in written.notes),
            ]
        try:
            _write_facts(facts, json_file)
        finally:  # where that file cannot be written, it is at least seen what became of the other one
            for line in lines:
                console().print(line)


def _write_facts(facts: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        write(json_file, json.dumps(finite(facts), indent=2, allow_nan=False) + "\n")


def _check_output(
    output: Path,
    io: str,
    target: str,
    dynamic_batch: bool,
    dynamic: bool,
    force: bool,
    cpp: bool,
    sign: Path | None,
) -> None:
    """Raise what is wrong with where the export goes, and with options that are of the other kind of file."""
    if is_onnx(output):
        foreign = {"--cpp": cpp, "--sign": sign is not None}
        kind, other = "ONNX alone", "a bundle, such as robot.ampopt"
    else:
        foreign = {
            "--io": io in ("fp32", "fp16"),
            "--target": target != "onnxruntime",
            "--dynamic-batch": dynamic_batch,
            "--force": force,
        }
        kind, other = "a bundle", "ONNX alone, such as model.onnx"
    if dynamic and dynamic_batch:
        raise InputError("--dynamic gives the sizes that --dynamic-batch leaves open: give one of them")
    if wrong := [option for option, given in foreign.items() if given]:
        raise InputError(f"{output} is {kind}, and {', '.join(wrong)} is for {other}: leave it out")
    check_file(output)
    if is_onnx(output):
        check_onnx(output)
    else:
        check_bundle(output, onnx=True, sign_key=sign)


def verify(
    bundle: Annotated[Path, Argument(help="A bundle that `ampopt export` or `save` wrote.")],
    backend: Annotated[Backend, Option(help="What runs it; auto: what answers best here.")] = "auto",
    device: cli.Device = None,
    hz: Annotated[float, Option(help="The camera's rate, in frames a second.")] = 30.0,
    seconds: Annotated[float, Option(help="How long frames come.")] = 10.0,
    deadline_ms: Annotated[float | None, Option(help="Default: the time from frame to frame.")] = None,
    slack: Annotated[float, Option(help="Share by which the manifest's latency may be exceeded.")] = 0.25,
    strict: Annotated[
        bool,
        Option("--strict", help="Fail, too, where calls back to back are slower than the manifest says."),
    ] = False,
    verify_key: Annotated[
        Path | None, Option("--verify-key", metavar="KEY", help="Public Ed25519 key (PEM) of the maker.")
    ] = None,
    budget: Annotated[
        float | None,
        Option(
            help="Seconds to measure anew on another machine than the maker's, or with other threads. "
            "Default: 60, more for slow calls."
        ),
    ] = None,
    report_file: cli.ReportFile = None,
    json_file: cli.JsonFile = None,
    verbose: cli.Verbose = False,
) -> None:
    """Test a bundle on this machine: hashes, self-test, and latency at a camera's frame rate.

    Exit code 0: every frame met its deadline; 1: a frame did not, or the bundle is refused.
    """
    with readable_errors(verbose):
        if budget is not None:
            cli.check_budget(budget)
        cli.check_device(device)
        check_field_test(hz, seconds, deadline_ms)
        if not 0 <= slack < float("inf"):
            raise InputError(f"--slack {slack:g}: give a share, 0 or more, such as 0.25")
        written = {"--report": report_file, "--json": json_file}
        cli.check_written(written, {"BUNDLE": bundle, "--verify-key": verify_key})
        open_bundle(bundle, verify_key=verify_key)  # whatever is wrong with it is said at once
        cli.check_is_there(device)
        import torch

        model = ampopt.load(bundle, backend=backend, device=device, verify_key=verify_key, budget_s=budget)
        with torch.no_grad():
            found = _frames(model, hz, seconds, deadline_ms)
        manifest = model.manifest
        latency = _expected(manifest, model.backend)
        judgment = found.judge(latency, slack=slack, strict=strict)
        facts = {
            "bundle": str(bundle),
            "model": manifest["model"],
            "backend": model.backend,
            "choice": model.choice,
            "self_test": "passed",
            "notes": model.notes,
            "expected": latency,
            **found.to_dict(),
            **judgment.to_dict(),
        }
        try:
            write_report(_document(model, bundle, found, judgment, facts), report_file)
            _write_facts(facts, json_file)
        finally:  # where a file cannot be written, what was found is at least seen
            console().print(_table(found))
            _conclude(model, judgment)
    if not judgment.passed:
        raise Exit(1)


def _expected(manifest: Mapping[str, Any], backend: str) -> Mapping[str, Any]:
    """The latency of a backend on the machine that the bundle was made on."""
    onnx = manifest["onnx"] if backend in ("onnxruntime", "openvino") else {}
    latency: Mapping[str, Any] = onnx.get(backend, onnx or manifest)["latency"]
    return latency


def _frames(model: LoadedModel, hz: float, seconds: float, deadline_ms: float | None) -> FieldReport:
    import torch

    from ampopt.measure.frames import frame_call

    program = model.captured.program
    call = frame_call(model, model.captured, program.examples, program.device)
    on_gpu = program.device.type == "cuda"
    memory = (lambda: torch.cuda.max_memory_allocated(program.device)) if on_gpu else None
    return field_test(call, hz=hz, seconds=seconds, deadline_ms=deadline_ms, gpu_memory=memory)


def _document(
    model: LoadedModel, bundle: Path, found: FieldReport, judgment: Judgment, data: Mapping[str, Any]
) -> Document:
    from ampopt.system.environment import environment

    facts = environment(model.captured.program.device)
    run = {"bundle": str(bundle), "backend": model.backend, "self-test": "passed", **facts}
    return to_document(
        found,
        judgment,
        title=f"verify: {model.manifest['model']}",
        subtitle=f"{bundle.name}, run by {model.backend} on {facts['device']}",
        notes=tuple(model.notes),
        facts=run,
        data=data,
    )


def _table(found: FieldReport) -> Table:
    table = Table(
        "", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "jitter ms", "frames", box=None, pad_edge=False
    )
    for name, part in ((f"at {found.hz:g} Hz", found.paced), ("back to back", found.back_to_back)):
        row: dict[str, Any] = part.to_dict()
        keys = ("p50_ms", "p90_ms", "p99_ms", "p99.9_ms", "jitter_ms")
        cells = ["–" if row[key] is None else f"{row[key]:.3f}" for key in keys]
        table.add_row(name, *cells, str(row["frames"]))
    return table


def _conclude(model: LoadedModel, judgment: Judgment) -> None:
    for note in model.notes:
        console().print(f"note: {note}")
    for backend, measured in model.choice.items():
        console().print(f"{'chosen' if backend == model.backend else 'not chosen'}: {backend}, {measured}")
    console().print(f"self-test: passed on {model.backend}")
    for finding in judgment.findings:
        console().print(finding.line)
    slower = (
        "" if not judgment.warnings else ", though slower back to back than promised (--strict fails then)"
    )
    console().print(f"passed{slower}" if judgment.passed else "FAILED")
