"""A bundle opens as what was saved, or not at all."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from ampopt.bundle.archive import read_entries
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.bundle.manifest import encode
from ampopt.bundle.signing import generate_keys
from ampopt.errors import BundleError
from tests.support.bundles import FILES, FORMS, archive, contents, fields, refuses, save, unpacked


@FORMS
def test_a_bundle_opens_as_what_was_saved(as_folder: bool, tmp_path: Path) -> None:
    bundle = open_bundle(save(tmp_path / "robot.ampopt", as_folder=as_folder))
    assert bundle.path.is_dir() == as_folder
    assert contents(bundle) == FILES
    assert bundle.manifest.pop("files")["report.json"]["bytes"] == 0
    assert bundle.manifest == fields()


@FORMS
def test_files_are_copied_from_paths_in_blocks(as_folder: bool, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(random.Random(0).randbytes(3 << 20) + b"rest")
    bundle = open_bundle(save(tmp_path / "b", {"weights.safetensors": source}, as_folder=as_folder))
    assert bundle.read("weights.safetensors") == source.read_bytes()
    with bundle.extracted("weights.safetensors") as folder:
        assert (folder / "weights.safetensors").read_bytes() == source.read_bytes()


@FORMS
def test_extracted_gives_private_copies_and_removes_them(as_folder: bool, tmp_path: Path) -> None:
    bundle = open_bundle(save(tmp_path / "b", as_folder=as_folder))
    with bundle.extracted("model.onnx", "report.json") as folder:
        assert sorted(os.listdir(folder)) == ["model.onnx", "report.json"]
        assert (folder / "model.onnx").read_bytes() == FILES["model.onnx"]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with bundle.extracted() as folder:
        assert sorted(os.listdir(folder)) == sorted(FILES)


def test_an_error_of_the_caller_passes_through_extracted(tmp_path: Path) -> None:
    bundle = open_bundle(save(tmp_path / "b"))
    with pytest.raises(OSError, match="mine"), bundle.extracted():
        raise OSError("mine")


@pytest.mark.parametrize("name", ["nothing", "manifest.json", "../b", ""])
def test_a_file_that_is_not_in_the_bundle_cannot_be_read(name: str, tmp_path: Path) -> None:
    bundle = open_bundle(save(tmp_path / "b"))
    with pytest.raises(BundleError, match="has no file"):
        bundle.read(name)
    with pytest.raises(BundleError, match="has no file"), bundle.extracted(name):
        pass


@FORMS
@pytest.mark.parametrize("new", [{"model.onnx": bytes(3000)}, {"model.onnx": b"x"}, {"program.json": b"x"}])
def test_what_is_replaced_after_opening_is_not_read(
    as_folder: bool, new: dict[str, bytes], tmp_path: Path
) -> None:
    bundle = open_bundle(save(tmp_path / "b", as_folder=as_folder))
    save(tmp_path / "b", new, as_folder=as_folder)
    with pytest.raises(BundleError, match=r"model\.onnx"):
        bundle.read("model.onnx")
    with pytest.raises(BundleError, match=r"model\.onnx"), bundle.extracted("model.onnx"):
        pytest.fail("a file that was replaced was given out")
    shutil.rmtree(tmp_path / "b") if as_folder else (tmp_path / "b").unlink()
    with pytest.raises(BundleError, match="No such file"):
        bundle.read("model.onnx")


def survives(path: Path, original: dict[str, bytes], manifest: object) -> bool:
    """Whether the bundle opens; then its content must be the original one."""
    try:
        bundle = open_bundle(path)
        found = contents(bundle)
    except BundleError:
        return False
    assert (found, bundle.manifest) == (original, manifest)
    return True


@FORMS
@pytest.mark.parametrize("name", ["manifest.json", "manifest.sig", *FILES])
def test_a_damaged_file_never_opens_with_other_content(as_folder: bool, name: str, tmp_path: Path) -> None:
    generate_keys(tmp_path / "secret", tmp_path / "public")
    bundle = open_bundle(save(tmp_path / "b", as_folder=as_folder, sign_key=tmp_path / "secret"))
    draw = random.Random(name)
    if as_folder:
        place, start = bundle.path / name, 0
        size = place.stat().st_size
    else:
        place = bundle.path
        with place.open("rb") as file:
            entries = read_entries(file, place.stat().st_size)
        entry = next(entry for entry in entries if entry.name == name)
        start, size = entry.offset, entry.end - entry.offset
    whole = place.read_bytes()
    opened = 0
    for _ in range(200 if size else 0):
        at = start + draw.randrange(size)
        place.write_bytes(whole[:at] + bytes([whole[at] ^ draw.randrange(1, 256)]) + whole[at + 1 :])
        opened += survives(bundle.path, FILES, bundle.manifest)
    # Nobody looks at the signature who has no key; in a zip file its CRC-32 is compared all the same.
    assert opened == (200 if as_folder and name == "manifest.sig" else 0)
    for _ in range(20 if size else 0):
        kept = start + draw.randrange(size)
        place.write_bytes(whole[:kept])
        assert survives(bundle.path, FILES, bundle.manifest) == (as_folder and name == "manifest.sig")
        place.write_bytes(whole[:kept] + draw.randbytes(draw.randrange(1, 9)) + whole[kept:])
        assert not survives(bundle.path, FILES, bundle.manifest)
    place.write_bytes(whole)
    assert survives(bundle.path, FILES, bundle.manifest)


def test_a_path_with_a_nul_is_refused(tmp_path: Path) -> None:
    for act in (open_bundle, lambda path: write_bundle(path, fields(), FILES)):
        with pytest.raises(BundleError, match="NUL"):
            act(f"{tmp_path}/b\0c")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@FORMS
def test_a_bundle_that_may_not_be_read_is_refused(as_folder: bool, tmp_path: Path) -> None:
    save(tmp_path / "b", as_folder=as_folder).chmod(0)
    refuses(tmp_path / "b", "Permission denied")


@FORMS
def test_an_error_of_the_disk_is_a_bundle_error(
    as_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(save(tmp_path / "b", as_folder=as_folder))

    def fail(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(os, "open", fail)
    refuses(tmp_path / "b", "Permission denied")
    with pytest.raises(BundleError, match="Permission denied"):
        bundle.read("model.onnx")
    with pytest.raises(BundleError, match="Permission denied"):
        save(tmp_path / "b", {"program.json": b"new"}, as_folder=as_folder)
    monkeypatch.undo()
    assert contents(open_bundle(tmp_path / "b")) == FILES
    assert os.listdir(tmp_path) == ["b"]


@FORMS
def test_a_signed_bundle_opens_with_its_makers_key_only(as_folder: bool, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        generate_keys(tmp_path / name, tmp_path / f"{name}.pub")
    path = save(tmp_path / "b", as_folder=as_folder, sign_key=tmp_path / "mine")
    assert contents(open_bundle(path, verify_key=tmp_path / "mine.pub")) == FILES
    assert contents(open_bundle(path)) == FILES
    with pytest.raises(BundleError, match=r"not the signature.*other\.pub"):
        open_bundle(path, verify_key=tmp_path / "other.pub")


@FORMS
def test_a_bundle_without_signature_does_not_open_with_a_key(as_folder: bool, tmp_path: Path) -> None:
    generate_keys(tmp_path / "mine", tmp_path / "mine.pub")
    path = save(tmp_path / "b", as_folder=as_folder)
    with pytest.raises(BundleError, match="not signed"):
        open_bundle(path, verify_key=tmp_path / "mine.pub")


@pytest.mark.parametrize("size", [0, 1, 63, 64])
def test_a_forged_bundle_with_an_old_signature_opens_without_the_key_only(size: int, tmp_path: Path) -> None:
    generate_keys(tmp_path / "mine", tmp_path / "mine.pub")
    signature = unpacked(save(tmp_path / "b", sign_key=tmp_path / "mine"))["manifest.sig"]
    forged = unpacked(save(tmp_path / "b", {"program.json": b"forged"}))
    manifest = forged.pop("manifest.json")
    files = {"manifest.json": manifest, "manifest.sig": signature[:size], **forged}
    (tmp_path / "b").write_bytes(archive(files))
    assert contents(open_bundle(tmp_path / "b")) == {"program.json": b"forged"}
    with pytest.raises(BundleError, match="not the signature"):
        open_bundle(tmp_path / "b", verify_key=tmp_path / "mine.pub")


def test_the_signature_is_checked_before_the_manifest_is_parsed(tmp_path: Path) -> None:
    generate_keys(tmp_path / "mine", tmp_path / "mine.pub")
    (tmp_path / "b").write_bytes(archive({"manifest.json": b"[" * 9999, "manifest.sig": bytes(64)}))
    with pytest.raises(BundleError, match="not the signature"):
        open_bundle(tmp_path / "b", verify_key=tmp_path / "mine.pub")


def test_a_bundle_of_an_unknown_schema_says_who_reads_it(tmp_path: Path) -> None:
    manifest = encode(fields(schema=3, ampopt="9.8.7", files={}))
    (tmp_path / "b").write_bytes(archive({"manifest.json": manifest}))
    refuses(tmp_path / "b", r"schema '3'.*reads schemas 1 and 2.*9\.8\.7")


def test_files_are_copied_and_verified_without_holding_them_in_memory(tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.touch()
    os.truncate(source, 50 << 20)
    tracemalloc.start()
    bundle = open_bundle(save(tmp_path / "b", {"large": source}))
    with bundle.extracted("large"):
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_neither_torch_nor_cryptography_is_imported() -> None:
    script = "import sys, ampopt.bundle.files; print({'torch', 'numpy', 'cryptography'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
