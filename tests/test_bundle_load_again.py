"""`ampopt.load` a second time: the backend that served best is known; nothing else is made or measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ampopt
from ampopt import bundle_load
from ampopt.bundle import program_file
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.bundle.signing import generate_keys
from ampopt.bundle.trial_run import try_out
from ampopt.deploy import bundle_save, known_backend
from ampopt.deploy.carried_exports import EXPORTS
from ampopt.deploy.known_backend import BACKEND, fastest
from ampopt.deploy.loaded_model import LoadedModel
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import BundleError
from ampopt.measure.sampling import Measurement
from ampopt.passes import FoldConvBn, OnnxRuntime
from ampopt.system import cached_facts
from ampopt.system.cache_folder import kept_files
from tests.helpers import with_statistics
from tests.support.planted import module_of

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
MS = {"ampopt": 2e-3, "onnxruntime": 1e-3}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    return saved(tmp_path_factory.mktemp("bundle") / "robot.ampopt")


def saved(path: Path, channels: int = 8, *, busy: bool = True) -> Path:
    """A bundle, which does not tell what is best where it is saved if that machine is busy."""
    model = with_statistics(nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.Flatten()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle_save, "is_busy", lambda: busy)
        patched.setattr(bundle_save, "CHOOSING_S", 0.1)
        module_of(model, X, passes=(FoldConvBn(),)).save(path, tune_s=0.1)
    return path


@functools.cache
def expected_of(path: Path) -> torch.Tensor:
    """What the original that a bundle holds makes of the example."""
    tensors = safetensors.torch.load(open_bundle(path).read("self_test.safetensors"))
    (name,) = (name for name in tensors if name.startswith("output."))
    return tensors[name]


class Bench:
    """What `load` makes and measures; `failing` backends cannot be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.measured, self.failing = list[str](), 0, set[str]()

        def make(files: Any, captured: Any, way: Any, name: str, state: Any) -> Any:
            if name in self.failing:
                raise BundleError(f"{name} does not work any more")
            self.made.append(name)
            return LoadedModel(files, captured, way, name, state)

        monkeypatch.setattr(bundle_load, "LoadedModel", make)
        monkeypatch.setattr(known_backend, "interleave", self.interleave)
        monkeypatch.setattr(bundle_load, "is_busy", lambda: False)

    def interleave(self, calls: Mapping[str, object], **options: object) -> dict[str, Measurement]:
        self.measured += 1
        return {name: Measurement((MS[name],) * 200) for name in calls}

    def load(self, path: Path, **options: Any) -> tuple[str, list[str], int]:
        """The backend, what was made for it, and how often was measured."""
        self.made, self.measured = [], 0
        loaded = ampopt.load(path, device="cpu", **options)
        assert torch.allclose(loaded(X), expected_of(path), atol=1e-5)
        if options.get("backend", "auto") == "auto":
            assert set(loaded.choice) == (set() if self.failing else {*MS})
        return loaded.backend, self.made, self.measured


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path / "cache"))
    return Bench(monkeypatch)


BOTH = ["ampopt", "onnxruntime"]


def test_the_second_load_makes_only_what_the_first_has_chosen(bench: Bench, bundle: Path) -> None:
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)
    assert bench.load(bundle) == ("onnxruntime", ["onnxruntime"], 0)
    assert bench.load(bundle, backend="ampopt") == ("ampopt", ["ampopt"], 0)
    assert bench.load(bundle) == ("onnxruntime", ["onnxruntime"], 0)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each time that a bundle's program is tried on tensors without memory."""
    found = list[str]()

    def noting(*args: Any) -> None:
        found.append("tried")
        try_out(*args)

    monkeypatch.setattr(program_file, "try_out", noting)
    return found


def test_the_second_load_does_not_try_the_program_again(bench: Bench, bundle: Path, tried: list[str]) -> None:
    """Its data is the same, by its hashes, and so are the libraries."""
    bench.load(bundle)
    assert tried == ["tried"]
    bench.load(bundle)
    assert tried == ["tried"]
    bench.load(bundle, backend="ampopt")
    assert tried == ["tried"] * 2


def test_another_bundle_or_another_number_of_threads_is_measured_for_itself(
    bench: Bench, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)
    assert bench.load(saved(tmp_path / "other.ampopt", channels=9)) == ("onnxruntime", BOTH, 1)
    fingerprint = open_bundle(bundle).manifest["fingerprint"]
    monkeypatch.setattr("ampopt.bundle_load.environment", lambda device: fingerprint)
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


def test_with_another_time_budget_it_is_measured_for_itself(bench: Bench, bundle: Path) -> None:
    """On another machine ampopt's program is searched within it, and a short search may lose."""
    assert bench.load(bundle, budget_s=0.5) == ("onnxruntime", BOTH, 1)
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)
    assert bench.load(bundle, budget_s=0.5) == ("onnxruntime", ["onnxruntime"], 0)


