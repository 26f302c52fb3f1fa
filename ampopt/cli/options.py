"""Options shared by the commands, readable error messages, and atomic writes of result files."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ampopt.bundle.destinations import check_distinct, check_file, check_text
from ampopt.cli.input_source import check_inputs, example_call
from ampopt.cli.model_source import FORMS, check_model, is_model_file, load_model
from ampopt.document.printable import printable
from ampopt.document.render import check_report, render
from ampopt.errors import AmpoptError, InputError, near
from ampopt.ir.pass_text import installed, parse
from ampopt.ir.precisions import LANE_NAMES, check_io, names_of
from ampopt.system import places
from ampopt.system.atomic import replacing

if TYPE_CHECKING:
    import torch

    from ampopt.document.model import Document


def pass_names() -> list[str]:
    """The names of all passes in alphabetical order, from their file names; nothing is imported."""
    folder = Path(__file__).parent.parent / "passes"
    return sorted(file.stem.replace("_", "-") for file in folder.glob("[!_]*.py"))


def _completed(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes the beginning of one of these words, for the shell."""
    return lambda incomplete: [word for word in words() if word.startswith(incomplete)]


Model = Annotated[str, Argument(metavar="MODEL", help=FORMS)]
Shapes = Annotated[
    list[str] | None,
    Option("--input", metavar="SHAPE", help="1x3x480x640, or 1x16:int64 with a dtype; once for each input."),
]
Image = Annotated[Path | None, Option(help="Image as the input, resized to the size of --input.")]
Npz = Annotated[Path | None, Option(help="NumPy file: arr_0, arr_1, … positional, others by name.")]
Normalize = Annotated[bool, Option(help="Normalize the image with ImageNet's mean and deviation.")]
Weights = Annotated[Path | None, Option(help="State dict to load: .safetensors, .pt or .pth.")]
TrustModelFile = Annotated[
    bool, Option("--trust-model-file", help="Load a saved model although its file can execute code.")
]


def _lanes(precision: str) -> str:
    try:
        names_of(precision)
    except InputError as error:
        raise typer.BadParameter(str(error).partition(": ")[2]) from error
    return precision


Precision = Annotated[
    str,
    Option(
        metavar="LANES",
        help="fp32; amp (mixed); bf16 (mixed with bfloat16); several with commas, of which the fastest "
        "within the tolerance is taken; auto: fp32,amp.",
        autocompletion=_completed(lambda: ("auto", *LANE_NAMES)),
        callback=_lanes,
    ),
]
Io = Annotated[
    Literal["original", "lane"],
    Option(
        help="Floating-point inputs and outputs: original: in the model's dtypes; lane: in that of the one "
        "lane of --precision, so that calls convert nothing."
    ),
]
Tolerance = Annotated[
    float | None,
    Option(
        min=0.0,
        help="Largest relative error against float64, ‖y - ref‖ / ‖ref‖, for each output. Default: a "
        "small multiple of eager's own in the same precision, and at most 1e-2 for auto to choose it.",
    ),
]
Budget = Annotated[
    float | None,
    Option(help="Seconds for everything; what does not fit is not tried. Default: 60, more for slow calls."),
]
Policy = Annotated[
    Literal["amp", "O1", "O2", "half"],
    Option(help="How mixed precision is decided: amp (autocast's own lists), O1, O2 (as apex), half."),
]
Nan = Annotated[
    Literal["keep", "exact", "ignore"],
    Option(
        "--nan",
        help="keep: what NaN in an input makes NaN or infinite stays so; exact: and nothing else does; "
        "ignore: that is not verified.",
    ),
]
Device = Annotated[
    str | None,
    Option(
        help="cpu or cuda. Default: cuda, if there is one; a saved model's own.",
        autocompletion=_completed(lambda: ("cpu", "cuda")),
    ),
]
Exclude = Annotated[
    list[str] | None,
    Option(metavar="PASS", help="To leave out; repeatable.", autocompletion=_completed(pass_names)),
]
Passes = Annotated[
    str | None,
    Option(
        metavar="TEXT",
        help="Exactly the passes to try, such as 'fold-conv-bn,degroup{least-gain=1.1}'; "
        "`ampopt passes NAME` tells a pass's options.",
    ),
]
Cache = Annotated[
    bool, Option(help="Use what an earlier call found for this model, and keep what this one finds.")
]
ReportFile = Annotated[
    Path | None,
    Option(
        "--report",
        metavar="FILE",
        help="File for the report: .html (one page to look at, which loads nothing), .md, .json or .txt.",
    ),
]
Dynamic = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=LOW..HIGH",
        help="Sizes that one program is to answer, such as batch=1..8; also height and width; repeatable.",
    ),
]
JsonFile = Annotated[Path | None, Option("--json", help="File to write the report to.")]
Verbose = Annotated[
    bool, Option("--verbose", "-v", help="Show every row of a report, and the whole trace of an error.")
]


