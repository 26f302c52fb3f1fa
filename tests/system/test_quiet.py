"""quiet: what its thread says is dropped, what others say is heard, and all is as it was afterwards."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ampopt.system.quiet import quiet
from tests.support import snapshot


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Call a function in another thread, always the same one, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=10)


class _Said(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that reach the root logger, or PyTorch's, which lets none through to it."""
    handler, loggers = _Said(), (logging.getLogger(), logging.getLogger("torch"))
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.messages
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings that are shown."""
    shown: list[str] = []

    def show(message: Warning | str, *rest: object, **named: object) -> None:
        shown.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *rest, **named: shown.append(str(message))
        )
        yield shown


def test_only_what_its_own_thread_writes_is_dropped(
    capsys: pytest.CaptureFixture[str], elsewhere: Callable[..., Any]
) -> None:
    with quiet():
        print("mine")
        sys.stderr.writelines(["mine, too"])
        elsewhere(print, "theirs")
        elsewhere(lambda: print("their errors", file=sys.stderr))
    print("after")
    assert capsys.readouterr() == ("theirs\nafter\n", "their errors\n")


def test_what_it_writes_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with quiet(outer):
        print("one")
        with quiet(inner):
            print("two")
        print("three")
    assert (outer.getvalue(), inner.getvalue()) == ("one\nthree\n", "two\n")
    assert capsys.readouterr() == ("", "")


def test_only_its_own_threads_warnings_are_dropped(warned: list[str], elsewhere: Callable[..., Any]) -> None:
    with quiet():
        warnings.warn("mine", stacklevel=1)
        elsewhere(warnings.warn, "theirs")
    warnings.warn("after", stacklevel=1)
    assert warned == ["theirs", "after"]


def test_a_filter_that_makes_errors_of_warnings_holds_for_the_others_only(
    elsewhere: Callable[..., Any],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet():
            warnings.warn("mine", stacklevel=1)
            with pytest.raises(UserWarning, match="theirs"):
                elsewhere(warnings.warn, "theirs")
        with pytest.raises(UserWarning, match="after"):
            warnings.warn("after", stacklevel=1)


def test_a_warning_shown_once_is_not_shown_again_because_of_it(warned: list[str]) -> None:
    def warn() -> None:
        warnings.warn("once a place", stacklevel=1)

    warnings.simplefilter("default")
    warn()
    with quiet():
        pass
    warn()
    assert warned == ["once a place"]


@pytest.mark.parametrize("name", ["torch", "torch.utils.hooks", "onnxscript", "onnx_ir.passes"])
def test_only_its_own_threads_records_of_the_exporters_are_dropped(
    name: str, logged: list[str], elsewhere: Callable[..., Any]
) -> None:
    logger = logging.getLogger(name)
    with quiet():
        logger.error("mine")
        logging.getLogger(f"{name}.made_in_the_block").error("mine, too")
        elsewhere(logger.error, "theirs")
        logging.getLogger("a.users").error("the user's own")
    logger.error("after")
    assert logged == ["theirs", "the user's own", "after"]


def test_a_handler_of_an_exporters_own_logger_keeps_silent_too() -> None:
    handler, logger = _Said(), logging.getLogger("torch.a_part_of_it")
    logger.addHandler(handler)
    try:
        with quiet():
            logger.error("mine")
        logger.error("after")
    finally:
        logger.removeHandler(handler)
    assert handler.messages == ["after"]


def test_a_logger_without_any_handler_keeps_silent_too(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with quiet():
            logging.getLogger("onnxscript").error("mine")
    finally:
        root.handlers = handlers
    assert capsys.readouterr() == ("", "")


def test_the_streams_are_the_same_objects_inside_and_as_they_were_afterwards() -> None:
    before, streams = snapshot.of_process(), (sys.stdout, sys.stderr)

    def interrupted() -> None:
        with quiet():
            assert (sys.stdout, sys.stderr) == streams
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert snapshot.differences(before, snapshot.of_process()) == []


def test_a_stream_put_in_place_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[..., Any]
) -> None:
    old, new = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", old)
    with quiet():
        elsewhere(setattr, sys, "stdout", new)
        elsewhere(print, "theirs")
    assert sys.stdout is new
    print("after")
    assert new.getvalue() == "theirs\nafter\n"
    assert "write" not in vars(old)
    assert "write" not in vars(new)


def test_a_stream_keeps_a_write_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, own = io.StringIO(), list[str]()
    stream.write = own.append  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    with quiet():
        sys.stdout.write("mine")
    sys.stdout.write("after")
    assert own == ["after"]


class _Rigid:
    """A stream that takes no attributes."""

    __slots__ = ("said",)

    def __init__(self) -> None:
        self.said: list[str] = []

    def write(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("make", [_Rigid, lambda: None])
def test_a_stream_that_cannot_be_muted_is_left_alone(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    with quiet():
        print("heard", end="")
    assert id(sys.stdout) == id(stream)
    assert stream is None or "".join(stream.said) == "heard"


def test_a_thread_is_quiet_until_its_own_block_ends(
    capsys: pytest.CaptureFixture[str], warned: list[str], logged: list[str]
) -> None:
    """The first of two to come is the first to go: the other one stays quiet, and nothing is left behind."""
    before = snapshot.of_process()
    both_in, first_out = threading.Barrier(2, timeout=10), threading.Event()

    def say(what: str) -> None:
        print(what)
        warnings.warn(what, stacklevel=1)
        logging.getLogger("torch").error(what)

    def second() -> None:
        with quiet():
            both_in.wait()
            first_out.wait(timeout=10)
            say("second, inside")
        say("second")

    thread = threading.Thread(target=second)
    thread.start()
    with quiet():
        both_in.wait()
        say("first, inside")
    say("first")
    first_out.set()
    thread.join()
    assert capsys.readouterr().out == "first\nsecond\n"
    assert warned == logged == ["first", "second"]
    assert snapshot.differences(before, snapshot.of_process()) == []


def test_anothers_catch_warnings_across_its_end_leaves_no_filter_behind(
    elsewhere: Callable[..., Any],
) -> None:
    before, entered = list(warnings.filters), warnings.catch_warnings()
    with quiet():
        elsewhere(entered.__enter__)
        elsewhere(warnings.simplefilter, "always")
    assert len(warnings.filters) == len(before) + 1
    elsewhere(entered.__exit__)
    assert list(warnings.filters) == before
