"""`ampopt.load`: a saved bundle comes back as the same model, on every backend, or is refused."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ampopt
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.bundle.signing import generate_keys
from ampopt.deploy.loaded_model import LoadedModel
from ampopt.deploy.runtime import OptimizedModule
from ampopt.engines.openvino_engine import OpenVinoEngine
from ampopt.errors import AmpoptError, BundleError, InputError
from ampopt.ir.lanes import mixed
from ampopt.ir.transform import Recipe
from ampopt.measure.sampling import Measurement
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, Openvino
from ampopt.search.optimizer import Optimizer
from tests.helpers import Model, with_statistics
from tests.support.planted import module_of

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fast() -> OptimizedModule:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()))
    module = module_of(model, X, passes=(FoldConvBn(), ChannelsLast()))
    module.report.model = "Small"
    return module


@pytest.fixture(scope="module")
def bundle(fast: OptimizedModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "robot.ampopt"
    fast.save(path, tune_s=0.5, cpp=True)
    return path


def rewritten(bundle: Path, target: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    """The bundle with its manifest and files changed, and hashed anew, as an attacker would."""
    opened = open_bundle(bundle)
    manifest, files = dict(opened.manifest), {name: opened.read(name) for name in opened.names}
    del manifest["files"]
    change(manifest, files)
    write_bundle(target, manifest, dict(files))
    return target


@pytest.mark.parametrize("backend", ["ampopt", "onnxruntime", "original", "auto"])
def test_every_backend_gives_the_models_outputs(fast: OptimizedModule, bundle: Path, backend: str) -> None:
    loaded = ampopt.load(bundle, backend=backend, device="cpu")
    assert loaded.backend == backend or backend == "auto"
    y = torch.randn(1, 3, 12, 12)
    assert torch.allclose(loaded(y), fast._optimized.original(y), atol=1e-5)
    assert not loaded.notes


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_stays_in_its_process(bundle: Path, take: Callable[[object], object]) -> None:
    with pytest.raises(InputError, match="load the bundle again, in each process that runs it"):
        take(ampopt.load(bundle, backend="onnxruntime"))


def test_the_recipe_is_replayed_on_the_machine_that_it_was_measured_on(bundle: Path) -> None:
    loaded = ampopt.load(bundle, backend="ampopt", device="cpu")
    assert isinstance(loaded._call, OptimizedModule)
    assert [step.name for step in loaded._call.program.recipe] == ["fold-conv-bn", "channels-last"]


@pytest.fixture(scope="module")
def in_openvino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a model whose fastest program runs in OpenVINO, with options that are no defaults."""
    pytest.importorskip("openvino")
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()))
    chosen = Openvino(options=(("threads", "1"), ("latency", "false")))
    path = tmp_path_factory.mktemp("openvino") / "robot.ampopt"
    module = module_of(model, X, passes=(FoldConvBn(), chosen))
    module.report.model = "Small"
    module.save(path, tune_s=0.1)
    return path


@pytest.mark.parametrize("backend", ["ampopt", "openvino", "onnxruntime", "auto"])
def test_a_program_in_openvino_comes_back(in_openvino: Path, backend: str) -> None:
    loaded = ampopt.load(in_openvino, backend=backend, device="cpu")
    assert loaded.backend == backend or backend == "auto"
    assert loaded.notes == []
    expected = ampopt.load(in_openvino, backend="original", device="cpu")(X)
    assert torch.allclose(loaded(X), expected, atol=1e-5)
    if backend == "auto":
        assert set(loaded.choice) == {"ampopt", "openvino", "onnxruntime"}
    if backend == "openvino":
        assert loaded.threads == 1
    if backend == "ampopt":
        assert isinstance(loaded._call, OptimizedModule)
        assert isinstance(loaded._call.program.engine, OpenVinoEngine)
    own = open_bundle(in_openvino).manifest["onnx"]["openvino"]
    assert own["options"] == OpenVinoOptions(threads=1, latency=False).to_dict()
    assert own["latency"]["p50_ms"] > 0


def test_without_openvino_it_loads_and_says_what_is_left_out(
    in_openvino: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else real(name))
    loaded = ampopt.load(in_openvino, device="cpu")
    assert loaded.backend in ("ampopt", "onnxruntime")
    advice = "openvino is not installed: run  pip install 'ampopt[openvino]'"
    assert f"openvino is left out: {advice}" in loaded.notes
    assert any(note.startswith("openvino is not used") and "pip install" in note for note in loaded.notes)
    with pytest.raises(BundleError, match="pip install openvino"):
        ampopt.load(in_openvino, backend="openvino", device="cpu")