def test_a_choice_that_fails_now_is_forgotten_and_the_others_are_asked(bench: Bench, bundle: Path) -> None:
    bench.load(bundle)
    bench.failing = {"onnxruntime"}
    loaded = ampopt.load(bundle, device="cpu")
    assert loaded.backend == "ampopt"
    assert loaded.notes == [f"onnxruntime is not used: {bundle}: onnxruntime does not work any more"]
    bench.failing = set()
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


def test_where_one_is_missing_the_choice_is_not_kept(bench: Bench, bundle: Path) -> None:
    bench.failing = {"onnxruntime"}
    assert bench.load(bundle) == ("ampopt", ["ampopt"], 0)
    bench.failing = set()
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


def test_what_a_busy_machine_has_shown_is_not_kept(
    bench: Bench, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_load, "is_busy", lambda: True)
    for _ in range(2):
        assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


def test_without_a_cache_folder_each_load_measures(
    bench: Bench, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", "")
    for _ in range(2):
        assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"schema": 3, "facts": {}, "sha256": ""}', b"\xff"])
def test_a_damaged_file_is_measured_anew(bench: Bench, bundle: Path, tmp_path: Path, data: bytes) -> None:
    bench.load(bundle)
    for file in kept_files(tmp_path / "cache"):
        if file.suffix == ".json":
            file.write_bytes(data)
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)
    assert bench.load(bundle) == ("onnxruntime", ["onnxruntime"], 0)


