"""Names of files to be written: links, loops, missing folders, and names that are no text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from ampopt.bundle.destinations import check_bundle, check_file, check_onnx
from ampopt.cli.options import write
from ampopt.deploy.onnx_export import export_onnx
from ampopt.errors import AmpoptError
from ampopt.system.places import NoPlaceError, place_of, told
from tests.support.bundles import save
from tests.support.exporting import X
from tests.support.planted import captured_of

REFUSED: dict[str, tuple[str, str]] = {
    "a missing folder": ("nowhere/x", r"No such file or directory \(.*nowhere'\); create that folder first"),
    "a link into no folder": ("into", r"No such file or directory \(.*nowhere'\); create that folder first"),
    "a home folder": (
        "~/x",
        r"No such file or directory \(.*'\); '~' is not expanded: write the home folder out, or create",
    ),
    "a loop": ("loop", "it is a link that leads to itself; remove that link"),
    "a loop of two": ("there", "it is a link that leads to itself; remove that link"),
    "no text": ("x\udcff", "its name is no text in UTF-8; give another name"),
}
"""Names that no file can be written for, and what is said of them."""

ALLOWED: dict[str, tuple[str, str]] = {
    "a link to a file": ("link", "target"),
    "a link to what is not there": ("dangling", "made"),
    "a link through a folder": ("elsewhere/x", "folder/x"),
    "a folder of this name": ("folder/x", "folder/x"),
}
"""Names, and the file that is written for each."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with links of every kind for every suffix."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    Path("elsewhere").symlink_to("folder")
    for suffix in ("", ".onnx"):
        for link, target in (
            ("into", "nowhere/x"), ("loop", "loop"), ("there", "back"), ("back", "there"),
            ("link", "target"), ("dangling", "made"),
        ):  # fmt: skip
            Path(link + suffix).symlink_to(target + suffix)
    return tmp_path


def _export(path: str) -> None:
    original, captured = captured_of(nn.ReLU(), X)
    export_onnx(original, captured, (), path)


WRITERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "save": ("", lambda path: save(Path(path))),
    "export_onnx": (".onnx", _export),
    "write": ("", lambda path: write(Path(path), "text")),
}
"""What writes files, with the suffix of their names."""

CHECKS: dict[str, tuple[str, Callable[[str], object]]] = {
    "check_bundle": ("", lambda path: check_bundle(path, onnx=False, sign_key=None)),
    "check_onnx": (".onnx", check_onnx),
    "check_file": ("", lambda path: check_file(Path(path))),
}
"""What finds beforehand that a file cannot be written."""


@pytest.mark.parametrize("by", [*WRITERS, *CHECKS])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_by_all_alike(by: str, case: str, folder: Path) -> None:
    name, reason = REFUSED[case]
    suffix, work = {**WRITERS, **CHECKS}[by]
    before = sorted(map(str, folder.rglob("*")))
    with pytest.raises(AmpoptError, match=f"cannot be (written|saved): {reason}"):
        work(name + suffix)
    assert sorted(map(str, folder.rglob("*"))) == before


@pytest.mark.parametrize("by", WRITERS)
@pytest.mark.parametrize("case", ALLOWED)
def test_a_link_stays_and_what_it_leads_to_is_written_by_all_alike(by: str, case: str) -> None:
    name, target = ALLOWED[case]
    suffix, work = WRITERS[by]
    links = [path for path in Path().rglob("*") if path.is_symlink()]
    for _ in range(2):  # a new file, and one in the place of another
        work(name + suffix)
        assert Path(target + suffix).is_file()
        assert not Path(target + suffix).is_symlink()
    assert all(path.is_symlink() for path in links)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", ALLOWED)
def test_what_can_be_written_passes_the_check(check: str, case: str) -> None:
    suffix, work = CHECKS[check]
    work(ALLOWED[case][0] + suffix)


def test_a_folder_that_is_named_like_home_is_one_like_any_other() -> None:
    Path("~").mkdir()
    assert place_of("~/x") == Path.cwd() / "~" / "x"


@pytest.mark.parametrize("by", [*WRITERS, *CHECKS])
def test_a_current_folder_that_was_removed_is_named(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix, work = {**WRITERS, **CHECKS}[by]
    Path("here").mkdir()
    monkeypatch.chdir("here")
    os.rmdir(os.getcwd())
    reason = "the current folder was removed; change to one that is there"
    with pytest.raises(AmpoptError, match=f"cannot be (written|saved): {reason}"):
        work("x" + suffix)


def test_an_error_is_told_with_its_place_and_what_to_do() -> None:
    with pytest.raises(NoPlaceError) as caught:
        place_of("nowhere/x")
    missing = f"No such file or directory ({os.path.join(os.getcwd(), 'nowhere')!r})"
    assert told(caught.value) == f"{missing}; create that folder first"
    assert told(OSError(28, "No space left on device")) == (
        "No space left on device; see to that path, its permissions and its disk"
    )
