"""Example inputs from the command line: shapes, an image, or arrays in a file."""

from __future__ import annotations

import dataclasses
import math
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ampopt.cli.pixels import upright
from ampopt.errors import InputError, need, require
from ampopt.system.plain_files import check_named, open_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = (
    "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool",
)  # fmt: skip

MOST_ELEMENTS = 1 << 32
"""Largest number of elements of one input."""

MOST_IMAGE_BYTES, MOST_ARRAY_BYTES = 1 << 28, 1 << 34
"""Largest size of an image file, and of all arrays in a file, uncompressed."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of RGB values in [0, 1]; https://pytorch.org/vision/stable/models.html"""

Call = tuple[tuple["Tensor", ...], dict[str, "Tensor"]]
"""Positional and keyword arguments; both are empty if nothing was given."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes and dtype of one input."""

    sizes: tuple[int, ...]
    dtype: str = "float32"

    @property
    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating-point type."""
        return "float" in self.dtype

    def draw(self, generator: torch.Generator) -> Tensor:
        """A random tensor: standard normal; 0 … 255 for uint8, as pixels; 0 or 1 for other integers.

        0 and 1 are valid indices into every table of two rows or more.
        """
        import torch

        dtype = getattr(torch, self.dtype)
        if self.is_floating_point:
            return torch.randn(self.sizes, generator=generator).to(dtype)
        end = 256 if self.dtype == "uint8" else 2
        return torch.randint(end, self.sizes, generator=generator).to(dtype)


def parse_shape(text: str) -> Shape:
    """`1x3x480x640` or `1x16:int64`. InputError for anything else."""
    match = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*)*)(?::(\w+))?", text)
    if match is None:
        raise InputError(
            f"--input {text!r} is no shape: write it like 1x3x480x640, or 1x16:int64 with a dtype"
        )
    digits, dtype = match.groups(default="float32")
    if dtype not in DTYPES:
        raise InputError(f"--input {text!r}: there is no dtype {dtype}: choose from {', '.join(DTYPES)}")
    if len(text) > 200 or math.prod(sizes := tuple(map(int, digits.split("x")))) > MOST_ELEMENTS:
        raise InputError(f"--input {text[:60]!r} has more than {MOST_ELEMENTS} elements: give a smaller one")
    return Shape(sizes, dtype)


def check_inputs(
    shapes: Sequence[str] = (), image: Path | None = None, npz: Path | None = None, *, normalize: bool = True
) -> list[Shape]:
    """Parse the shapes of --input. Raises the errors of `example_call` that need no PyTorch to detect."""
    parsed = [parse_shape(text) for text in shapes]
    if npz is not None:
        if parsed or image is not None:
            raise InputError("--npz has all inputs: leave --input and --image out")
        check_named(npz, "--npz", MOST_ARRAY_BYTES)
    if image is not None:
        if len(parsed) > 1:
            raise InputError("--image is the only input: give --input once, for its size, or not at all")
        if parsed:
            _require_image_shape(parsed[0], normalize)
        require("PIL", "vision")
        check_named(image, "--image", MOST_IMAGE_BYTES)
    return parsed


def example_call(
    shapes: Sequence[str] = (), image: Path | None = None, npz: Path | None = None, *, normalize: bool = True
) -> Call:
    """The example call that the options --input, --image, --npz and --no-normalize describe.

    Raises InputError if a file or shape is not usable, or if the options exclude each other;
    MissingExtraError if an image is given and Pillow is not installed.
    """
    parsed = check_inputs(shapes, image, npz, normalize=normalize)
    if npz is not None:
        return read_arrays(npz)
    if image is not None:
        return (read_image(image, parsed[0] if parsed else None, normalize=normalize),), {}
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(shape.draw(generator) for shape in parsed), {}


def read_image(path: Path, shape: Shape | None = None, *, normalize: bool = True) -> Tensor:
    """An image file as a float tensor [batch, channels, height, width], channels being RGB or gray.

    It is turned as its EXIF orientation says, resized to the height and width of `shape`, repeated over its
    batch, and scaled to [0, 1] by the range of its integers (255 or 65535); floats stay as they are. RGB is
    then normalized with ImageNet's mean and standard deviation unless `normalize` is False. Without a shape:
    RGB in the image's own size, float32, a batch of one.
    """
    import torch

    channels = 3 if shape is None else shape.sizes[1]
    image = need("PIL.Image", "vision")
    with open_named(path, "--image", MOST_IMAGE_BYTES) as file:
        try:
            with image.open(file) as opened:
                picture, largest = upright(opened, channels)
        except Exception as e:  # Pillow has many for a bad file, and one for an image that is a bomb
            is_unknown = isinstance(e, image.UnidentifiedImageError)
            reason = "it is in no format that Pillow knows" if is_unknown else str(e)
            raise InputError(f"the image {path} cannot be read: {reason}") from e
    if shape is not None:
        height, width = shape.sizes[2:]
        picture = picture.resize((width, height), image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(picture, dtype=np.float32)).div(largest)
    values = values.reshape(picture.height, picture.width, -1).permute(2, 0, 1).unsqueeze(0)
    values = values.expand(-1, channels, -1, -1)
    if normalize:
        mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
        values = (values - mean) / std
    batch, dtype = (1, "float32") if shape is None else (shape.sizes[0], shape.dtype)
    return values.to(getattr(torch, dtype)).repeat(batch, 1, 1, 1).contiguous()


def _require_image_shape(shape: Shape, normalize: bool) -> None:
    if len(shape.sizes) != 4 or shape.sizes[1] not in (1, 3) or not shape.is_floating_point:
        raise InputError(
            "--image needs an --input of batch x 3 (gray: 1) x height x width in a floating-point dtype"
        )
    if normalize and shape.sizes[1] == 1:
        raise InputError("ImageNet's mean and standard deviation are of three channels: add --no-normalize")


def read_arrays(path: Path) -> Call:
    """The arrays of an .npz file, with their dtypes, as arguments of the model.

    Unnamed arrays (`numpy.savez(file, a, b)` calls them arr_0, arr_1, …) are positional, in order; the others
    are keyword arguments by name. Nothing in the file is executed.
    """
    import torch

    with open_named(path, "--npz", MOST_ARRAY_BYTES) as file:
        try:
            if not zipfile.is_zipfile(file):
                raise TypeError("it is no .npz file, which numpy.savez writes")
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > MOST_ARRAY_BYTES:
                raise ValueError(f"they have {size} bytes, and {MOST_ARRAY_BYTES} is the most")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        except Exception as e:  # zipfile, zlib, numpy and torch each have their own for a bad file or dtype
            raise InputError(f"the arrays in {path} cannot be read: {e}") from e
    if not tensors:
        raise InputError(f"there are no arrays in {path}")
    unnamed = {int(name[4:]): name for name in tensors if re.fullmatch(r"arr_\d+", name)}
    positional = tuple(tensors.pop(unnamed[index]) for index in sorted(unnamed))
    return positional, tensors
