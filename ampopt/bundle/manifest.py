"""The schema of `manifest.json` and its canonical encoding."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from ampopt.bundle.stored_sizes import read_sizes
from ampopt.bundle.stored_state import read_state
from ampopt.version import __version__

SCHEMAS = (1, 2)
"""The versions of the manifest that are read. Schema 2 has `sizes` or `state`; other bundles are written in
schema 1, which every ampopt reads."""
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
MAX_BYTES = 4 << 20  # parsed JSON takes up to 20 times its text in memory; real manifests have some kilobytes
MAX_FILES = 256
MAX_DEPTH = 64
COPY_AGAIN = "copy the bundle again from where it was made"

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?")
_DEVICE = re.compile(
    r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE
)  # on Windows, in any folder


class RefusedError(Exception):
    """The reason why a bundle is refused, and what to do; `bundle.files` converts it to a `BundleError`."""

    def __init__(self, reason: str, advice: str = COPY_AGAIN) -> None:
        super().__init__(reason)
        self.advice = advice


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of value: a description, and a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 4096


def _is_time(value: Any) -> bool:
    try:
        return bool(datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ"))
    except (TypeError, ValueError):
        return False


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(_is_whole(size) for size in value)
        and math.prod(value) < 2**40
    )


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


TEXT = Kind("a text that is not empty", _is_text)
SHA256 = Kind("a SHA-256 in 64 small hexadecimal digits", _matches("[0-9a-f]{64}"))
DTYPE = Kind("a dtype's name", _matches("bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)"))
WHOLE = Kind("a whole number, 0 or more", _is_whole)
NUMBER = Kind("a finite number, 0 or more", _is_number)
QUANTILE = Kind("a finite number, 0 or more, or null", lambda value: value is None or _is_number(value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TENSOR = {
    "name": TEXT,
    "shape": Kind("a list of sizes with fewer than 2^40 elements in all", _is_shape),
    "dtype": DTYPE,
    "layout": Kind("a layout's name", _matches("[a-z][a-z0-9_]{0,39}")),
}
FILE = {"sha256": SHA256, "bytes": WHOLE}
ONNX = {
    "precision": Kind('"fp32" or "fp16"', _matches("fp32|fp16")),
    "opset": Kind("an opset's number", lambda value: _is_whole(value) and 0 < value < 1000),
    "session": OBJECT,
    "latency": {"p50_ms": NUMBER, "p99_ms": QUANTILE},
}
OPENVINO = {"version": TEXT, "options": OBJECT, "latency": ONNX["latency"]}
"""What `onnx.openvino` holds, in a bundle whose fastest program ran in OpenVINO."""
WHY_NOT_OPENVINO = Kind("a text that is not empty, or null", lambda value: value is None or _is_text(value))
"""What `onnx.why_not_openvino` is: null where OpenVINO may run the model. Older bundles do not say it."""
FIELDS: dict[str, Any] = {
    "schema": WHOLE,
    "ampopt": Kind("a version", _matches(r"[0-9]+(\.[0-9A-Za-z+]+){1,8}")),
    "created": Kind("a time such as 2026-11-21T09:00:00Z", _is_time),
    "model": {"name": TEXT, "sha256": SHA256},
    "lane": {"name": TEXT, "dtype": DTYPE},
    "inputs": [TENSOR],
    "outputs": [TENSOR],
    "tolerance": Kind("a relative error from 0 to 1", lambda value: _is_number(value) and value <= 1),
    "latency": {"p50_ms": NUMBER, "p99_ms": QUANTILE, "device": TEXT},
    "fingerprint": Kind(
        "an object of texts", lambda value: isinstance(value, dict) and all(map(_is_text, value.values()))
    ),
    "call": OBJECT,
    "files": OBJECT,
}


NEW: dict[str, Kind] = {"sizes": OBJECT, "state": Kind("a list", lambda value: isinstance(value, list))}
"""The fields of schema 2, of which a manifest has at least one."""


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of manifest.json: `manifest` and, as its last field, the SHA-256 of everything before it.

    The checksum detects every changed byte of an unsigned manifest. Raises RefusedError for values that JSON
    cannot hold.
    """
    return _dump({**manifest, "checksum": hashlib.sha256(_dump(manifest)).hexdigest()})


