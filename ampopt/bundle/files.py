"""Reads and writes bundles; files that differ from those saved raise `BundleError`.

The manifest's hashes give integrity: they detect damage. They give no authenticity: an attacker who changes a
file can change the manifest, too. Only a signature, checked with a public key that the robot already has,
proves who made the bundle. Nothing here evaluates or unpickles anything, and a signature is checked before
the manifest is parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ampopt.bundle import archive as bundle_zip
from ampopt.bundle.containers import BLOCK, Container, open_regular, opened
from ampopt.bundle.manifest import (
    COPY_AGAIN,
    MANIFEST,
    MAX_BYTES,
    SIGNATURE,
    RefusedError,
    check_names,
    decode,
    encode,
    schema_of,
)
from ampopt.bundle.signing import SIGNATURE_BYTES, is_signed, sign
from ampopt.errors import BundleError
from ampopt.system.atomic import replacing
from ampopt.system.places import place_of, told
from ampopt.system.plain_files import path_of
from ampopt.system.wording import argument


@dataclasses.dataclass(frozen=True)
class BundleFiles:
    """An open bundle: every file was read once and had the manifest's size and SHA-256.

    No file is held open. Each read opens the bundle again and compares the hash of the bytes that it returns;
    if the bundle was replaced in between, it raises BundleError, and never mixes two bundles.
    """

    path: Path
    manifest: dict[str, Any]
    _hashes: Mapping[str, str] = dataclasses.field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, without the manifest and its signature, as the manifest orders them."""
        return tuple(self._hashes)

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises BundleError if there is no such file or its bytes have changed."""
        self._require([name])
        with bundle_errors(self.path, "cannot be read"), opened(self.path) as container:
            return b"".join(self._verified(container, name))

    @contextlib.contextmanager
    def extracted(self, *names: str) -> Iterator[Path]:
        """A private temporary folder with verified copies of the named files, or of all; removed at the end.

        For libraries that open files by path. Raises BundleError like `read`, and if the disk is full.
        """
        self._require(names)
        with contextlib.ExitStack() as stack:
            with bundle_errors(self.path, "cannot be unpacked"):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampopt-")))
                with opened(self.path) as container:
                    for name in names or self.names:
                        _write_blocks(folder / name, self._verified(container, name))
            yield folder

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._hashes:
                raise BundleError(f"{self.path} has no file {name!r}; it has {', '.join(self.names)}")

    def _verified(self, container: Container, name: str) -> Iterator[bytes]:
        if name not in container.sizes:
            raise RefusedError(f"{name!r} in it is missing")
        return _verified(container.blocks(name), self._hashes[name], f"{name!r} in it is not the file saved")


def open_bundle(path: str | os.PathLike[str], *, verify_key: str | Path | None = None) -> BundleFiles:
    """Open the bundle at `path`, a zip file or a folder, and check every file against the manifest.

    Files of any size are read in blocks. `verify_key`: a public key in PEM; the manifest must be signed with
    its private one. Without it a signature is ignored, and the author is not verified. A folder that is
    replaced during the call may be refused; a zip file opens as the old or the new one.

    Raises BundleError, with the file and what to do, for anything but a complete bundle; InputError for an
    invalid key; MissingExtraError if there is a key but no `cryptography`.
    """
    with bundle_errors(path, "is refused"):
        where = Path(path)
        with opened(where) as container:
            data = _small(container, MANIFEST, MAX_BYTES)
            signature = (
                _small(container, SIGNATURE, SIGNATURE_BYTES) if SIGNATURE in container.sizes else None
            )
            if verify_key is not None:
                _check_signature(verify_key, data, signature)
            manifest = decode(data)
            files: dict[str, dict[str, Any]] = manifest["files"]
            _check_sizes(container.sizes, {name: entry["bytes"] for name, entry in files.items()})
            bundle = BundleFiles(where, manifest, {name: entry["sha256"] for name, entry in files.items()})
            for name in bundle.names:
                for _ in bundle._verified(container, name):
                    pass
    return bundle


def write_bundle(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    files: Mapping[str, bytes | Path],
    *,
    sign_key: str | Path | None = None,
    as_folder: bool = False,
) -> None:
    """Save `files` (name: bytes, or a path to copy from) with their manifest as the bundle `path`.

    A single zip file; a folder if `as_folder`, if `path` ends with a slash, or if it is a folder already.
    `manifest` is every field but `files`, which is filled in (the caller's mapping stays as it is), and
    `schema`, which may be left out. `sign_key`: a private key in PEM; its signature goes into `manifest.sig`.

    A bundle at `path` is replaced atomically (see `ampopt.system.atomic`): a process that is killed leaves
    the old one or the new one. Raises BundleError if the manifest does not fit the schema, if `path` is not a
    bundle, or if writing fails; in all these cases `path` does not change. Raises InputError for an invalid
    key; MissingExtraError if there is a key but no `cryptography`.
    """
    with bundle_errors(path, "cannot be saved"):
        target = place_of(path)
        folder = as_folder or os.fspath(path).endswith(("/", os.sep)) or target.is_dir()
        check_names([MANIFEST, SIGNATURE, *files])
        digests = {name: _digest(source) for name, source in files.items()}
        entries = {name: {"sha256": digest.sha256, "bytes": digest.size} for name, digest in digests.items()}
        data = encode({"schema": schema_of(manifest), **manifest, "files": entries})
        decode(data)
        contents: dict[str, bytes | Path] = {MANIFEST: data}
        if sign_key is not None:
            contents[SIGNATURE] = sign(sign_key, data)
        digests |= {name: _digest(source) for name, source in contents.items()}
        _refuse_foreign(target)
        with replacing(target, folder=folder) as temporary:
            rows = [
                (name, digests[name].size, digests[name].crc, _copied(name, source, digests[name]))
                for name, source in (contents | dict(files)).items()
            ]
            if folder:
                for name, _, _, blocks in rows:
                    _write_blocks(temporary / name, blocks)
            else:
                with open(temporary, "wb") as file:
                    bundle_zip.write(file, rows)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise the BundleError that `write_bundle` would raise for the file at `path`, or for its folder."""
    with bundle_errors(path, "cannot be saved"):
        target = place_of(path)
        _refuse_foreign(target)
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let every BundleError of the block name the bundle, for its reader may have several."""
    try:
        yield
    except BundleError as error:
        if os.fspath(path) in str(error):
            raise
        raise BundleError(f"{os.fspath(path)}: {error}") from error


@contextlib.contextmanager
def bundle_errors(path: str | os.PathLike[str], outcome: str) -> Iterator[None]:
    """Make every refusal, and every error of the operating system, a BundleError that names the bundle."""
    try:
        if "\0" in str(path_of(path)):
            raise RefusedError("its path has a NUL in it", "give another path")
        if not os.fspath(path):
            raise RefusedError("its path is empty", "give another path")
        yield
    except RefusedError as e:
        raise BundleError(f"the bundle {os.fspath(path)!r} {outcome}: {e}; {e.advice}") from e
    except OSError as e:
        raise BundleError(f"the bundle {os.fspath(path)!r} {outcome}: {told(e)}") from e


def _small(container: Container, name: str, most: int) -> bytes:
    """The bytes of the manifest or its signature, which no hash covers."""
    if name not in container.sizes:
        raise RefusedError(f"{name!r} in it is missing: it is no bundle, or only a part of one")
    if container.sizes[name] > most:
        raise RefusedError(f"{name!r} in it has {container.sizes[name]} bytes, and {most} is the most")
    return b"".join(container.blocks(name))


def _check_signature(key: str | Path, manifest: bytes, signature: bytes | None) -> None:
    if signature is None:
        raise RefusedError(
            "it is not signed", f"let its maker save it with the key, or do without {argument('verify_key')}"
        )
    if not is_signed(key, manifest, signature):
        raise RefusedError(
            f"{SIGNATURE!r} in it is not the signature of this manifest by the owner of {os.fspath(key)!r}",
            "do not use it: get it from its maker again, or the right public key",
        )


def _check_sizes(found: Mapping[str, int], listed: Mapping[str, int]) -> None:
    for name in found:
        if name not in listed and name not in (MANIFEST, SIGNATURE):
            raise RefusedError(
                f"{name!r} in it is not of the bundle: it was added", f"remove it, or {COPY_AGAIN}"
            )
    for name, size in listed.items():
        if name not in found:
            raise RefusedError(f"{name!r} in it is missing")
        if found[name] != size:
            raise RefusedError(f"{name!r} in it has {found[name]} bytes and not {size}")


def _verified(blocks: Iterable[bytes], sha256: str, otherwise: str) -> Iterator[bytes]:
    """The blocks as they come; Refused behind the last one unless all of them together have this SHA-256."""
    hashed = hashlib.sha256()
    for block in blocks:
        hashed.update(block)
        yield block
    if hashed.hexdigest() != sha256:
        raise RefusedError(f"{otherwise}: its SHA-256 is another")


@dataclasses.dataclass(frozen=True)
class _Digest:
    sha256: str
    size: int
    crc: int


def _digest(source: bytes | Path) -> _Digest:
    hashed, size, crc = hashlib.sha256(), 0, 0
    for block in _blocks(source):
        hashed.update(block)
        size += len(block)
        crc = zlib.crc32(block, crc)
    return _Digest(hashed.hexdigest(), size, crc)


def _blocks(source: bytes | Path) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with open_regular(source) as file:
        while block := file.read(BLOCK):
            yield block


def _copied(name: str, source: bytes | Path, digest: _Digest) -> Iterator[bytes]:
    """The blocks of a source, which must be those that its digest was made of."""
    try:
        yield from _verified(_blocks(source), digest.sha256, f"{name!r} was changed meanwhile")
    except RefusedError as e:
        raise RefusedError(str(e), "save again when nothing writes to it") from e


def _write_blocks(path: Path, blocks: Iterable[bytes]) -> None:
    with open(path, "xb") as file:
        for block in blocks:
            file.write(block)


def _refuse_foreign(target: Path) -> None:
    """Refuse what is no bundle, not even a damaged one, in the place of `target`: saving would destroy it."""
    if not os.path.lexists(target):
        return
    advice = "remove it, or choose another name"
    if not target.is_dir():
        try:
            file = open_regular(target)
        except RefusedError as e:
            raise RefusedError(str(e), "choose another name") from e
        with file:
            if not bundle_zip.is_bundle(file.read(64)):
                raise RefusedError("a file that is no bundle is there", advice)
        return
    names = set(os.listdir(target))
    if not names:
        return
    try:
        with open_regular(target / MANIFEST) as file:
            manifest = decode(file.read(MAX_BYTES + 1))
    except (RefusedError, FileNotFoundError) as e:
        raise RefusedError("a folder that is no bundle is there", advice) from e
    if foreign := names - set(manifest["files"]) - {MANIFEST, SIGNATURE}:
        raise RefusedError(f"the folder there has a file of someone else, {min(foreign)!r}", advice)
