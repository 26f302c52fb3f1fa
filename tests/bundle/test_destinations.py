"""Where results go: what is wrong with a name, a place, a package or a key is said before the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import ampopt
from ampopt.bundle.destinations import (
    FOREIGN,
    ONNX_PACKAGES,
    check_bundle,
    check_distinct,
    check_file,
    check_onnx,
    is_onnx,
)
from ampopt.errors import AmpoptError, BundleError, InputError, MissingExtraError
from tests.support.bundles import save
from tests.support.planted import module_of
from tests.system.test_plain_files import listening


def test_a_name_says_what_is_written() -> None:
    assert is_onnx("model.onnx")
    assert is_onnx("MODEL.ONNX")
    assert not any(is_onnx(name) for name in ("robot.ampopt", "robot", "robot.v2", "robot.zip"))


@pytest.mark.parametrize("suffix", [*FOREIGN, ".ENGINE"])
def test_a_name_of_something_else_is_refused(suffix: str, tmp_path: Path) -> None:
    for refuse in (is_onnx, check_onnx, lambda path: check_bundle(path, onnx=False, sign_key=None)):
        with pytest.raises(InputError, match=rf"\{suffix.lower()} stands for .*\.onnx for ONNX"):
            refuse(tmp_path / f"out{suffix}")


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for check in (check_onnx, check_file):
        for name in (f"{'a' * 300}.onnx", f"{'é' * 130}.onnx", f"{'a' * 240}.onnx", f"{'a' * 300}/a.onnx"):
            with pytest.raises(InputError, match="is too long a name for this system"):
                check(tmp_path / name)
        check(tmp_path / f"{'a' * 195}.onnx")
        with pytest.raises(InputError, match="has a NUL in it"):
            check(tmp_path / "a\0b.onnx")


@pytest.mark.parametrize("name", [None, 3, b"robot.ampopt", ["robot.ampopt"]])
def test_what_names_no_file_is_refused(name: Any) -> None:
    x = torch.zeros(1, 2)
    module = module_of(nn.Linear(2, 2), x)
    calls: list[Callable[[], object]] = [
        *(lambda: check_onnx(name), lambda: check_bundle(name, onnx=False, sign_key=None)),
        *(lambda: module.save(name), lambda: module.export_onnx(name)),
        *(lambda: ampopt.load(name), lambda: ampopt.robot.load(name)),
    ]
    if name is not None:
        calls += [
            *(lambda: ampopt.load("robot.ampopt", verify_key=name),),
            *(lambda: module.save("robot.ampopt", sign_key=name),),
            *(lambda: ampopt.diagnose(nn.Linear(2, 2), x, trace=name, progress=False),),
        ]
    for call in calls:
        with pytest.raises(InputError, match=r"is no name of a file: give a str or a pathlib\.Path"):
            call()


def test_the_other_kinds_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"name it robot\.onnx"):
        check_onnx(tmp_path / "robot.ampopt")
    with pytest.raises(InputError, match=r"name the bundle m\.ampopt"):
        check_bundle(tmp_path / "m.onnx", onnx=True, sign_key=None)


@pytest.mark.parametrize("package", ONNX_PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for needs in (check_onnx, lambda path: check_bundle(path.with_suffix(""), onnx=True, sign_key=None)):
        with pytest.raises(MissingExtraError, match=rf"{package} .*ampopt\[onnx\]"):
            needs(tmp_path / "m.onnx")
    check_bundle(tmp_path / "b", onnx=False, sign_key=None)


def test_a_key_that_cannot_sign_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key.pem").write_text("hello")
    with pytest.raises(InputError, match="no private key in PEM"):
        check_bundle(tmp_path / "b", onnx=False, sign_key=tmp_path / "key.pem")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(MissingExtraError, match=r"ampopt\[sign\]"):
        check_bundle(tmp_path / "b", onnx=False, sign_key=tmp_path / "key.pem")


ODD: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": listening,
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_file_is_not_written_over(case: str, tmp_path: Path) -> None:
    ODD[case](tmp_path / "x.onnx")
    ODD[case](tmp_path / "x")
    for check, name in ((check_onnx, "x.onnx"), (check_file, "x")):
        with pytest.raises(InputError, match="not a regular file"):
            check(tmp_path / name)
    with pytest.raises(BundleError, match=r"not a plain file; choose another name$"):
        check_bundle(tmp_path / "x", onnx=False, sign_key=None)


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="create that folder first"):
        check_file(tmp_path / "nowhere" / "r.json")
    with pytest.raises(BundleError, match="No such file"):
        check_bundle(tmp_path / "nowhere" / "b", onnx=False, sign_key=None)

    def takes_none(*args: Any, **options: Any) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory")  # as /proc

    monkeypatch.setattr("tempfile.TemporaryFile", takes_none)
    with pytest.raises(InputError, match=r"r\.json cannot be written: nothing can be made in its folder"):
        check_file(tmp_path / "r.json")

    def read_only(*args: Any, **options: Any) -> NoReturn:
        raise OSError(30, "Read-only file system")  # root may write everywhere else

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(InputError, match="Read-only file system"):
        check_file(tmp_path / "r.json")
    with pytest.raises(BundleError, match="Read-only file system"):
        check_bundle(tmp_path / "b", onnx=False, sign_key=None)


def test_what_can_be_written_is_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "old")
    (tmp_path / "r.json").write_text("old")
    before = sorted(tmp_path.iterdir())
    check_bundle(tmp_path / "old", onnx=False, sign_key=None)
    check_bundle(tmp_path / "new", onnx=True, sign_key=None)
    check_onnx(tmp_path / "m.onnx")
    check_file(tmp_path / "r.json")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "text").write_text("mine")
    with pytest.raises(BundleError, match="a file that is no bundle is there"):
        check_bundle(tmp_path / "text", onnx=False, sign_key=None)


def test_two_results_in_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to("a")
    check_distinct({"--json": tmp_path / "a", "--markdown": None}, {"--npz": tmp_path / "b", "--image": None})
    check_distinct({}, {"--npz": tmp_path / "a", "--weights": tmp_path / "a"})
    with pytest.raises(InputError, match="--json and --markdown are the same"):
        check_distinct({"--json": tmp_path / "a", "--markdown": tmp_path / "link"}, {})
    with pytest.raises(InputError, match="--npz and --json are the same"):
        check_distinct({"--json": tmp_path / "x" / ".." / "a"}, {"--npz": tmp_path / "a"})


def test_in_python_too_names_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any, **options: Any) -> NoReturn:
        raise AssertionError("the long work began")

    fast = module_of(nn.ReLU(), torch.randn(2))
    assert isinstance(fast, ampopt.OptimizedModule)
    monkeypatch.setattr("ampopt.deploy.deployable.export_onnx", work)
    monkeypatch.setattr("ampopt.deploy.deployable.save_bundle", work)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for refused in (
        lambda: fast.export_onnx(tmp_path / "m.engine"),
        lambda: fast.export_onnx(tmp_path / "m.onnx"),
        lambda: fast.save(tmp_path / "b"),
        lambda: fast.save(tmp_path / "m.pt", onnx=None),
        lambda: fast.save(tmp_path / "b", onnx=None, sign_key=tmp_path / "nowhere"),
    ):
        with pytest.raises(AmpoptError):
            refused()