def test_on_another_machine_it_is_measured_anew(bundle: Path, tmp_path: Path) -> None:
    def elsewhere(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        manifest["fingerprint"]["device"] = "an abacus"

    path = rewritten(bundle, tmp_path / "b", elsewhere)
    loaded = ampopt.load(path, backend="ampopt", device="cpu", budget_s=2.0)
    assert "made on another machine, so measured anew: device an abacus" in loaded.notes[0]
    assert isinstance(loaded._call, OptimizedModule)
    assert loaded._call.report.entries


@pytest.mark.parametrize("fact", ["threads", "torch"])
def test_on_the_same_machine_it_is_told_what_else_differs(fact: str, bundle: Path, tmp_path: Path) -> None:
    def otherwise(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        manifest["fingerprint"][fact] = "99"

    path = rewritten(bundle, tmp_path / "b", otherwise)
    (note, *_) = ampopt.load(path, backend="ampopt", device="cpu", budget_s=0.5).notes
    assert note.startswith(f"made with other versions or settings, so measured anew: {fact} 99 → ")
    assert note.endswith("(budget_s limits how long)")


@pytest.mark.parametrize(
    ("call_s", "given", "budget_s"),
    [(1e-3, None, 60.0), (0.5, None, 300.0), (9.0, None, 600.0), (1.0, 5.0, 5.0)],
)
def test_without_a_budget_slow_calls_are_measured_anew_for_longer(
    call_s: float,
    given: float | None,
    budget_s: float,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        manifest["fingerprint"]["device"] = "an abacus"

    def run(optimizer: Optimizer) -> OptimizedModule:
        seen.append(optimizer._options.budget_s)
        raise InputError("seen")

    seen: list[float] = []
    monkeypatch.setattr("ampopt.search.optimizer.seconds_of_a_call", lambda *_: call_s)
    monkeypatch.setattr(Optimizer, "run", run)
    path = rewritten(bundle, tmp_path / "b", elsewhere)
    with pytest.raises(AmpoptError, match="seen"):
        ampopt.load(path, backend="ampopt", device="cpu", budget_s=given)
    assert seen == [budget_s]


def test_calls_of_another_kind_are_refused(bundle: Path) -> None:
    loaded = ampopt.load(bundle, backend="original", device="cpu")
    for args in ((torch.randn(1, 3, 13, 12),), (X.double(),), (X, X), ()):
        with pytest.raises(InputError, match="made for other calls"):
            loaded(*args)


def test_a_mixed_precision_lane_is_saved_with_its_own_tolerance(tmp_path: Path) -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    low = torch.bfloat16
    module = module_of(model, X)
    recipe = Recipe(mixed("amp", low), (BakeAutocast(), FoldConvBn()))
    program = recipe.lane.start(module._optimized.captured.program)
    for step in recipe.passes:
        program = step.apply(program).program
    lane = OptimizedModule(
        module._optimized.original, module._optimized.captured, program, recipe, module.report
    )
    lane.save(tmp_path / "b", onnx=None)
    manifest = open_bundle(tmp_path / "b").manifest
    assert manifest["lane"] == {"name": "amp", "dtype": "bfloat16"}
    assert 1e-3 < manifest["tolerance"] <= 0.5
    assert "onnx" not in manifest
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    assert loaded.backend == "ampopt"
    assert torch.allclose(loaded(X), lane(X), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_keep_the_dtype_that_the_model_has_them_in(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Model(lambda m, x: m.linear(x.to(dtype)).to(x.dtype), linear=nn.Linear(X.shape[-1], 4).to(dtype))
    module = module_of(model.eval(), X)
    module.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    assert loaded.backend == "ampopt"
    assert torch.equal(loaded(X), module(X))


def _wrong_output(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    tensors = safetensors.torch.load(files["self_test.safetensors"])
    tensors["output.output"] = tensors["output.output"] + 0.1
    files["self_test.safetensors"] = safetensors.torch.save(tensors)


def _wrong_weight(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    tensors = safetensors.torch.load(files["weights.safetensors"])
    name = max(tensors, key=lambda key: tensors[key].numel())
    files["weights.safetensors"] = safetensors.torch.save(tensors | {name: 1.1 * tensors[name]})


def _twice(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files["program.json"] = files["program.json"].replace(b'"recipe": [', b'"recipe": [], "recipe": [')


def _no_pass(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files["program.json"] = files["program.json"].replace(b"fold-conv-bn", b"__import__('os')")


def _deep(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files["program.json"] = b"[" * 100_000


def _no_tensor(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files["self_test.safetensors"] = safetensors.torch.save({})


def _no_safetensors(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files["weights.safetensors"] = b"\x80\x04 a pickle, perhaps"


def _other_lane(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["lane"]["dtype"] = "float64"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_wrong_output, "the self-test fails on ampopt: output 0"),
        (_wrong_weight, "the self-test fails on ampopt: output 0"),
        (_twice, "the same key twice"),
        (_no_pass, "there is no pass"),
        (_deep, "RecursionError"),
        (_no_tensor, "has no input.input"),
        (_no_safetensors, "does not load"),
        (_other_lane, "a lane in float64 is not known"),
    ],
)
def test_a_bundle_with_false_contents_is_refused(
    bundle: Path, tmp_path: Path, change: Callable[[Any, Any], None], reason: str
) -> None:
    with pytest.raises(BundleError, match=reason.replace("(", r"\(")) as caught:
        ampopt.load(rewritten(bundle, tmp_path / "b", change), backend="ampopt", device="cpu")
    assert str(tmp_path / "b") in str(caught.value)


def test_auto_uses_another_backend_where_one_fails_and_says_so(bundle: Path, tmp_path: Path) -> None:
    loaded: LoadedModel = ampopt.load(rewritten(bundle, tmp_path / "b", _wrong_weight), device="cpu")
    assert loaded.backend == "onnxruntime"
    assert "ampopt is not used" in loaded.notes[-1]


@pytest.mark.parametrize(
    ("seconds", "threads", "chosen"),
    [
        ({"ampopt": (1.0, 1.2), "onnxruntime": (2.0, 2.1)}, 4, "ampopt"),
        ({"ampopt": (1.0, 9.0), "onnxruntime": (1.2, 1.3)}, 4, "onnxruntime"),  # its tail is shorter
        ({"ampopt": (1.0, 1.2), "onnxruntime": (1.02, 1.2)}, 10_000, "onnxruntime"),  # it takes less threads
    ],
)
def test_auto_looks_at_the_tail_and_at_threads(
    seconds: dict[str, tuple[float, float]], threads: int, chosen: str, bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def made_up(calls: object, **options: object) -> dict[str, Measurement]:
        return {name: Measurement((mostly,) * 150 + (last,) * 50) for name, (mostly, last) in seconds.items()}

    fingerprint = open_bundle(bundle).manifest["fingerprint"]
    monkeypatch.setattr("ampopt.bundle_load.environment", lambda device: fingerprint)
    monkeypatch.setattr("ampopt.deploy.known_backend.interleave", made_up)
    monkeypatch.setattr("ampopt.bundle_load.known_from", lambda *given: None)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    loaded = ampopt.load(bundle, device="cpu")
    assert loaded.backend == chosen
    assert loaded.choice.keys() == seconds.keys()
    assert f"{threads} threads" in loaded.choice["ampopt"]


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta", "cpu!"])
def test_a_device_that_is_not_there_is_refused(device: str, bundle: Path) -> None:
    with pytest.raises(InputError, match=f"device='{device}'"):
        ampopt.load(bundle, device=device)


def test_a_signed_bundle_is_known_by_its_makers_key(fast: OptimizedModule, tmp_path: Path) -> None:
    generate_keys(tmp_path / "private.pem", tmp_path / "public.pem")
    generate_keys(tmp_path / "other.pem", tmp_path / "other_public.pem")
    fast.save(tmp_path / "b", onnx=None, sign_key=tmp_path / "private.pem")
    assert ampopt.load(tmp_path / "b", verify_key=tmp_path / "public.pem", device="cpu")(X) is not None
    with pytest.raises(BundleError, match="signature"):
        ampopt.load(tmp_path / "b", verify_key=tmp_path / "other_public.pem", device="cpu")


def test_a_backend_that_there_is_not_is_refused(bundle: Path) -> None:
    choice = "auto, ampopt, onnxruntime, openvino, original"
    with pytest.raises(InputError, match=f"backend='tpu': choose from {choice}"):
        ampopt.load(bundle, backend="tpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["ampopt", "auto"])
def test_on_a_gpu_the_program_is_replayed_under_its_cuda_graph(
    backend: str, tmp_path: Path, all_kept: contextlib.AbstractContextManager[None]
) -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())).cuda()
    x, y = (torch.randn(1, 3, 32, 32, device="cuda") for _ in range(2))
    with all_kept:  # a CUDA graph, too, whatever shares the GPU
        fast = ampopt.optimize(model, x, precision="amp", budget_s=20, exclude=("compile",), progress=False)
    assert isinstance(fast, OptimizedModule)
    fast.save(tmp_path / "robot.ampopt", tune_s=2.0)
    loaded = ampopt.load(tmp_path / "robot.ampopt", backend=backend)
    assert loaded.captured.program.device.type == "cuda"
    with torch.no_grad():
        found, expected = loaded(y), model(y)
    assert (found - expected).norm() < 5e-3 * expected.norm()
    if backend == "ampopt":
        assert isinstance(loaded._call, OptimizedModule)
        assert loaded._call.program.recipe == fast.program.recipe
        assert loaded._call.program.cuda_graph