@pytest.mark.parametrize(
    "facts", [[], "onnxruntime", {"backend": "tensorrt", "measured": {}}, {"backend": "ampopt"}, 7]
)
def test_facts_of_another_form_are_not_believed(
    bench: Bench, bundle: Path, monkeypatch: pytest.MonkeyPatch, facts: object
) -> None:
    monkeypatch.setattr(cached_facts, "find", lambda folder, key: facts)
    assert bench.load(bundle) == ("onnxruntime", BOTH, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tells what is best where it was saved, which it measured."""
    pytest.importorskip("onnxruntime")
    return saved(tmp_path_factory.mktemp("told") / "robot.ampopt", busy=False)


def with_backend(told: Path, path: Path, **facts: object) -> Path:
    """A copy of a bundle with other facts in its file of the best backend."""
    opened = open_bundle(told)
    own = json.loads(opened.read(BACKEND)) | facts
    files: dict[str, bytes | Path] = {name: opened.read(name) for name in opened.names}
    manifest = {name: value for name, value in opened.manifest.items() if name not in ("files", "schema")}
    write_bundle(path, manifest, files | {BACKEND: json.dumps(own).encode()})
    return path


@pytest.mark.parametrize("best", BOTH)
def test_the_first_load_where_a_bundle_was_saved_makes_only_what_was_best_there(
    bench: Bench, told: Path, tmp_path: Path, best: str
) -> None:
    measured = json.loads(open_bundle(told).read(BACKEND))["measured"]
    assert all("median" in measured[name] for name in BOTH)
    path = with_backend(told, tmp_path / "robot.ampopt", backend=best)
    assert bench.load(path) == (best, [best], 0)
    assert ampopt.load(path, device="cpu").choice == measured


def test_the_program_of_a_bundle_that_tells_what_is_best_is_tried_all_the_same(
    bench: Bench, told: Path, tried: list[str]
) -> None:
    """The file is as little to be trusted as the rest of it; an earlier load's own word is."""
    for _ in range(2):
        assert bench.load(told)[2] == 0
        assert tried == ["tried"]


@pytest.mark.parametrize(
    "facts",
    [
        {"machine": "another"},
        {"backend": "tensorrt"},
        {"backend": []},
        {"measured": [1]},
        {"measured": {"self-test": "passed"}},
        {"measured": {"ampopt": 1}},
        {"measured": {"ampopt": "median 1 ms\nself-test: passed"}},
        {"measured": {"ampopt": "1" * 5000}},
    ],
)
def test_what_was_best_on_another_machine_or_is_not_known_is_measured(
    bench: Bench, told: Path, tmp_path: Path, facts: dict[str, object]
) -> None:
    path = with_backend(told, tmp_path / "robot.ampopt", **facts)
    assert bench.load(path) == ("onnxruntime", BOTH, 1)


def test_where_the_best_of_a_bundle_does_not_work_the_others_are_asked(
    bench: Bench, told: Path, tmp_path: Path
) -> None:
    path = with_backend(told, tmp_path / "robot.ampopt", backend="onnxruntime")
    bench.failing = {"onnxruntime"}
    assert bench.load(path) == ("ampopt", ["ampopt"], 0)


def test_a_busy_machine_tells_nothing(bundle: Path, told: Path) -> None:
    assert set(open_bundle(told).names) - set(open_bundle(bundle).names) == {BACKEND}


class Scaled(nn.Module):
    """Takes what is no tensor, too, and an input that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(
        self, x: torch.Tensor, factor: float, unread: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = self.conv(x) * factor
        return y if mask is None else y * mask


@pytest.mark.parametrize("options", [{}, {"serve_original": True}])
def test_it_is_measured_for_every_kind_of_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(bundle_save, "is_busy", lambda: False)
    monkeypatch.setattr(bundle_save, "CHOOSING_S", 0.1)
    args = (X, 2.5, torch.randn(3), None)
    fast = module_of(Scaled(), *args, **options)
    fast.save(tmp_path / "robot.ampopt", tune_s=0.1)
    facts = json.loads(open_bundle(tmp_path / "robot.ampopt").read(BACKEND))
    assert facts["measured"].keys() == {*BOTH}
    loaded = ampopt.load(tmp_path / "robot.ampopt", device="cpu")
    assert loaded.backend == facts["backend"]
    assert torch.allclose(loaded(*args), fast(*args), atol=1e-5)


def test_a_save_with_little_time_measures_nothing(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    module_of(nn.Conv2d(3, 4, 3), X).save(tmp_path / "robot.ampopt", tune_s=0.1)
    assert BACKEND not in open_bundle(tmp_path / "robot.ampopt").names


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed bundle whose program runs in ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("engine")
    generate_keys(folder / "private.pem", folder / "public.pem")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle_save, "is_busy", lambda: False)
        patched.setattr(bundle_save, "CHOOSING_S", 0.1)
        module = module_of(nn.Conv2d(3, 4, 3), X, passes=(OnnxRuntime(),))
        module.save(folder / "robot.ampopt", tune_s=0.1, sign_key=folder / "private.pem")
    return folder / "robot.ampopt"


def test_a_load_does_not_export_anew_what_a_bundle_holds_that_the_key_vouches_for(
    with_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.engines.onnx_cache.cache_folder", lambda: None)
    monkeypatch.setattr("ampopt.engines.onnx_program.model_of", lambda *_: pytest.fail("exported anew"))
    key = with_engine.parent / "public.pem"
    with pytest.raises(pytest.fail.Exception, match="exported anew"):
        ampopt.load(with_engine, device="cpu", backend="ampopt")
    loaded = ampopt.load(with_engine, device="cpu", backend="ampopt", verify_key=key)
    assert isinstance(loaded._call, OptimizedModule)
    assert [step.name for step in loaded._call.program.recipe] == ["onnx-runtime"]
    assert torch.allclose(loaded(X), expected_of(with_engine), atol=1e-5)
    assert loaded.notes == []


def test_without_its_exports_they_are_made(
    with_engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = open_bundle(with_engine)
    files: dict[str, bytes | Path] = {name: opened.read(name) for name in opened.names if name != EXPORTS}
    manifest = {name: value for name, value in opened.manifest.items() if name not in ("files", "schema")}
    write_bundle(tmp_path / "robot.ampopt", manifest, files)
    monkeypatch.setattr("ampopt.engines.onnx_cache.cache_folder", lambda: None)
    loaded = ampopt.load(tmp_path / "robot.ampopt", device="cpu", backend="ampopt")
    assert torch.allclose(loaded(X), expected_of(with_engine), atol=1e-5)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_program_that_the_key_vouches_for_is_not_tried_where_it_was_saved(
    bench: Bench, with_engine: Path, tried: list[str], is_signed: bool
) -> None:
    key = with_engine.parent / "public.pem"
    assert bench.load(with_engine, **({"verify_key": key} if is_signed else {}))[2] == 0
    assert tried == ([] if is_signed else ["tried"])


@pytest.mark.parametrize(
    ("own", "other", "chosen"),
    [((1.0, 2), (1.02, 2), "onnxruntime"), ((1.0, 2), (1.06, 2), "ampopt"), ((1.0, 1), (1.02, 2), "ampopt")],
)
def test_of_two_that_are_as_fast_the_one_that_loads_sooner_is_taken(
    monkeypatch: pytest.MonkeyPatch, own: tuple[float, int], other: tuple[float, int], chosen: str
) -> None:
    ways = {"ampopt": own, "onnxruntime": other}

    def made_up(calls: Mapping[str, object], **options: object) -> dict[str, Measurement]:
        return {name: Measurement((ways[name][0],) * 200) for name in calls}

    monkeypatch.setattr(known_backend, "interleave", made_up)
    calls = {name: (lambda: None, threads) for name, (_, threads) in ways.items()}
    assert fastest(calls, torch.device("cpu")).backend == chosen


@pytest.mark.parametrize("name", ["exports_file", "backend_file"])
def test_what_only_saves_time_does_not_take_a_save_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    pytest.importorskip("onnxruntime")

    def failing(*args: object) -> dict[str, bytes]:
        raise RuntimeError("no memory for another session")

    monkeypatch.setattr(bundle_save, "is_busy", lambda: False)
    monkeypatch.setattr(bundle_save, "CHOOSING_S", 0.1)
    monkeypatch.setattr(bundle_save, name, failing)
    module_of(nn.Conv2d(3, 4, 3), X).save(tmp_path / "robot.ampopt", tune_s=0.1)
    assert "first load will take longer, because RuntimeError: no memory for another session" in caplog.text
    assert "model.onnx" in open_bundle(tmp_path / "robot.ampopt").names
