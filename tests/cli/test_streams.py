"""Standard streams that are closed, full, not Unicode or read by nobody: no work is lost by them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn, TextIO

import pytest

import ampopt
from ampopt.cli import app as cli
from ampopt.system.standard_streams import lasting_streams
from tests.cli.test_app import CODE, call, comparison
from tests.cli.test_startup import ENVIRONMENT


def _opened(
    path: str | Path | int, encoding: str = "utf-8", *, errors: str = "strict", buffering: int = -1
) -> TextIO:
    """A stream as Python opens its own."""
    return open(path, "w", buffering, encoding, errors)


def _print_and_exit(text: str, code: int) -> NoReturn:
    """What a command does."""
    with lasting_streams():
        print(text, flush=True)
        raise SystemExit(code)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_lacks_is_replaced(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", _opened(tmp_path / "out", encoding))
    before = sys.stdout
    with lasting_streams():
        print("‖y‖ ≤ 1")
    assert (tmp_path / "out").read_text(encoding) == "?y? ? 1\n"
    assert sys.stdout is before


def test_an_error_handler_that_was_asked_for_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _opened(tmp_path / "out", "ascii", errors="backslashreplace"))
    with lasting_streams():
        print("µ")
    assert (tmp_path / "out").read_text() == "\\xb5\n"


def test_closed_streams_take_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with lasting_streams():
        assert not sys.stdout.isatty()
        assert sys.stdout.write("a") == 1
        assert sys.stderr.write("bc") == 2
    assert sys.stdout is None


def test_a_stream_that_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    with lasting_streams():
        assert sys.stdout is own


@pytest.mark.skipif(os.name != "posix", reason="pipes of the system")
@pytest.mark.parametrize("buffering", [1, -1], ids=["lines", "blocks"])
def test_a_reader_who_has_gone_is_no_error(buffering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, written = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", _opened(written, buffering=buffering))
    with pytest.raises(SystemExit) as ended:
        _print_and_exit("nobody reads this", 3)
    assert ended.value.code == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_what_a_full_disk_does_not_take_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _opened("/dev/full"))
    with pytest.raises(SystemExit) as ended:
        _print_and_exit("the report", 0)
    assert ended.value.code == "error: not everything could be printed: No space left on device"


PRINTS = f"""{CODE}
class Prints(Tiny):
    def forward(self, image):
        print("µ", "called " * 2000, flush=True)
        return super().forward(image)
"""
SCRIPT = """
import ampopt
from torch import nn
from ampopt.cli.app import main
from ampopt.deploy.runtime import OptimizedModule
from ampopt.measure.ledger import Ledger

class Fast(OptimizedModule):
    report = Ledger("Prints", {}, ())

    def __init__(self):
        nn.Module.__init__(self)

def optimize(network, args, **options):
    network.eval()(*args)
    return Fast()

ampopt.optimize = optimize
main()
"""
"""A command whose search, which would capture and time the network, is left out; the network is called."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a shell of Linux")
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("| head -c 1 >/dev/null", 0, ""),
        (">/dev/full", 1, "error: not everything could be printed: No space left on device\n"),
    ],
)
def test_a_command_writes_its_files_wherever_it_prints(
    where: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(PRINTS)
    (tmp_path / "script.py").write_text(SCRIPT)
    options = "optimize net.py:Prints --input 1x3x8x8 --device cpu --report r.html --json r.json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} script.py {options} {where}"],
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, said)
    assert {"r.html", "r.json"} <= {path.name for path in tmp_path.iterdir()}


def _unprintable() -> NoReturn:
    raise OSError("nothing can be printed")


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A command whose comparison is made at once, and that writes three files."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: comparison())
    (tmp_path / "tiny.py").write_text(CODE)
    files = ("--report", tmp_path / "r.html", "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    return ["compare", f"{tmp_path / 'tiny.py'}:Tiny", "--input", "1x3x8x8", "--device", "cpu", *files]


def test_files_are_written_before_anything_is_printed(
    compared: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "console", _unprintable)
    assert "nothing can be printed" in call(*compared).stderr
    assert {path.suffix for path in tmp_path.glob("r.*")} == {".html", ".json", ".md"}


def test_what_was_found_is_printed_where_a_file_cannot_be_written(
    compared: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    result = call(*compared)
    assert result.exit_code == 1
    assert "fold-conv-bn" in result.stdout
    assert "r.html cannot be written: No space left on device" in result.stderr