def check_request(
    model: str,
    shapes: Sequence[str] | None,
    image: Path | None,
    npz: Path | None,
    normalize: bool,
    weights: Path | None,
    trust_model_file: bool,
    device: str | None,
    budget: float | None,
    exclude: Sequence[str] | None,
    passes: str | None,
    written: Mapping[str, Path | None],
) -> None:
    """Raise InputError or MissingExtraError for every error that needs no PyTorch to detect.

    `written`: the output paths by option.
    """
    if budget is not None:
        check_budget(budget)
    said = {*(exclude or ()), *(name for name, _ in parse(passes or ""))}
    names = sorted({*pass_names(), *(installed() if passes else ())})
    if unknown := sorted(said - set(names)):
        close = near(unknown, names)
        raise InputError(f"there is no pass {', '.join(unknown)}: choose from {', '.join(names)}{close}")
    check_device(device)
    code = Path(model if is_model_file(model) else model.rpartition(":")[0] or model)
    file = code if os.path.isfile(code) else None
    read = {"MODEL": file, "--image": image, "--npz": npz, "--weights": weights}
    check_written(written, read)
    check_inputs(shapes or (), image, npz, normalize=normalize)
    check_model(model, trust_file=trust_model_file, weights=weights)


def check_written(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise InputError if an output cannot be written, or would overwrite another output or an input.

    Code that is imported, whether by an option, by MODEL or by the user's own code, is known by its suffix.
    """
    check_distinct(written, read)
    for option, path in written.items():
        if path is not None:
            if str(path) == "-":
                raise InputError(f"{option} -: stdout has the text for people: name a file")
            if option == "--report":
                check_report(path)
            if option == "--output":  # model.onnx, or a bundle
                check_file(path)
            else:
                check_text(path)


def fixed(*paths: Path | None) -> list[Path | None]:
    """The same files, whatever becomes of the current folder: a model's code may change it."""
    return [path and path.absolute() for path in paths]


def check_lane_io(io: str, precision: str) -> None:
    """Raise InputError if `--io lane` is asked for without one lane in `--precision`."""
    check_io(io, precision, len(set(names_of(precision))))


def ranges(given: Sequence[str] | None) -> dict[str, tuple[int, int]] | None:
    """The ranges of sizes by name. Raises InputError for what is not NAME=LOW..HIGH."""
    found: dict[str, tuple[int, int]] = {}
    for text in given or ():
        match = re.fullmatch(r"(\w+)=(\d{1,9})\.\.(\d{1,9})", text)
        if match is None or match[1] in found:
            why = "is no range" if match is None else f"is a second range for {match[1]}"
            raise InputError(f"--dynamic {text!r} {why}: give each size once, such as batch=1..8")
        found[match[1]] = int(match[2]), int(match[3])
    return found or None


def check_budget(budget: float) -> None:
    """Raise InputError if a time budget is not positive and finite."""
    if not 0 < budget < math.inf:
        raise InputError(f"--budget {budget:g}: give a positive, finite number of seconds")


def check_device(device: str | None) -> None:
    """Raise InputError for an invalid device name. Only PyTorch can check whether the device exists."""
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", device):
        raise InputError(f"--device {device!r} is no device: choose cpu or cuda")


def check_is_there(device: str | None) -> None:
    """Raise InputError for a GPU that this machine does not have."""
    import torch

    name, _, number = (device or "").partition(":")
    if name == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise InputError(f"--device {device}: there is {found} on this machine: leave it out, or use cpu")


def model_and_call(
    model: str,
    shapes: Sequence[str] | None,
    image: Path | None,
    npz: Path | None,
    normalize: bool,
    weights: Path | None,
    trust_model_file: bool,
    device: str | None,
    train: bool = False,
) -> tuple[torch.nn.Module, tuple[Any, ...] | None, dict[str, Any], str | None]:
    """The model, its positional and keyword arguments, and the device, from the options.

    With `train`, a model that is made is in training mode.
    """
    import torch

    check_is_there(device)
    args, kwargs = example_call(shapes or (), image, npz, normalize=normalize)
    loaded = load_model(model, trust_file=trust_model_file, weights=weights, train=train)
    if not args and not kwargs:
        args, kwargs = loaded.args, dict(loaded.kwargs)
    if device is None and torch.cuda.is_available() and not is_model_file(model):
        device = "cuda"
    return loaded.model, args or None, kwargs, device


def console() -> Console:
    """Standard output; if it is not a terminal, with the width of `str(report)`."""
    from ampopt.measure.terminal import TEXT_WIDTH

    is_screen = sys.stdout.isatty()
    piped: Any = None if is_screen else _Unpadded(sys.stdout)  # what rich uses of a stream
    return _PlainConsole(
        file=piped,
        width=None if is_screen else TEXT_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


class _PlainConsole(Console):
    """A console that shows strings, also those in tables, without what would act on a terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for what is no `Text`."""
        return super().render_str(printable(text), **options)


class _Unpadded:
    """A stream without the blanks with which rich fills lines; by its encoding rich chooses characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.encoding = stream, stream.encoding

    def write(self, text: str) -> None:
        """Write whole lines without the blanks before their ends."""
        self._stream.write(re.sub(r" +(?=\n|\Z)", "", text))

    def flush(self) -> None:
        """Flush what is behind it."""
        self._stream.flush()


@contextlib.contextmanager
def readable_errors(verbose: bool) -> Iterator[None]:
    """Print every error as one paragraph on stderr and exit with code 1; `verbose`: let it propagate."""
    try:
        yield
    except (Exception, SystemExit) as e:  # the user's code may exit; without a result, that is an error
        if verbose:
            raise
        text = str(e) if isinstance(e, AmpoptError) else f"{type(e).__name__}: {e}"
        if not places.is_here() and places.GONE not in text:
            text = f"{places.GONE}: change to one that is there ({text})"
        text = textwrap.shorten(printable(Text.from_ansi(text).plain), 2000, placeholder=" …")
        more = "" if isinstance(e, AmpoptError) else " (run with --verbose for the trace)"
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), text, more), soft_wrap=True)
        raise typer.Exit(1) from e


def write_report(document: Document, path: Path | None) -> None:
    """Write the document in the format of the path's suffix, if there is a path."""
    if path is not None:
        write(path, render(document, path))


def write(path: Path, text: str) -> None:
    """Write a file atomically; where `path` is a link, what it leads to. Raises InputError if it cannot be.

    A character that UTF-8 lacks, half of a pair in the name of some file, is written as its number.
    """
    try:
        with replacing(places.place_of(path)) as written:
            written.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as e:
        raise InputError(f"{path} cannot be written: {places.told(e)}") from e