def _dump(manifest: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise RefusedError(f"{MANIFEST} cannot be written as JSON ({e})", "give plain, finite values") from e


def decode(data: bytes) -> dict[str, Any]:
    """The manifest from the bytes of manifest.json, without its checksum. Raises RefusedError if invalid.

    Only the bytes that `encode` produces are accepted: no repeated keys, no other number format.
    """
    if len(data) > MAX_BYTES:
        raise RefusedError(f"{MANIFEST} has {len(data)} bytes, and {MAX_BYTES} is the most")
    try:
        manifest = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite
        )
        _check_plain(manifest, MAX_DEPTH)
    except (ValueError, RecursionError) as e:
        raise RefusedError(f"{MANIFEST} is not JSON as ampopt writes it ({str(e)[:200]})") from e
    if not isinstance(manifest, dict):
        raise RefusedError(f"{MANIFEST} is not an object")
    _check_schema(manifest)
    manifest.pop("checksum", None)
    if encode(manifest) != data:
        raise RefusedError(
            f"{MANIFEST} does not have the bytes that its checksum was made of: it was changed"
        )
    _check_fields(manifest)
    return manifest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key stands in one object twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _check_plain(value: Any, depth: int) -> None:
    """ValueError where values nest deeper than `depth` or a text is no Unicode (a lone surrogate)."""
    if depth == 0:
        raise ValueError(f"more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode()
            _check_plain(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth - 1)


def schema_of(manifest: Mapping[str, Any]) -> int:
    """The oldest schema that has all fields of a manifest."""
    return 2 if any(field in manifest for field in NEW) else 1


def _check_schema(manifest: dict[str, Any]) -> None:
    found = manifest.get("schema")
    if type(found) is int and found in SCHEMAS:
        return
    said = f"schema {str(found)[:20]!r}" if "schema" in manifest else "no schema"
    maker = manifest.get("ampopt")
    known = maker if FIELDS["ampopt"].holds(maker) else "a newer version"
    is_changed = maker == __version__ or "schema" not in manifest  # no ampopt writes that
    raise RefusedError(
        f"{MANIFEST} has {said}, and ampopt {__version__} reads {_known()}",
        COPY_AGAIN if is_changed else f"read it with the ampopt that wrote it ({known})",
    )


def _known() -> str:
    return f"schemas {' and '.join(map(str, SCHEMAS))}"


def _check_fields(manifest: dict[str, Any]) -> None:
    files = manifest.get("files")
    with_onnx = "onnx" in manifest or (isinstance(files, dict) and "model.onnx" in files)
    onnx = manifest.get("onnx")
    may_be = {"openvino": OPENVINO, "why_not_openvino": WHY_NOT_OPENVINO}
    wanted = ONNX | {
        field: kind for field, kind in may_be.items() if isinstance(onnx, dict) and field in onnx
    }
    own = {field: kind for field, kind in NEW.items() if field in manifest and manifest["schema"] == 2}
    if manifest["schema"] == 2 and not own:
        raise RefusedError(f"{MANIFEST}: {' or '.join(NEW)} is missing, which schema 2 is for")
    _check(manifest, FIELDS | own | ({"onnx": wanted} if with_onnx else {}), "")
    for name, entry in manifest["files"].items():
        _check(entry, FILE, f".files[{name[:100]!r}]")
    if not manifest["files"] or len(manifest["files"]) > MAX_FILES:
        raise RefusedError(f"{MANIFEST} lists {len(manifest['files'])} files; a bundle has 1 to {MAX_FILES}")
    check_names([MANIFEST, SIGNATURE, *manifest["files"]])
    for border in ("inputs", "outputs"):
        names = [tensor["name"] for tensor in manifest[border]]
        if len(set(names)) != len(names):
            raise RefusedError(f"{MANIFEST}: two {border} have the same name")
    try:
        read_sizes(manifest)
        read_state(manifest)
    except ValueError as e:
        raise RefusedError(f"{MANIFEST}: {e}") from e
    in_openvino = onnx.get("openvino") if isinstance(onnx, dict) else None
    if in_openvino is not None and onnx is not None and onnx.get("why_not_openvino") is not None:
        raise RefusedError(f"{MANIFEST}: onnx.openvino has options, and onnx.why_not_openvino says no")
    timings = {"latency": manifest, "onnx.latency": onnx, "onnx.openvino.latency": in_openvino}
    for place, holder in timings.items():
        timed = holder["latency"] if holder is not None else {"p99_ms": None}
        if timed["p99_ms"] is not None and timed["p50_ms"] > timed["p99_ms"]:
            raise RefusedError(f"{MANIFEST}: {place}.p50_ms is above {place}.p99_ms")


def _check(value: Any, wanted: Any, where: str) -> None:
    """Refused unless `value` has the form of `wanted`: a Kind, an object with exactly its keys, or a list."""
    if isinstance(wanted, Kind):
        if not wanted.holds(value):
            raise RefusedError(f"{MANIFEST}: {where.lstrip('.')} is {str(value)[:60]!r}, not {wanted.words}")
    elif isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            raise RefusedError(f"{MANIFEST}: {where.lstrip('.')} is not a list with something in it")
        for index, item in enumerate(value):
            _check(item, wanted[0], f"{where}[{index}]")
    else:
        if not isinstance(value, dict):
            raise RefusedError(f"{MANIFEST}: {where.lstrip('.')} is not an object")
        for key in [*wanted, *value]:
            if key not in value or key not in wanted:
                state = "is missing" if key in wanted else "is no field of this schema"
                raise RefusedError(f"{MANIFEST}: {f'{where}.{key[:100]}'.lstrip('.')!r} {state}")
        for key, kind in wanted.items():
            _check(value[key], kind, f"{where}.{key}")


def check_names(names: Iterable[str]) -> None:
    """Raise RefusedError unless all names are plain and distinct file names on every system.

    Plain: ASCII letters, digits, `_`, `-` and `.`. So no name leaves a folder, no two differ only in Unicode
    form, and none is a hidden file, or a drive, a device or a stream on Windows.
    """
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name) or _DEVICE.fullmatch(name):
            raise RefusedError(f"the file name {name[:100]!r} is not allowed in a bundle")
        if name.lower() in seen:
            raise RefusedError(f"the file {name!r} is in it twice, or once more in other letters")
        seen.add(name.lower())
