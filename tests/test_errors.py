"""What errors say, and which of them may pass; packages that an extra brings are asked for by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampopt import errors
from ampopt.errors import (
    AmpoptError,
    CaptureError,
    Interrupted,
    MissingExtraError,
    first_line,
    is_passing,
    need,
    reason_of,
    require,
)

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", CLASSES)
def test_whatever_is_raised_on_purpose_is_caught_as_one(kind: type[Exception]) -> None:
    assert issubclass(kind, AmpoptError)


def test_an_interrupt_is_ctrl_c_to_python_too() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise Interrupted("nothing yet")


def test_a_missing_package_is_told_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtraError) as caught:
        need("no_such_package.part", "onnx")
    assert str(caught.value) == "no_such_package is not installed: run  pip install 'ampopt[onnx]'"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(MissingExtraError, match=r"^no_such_package is not installed: .*'ampopt\[sign\]'$"):
        require("no_such_package", "sign")


def test_what_is_installed_is_given_and_asked_for_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brought_by_an_extra.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    require("brought_by_an_extra", "x")
    assert "brought_by_an_extra" not in sys.modules
    module = need("brought_by_an_extra", "x")
    assert module.here is True
    monkeypatch.delitem(sys.modules, "brought_by_an_extra")


def test_a_package_that_itself_lacks_another_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import its_own_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_own_dependency") as caught:
        need("half_installed", "x")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("\n  one  \ntwo"), "ValueError: one  "),
        (ValueError(""), "ValueError"),
        (ValueError("  \n "), "ValueError"),
        (MissingExtraError("a", "b"), "MissingExtraError: a is not installed: run  pip install 'ampopt[b]'"),
    ],
)
def test_the_first_line_says_what_and_why(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_an_error_of_ampopts_is_a_reason_in_its_own_words() -> None:
    assert reason_of(CaptureError("it has no inputs:\nnone at all")) == "it has no inputs:\nnone at all"
    assert reason_of(ValueError("no such kernel\nand much more")) == "ValueError: no such kernel"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError("no such file"),
        TimeoutError(),
        RuntimeError("CUDA out of memory. Tried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"),
        RuntimeError("the compiler timed out"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_want_of_memory_or_of_a_file_may_pass_and_so_may_what_it_caused(error: Exception) -> None:
    above = AmpoptError("the pass failed")
    above.__cause__ = error
    highest = ValueError("wrapped again")
    highest.__cause__ = above
    assert is_passing(error)
    assert is_passing(highest)


def test_a_mistake_stays_one_and_what_was_only_handled_before_it_does_not_count() -> None:
    mistake = ValueError("wrong shape")
    mistake.__context__ = MemoryError()
    assert not is_passing(mistake)
