"""Example inputs: what shapes, images and arrays become, and what is refused."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ampopt.cli.input_source import DTYPES, IMAGENET_MEAN, IMAGENET_STD, Shape, example_call, parse_shape
from ampopt.errors import AmpoptError, InputError, MissingExtraError
from tests.system.test_plain_files import ODD


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """An image 6 wide and 4 high of one color."""
    path = tmp_path / "picture.png"
    Image.new("RGB", (6, 4), (255, 0, 51)).save(path)
    return path


def test_nothing_given_is_an_empty_call() -> None:
    assert example_call() == ((), {})


def test_every_shape_becomes_one_positional_input() -> None:
    (image, tokens), named = example_call(["1x3x4x5", "2x7:int64"])
    assert (image.shape, image.dtype) == ((1, 3, 4, 5), torch.float32)
    assert (tokens.shape, tokens.dtype) == ((2, 7), torch.int64)
    assert set(tokens.unique().tolist()) <= {0, 1}
    assert named == {}


def test_random_inputs_are_the_same_in_every_run() -> None:
    first, second = (example_call(["2x3", "2x3"])[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)


@pytest.mark.parametrize("name", DTYPES)
def test_inputs_have_the_dtype_that_was_asked_for(name: str) -> None:
    (drawn,), _ = example_call([f"4x4:{name}"])
    assert drawn.dtype is getattr(torch, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1x",
        "1x3x",
        "1xx3",
        "0x3",
        "-1x3",
        "1x3:",
        "1,3",
        "1x3 ",
        "1x3:float31",
        "1x65536x65537",
        "9" * 5000,
    ],
)
def test_text_that_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--input"):
        parse_shape(text)


def test_a_shape_of_one_size_is_a_vector() -> None:
    assert parse_shape("16") == Shape((16,))


def test_an_image_keeps_its_size_and_is_normalized(picture: Path) -> None:
    (image,), named = example_call(image=picture)
    assert (image.shape, image.dtype, named) == ((1, 3, 4, 6), torch.float32, {})
    scaled = torch.tensor([1.0, 0.0, 0.2])
    expected = (scaled - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    torch.testing.assert_close(image[0, :, 0, 0], expected)


def test_an_image_is_resized_to_the_input_and_repeated_over_its_batch(picture: Path) -> None:
    (image,), _ = example_call(["2x3x10x8:float16"], picture, normalize=False)
    assert (image.shape, image.dtype) == ((2, 3, 10, 8), torch.float16)
    assert image.is_contiguous()
    assert image.max() == 1
    assert torch.equal(image[0], image[1])


def test_what_is_no_image_is_told_without_pythons_own_names(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch")
    with pytest.raises(InputError) as caught:
        example_call(image=tmp_path / "net.py")
    reason = "it is in no format that Pillow knows"
    assert str(caught.value) == f"the image {tmp_path / 'net.py'} cannot be read: {reason}"


def test_height_and_width_are_not_confused(tmp_path: Path) -> None:
    values = np.zeros((4, 6, 3), dtype=np.uint8)
    values[1, 5] = 255
    Image.fromarray(values).save(tmp_path / "dot.png")
    (image,), _ = example_call(image=tmp_path / "dot.png", normalize=False)
    assert image.nonzero().tolist() == [[0, channel, 1, 5] for channel in range(3)]


def test_a_gray_image_has_one_channel(picture: Path) -> None:
    (image,), _ = example_call(["1x1x4x6"], picture, normalize=False)
    assert image.shape == (1, 1, 4, 6)


DEPTHS = np.array([[0, 13107, 65535], [256, 300, 1]], dtype=np.uint16)
"""Depths as a camera writes them: beyond 255, and so white, each but the first and the last."""


def _deep_images(folder: Path) -> dict[str, Path]:
    """The same values in [0, 1] as 16-bit integers and as floats, in every format that has such, by name."""
    images = {
        "depth.png": Image.fromarray(DEPTHS),
        "depth.tif": Image.fromarray(DEPTHS),
        "depth.pgm": Image.fromarray(DEPTHS.astype(np.int32)),
        "float.tif": Image.fromarray(DEPTHS.astype(np.float32) / 65535),
    }
    for name, image in images.items():
        image.save(folder / name)
    (folder / "big.tif").write_bytes(_big_endian(DEPTHS))
    return {name: folder / name for name in (*images, "big.tif")}


def _big_endian(values: np.ndarray[Any, Any]) -> bytes:
    """A TIFF whose 16-bit integers have the most significant byte first."""
    height, width = values.shape
    tags = {256: width, 257: height, 258: 16, 259: 1, 262: 1, 273: 8, 277: 1, 278: height}
    tags[279] = values.size * 2
    entries = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in tags.items())
    tags_at = 8 + values.size * 2
    header, pixels = b"MM" + struct.pack(">HI", 42, tags_at), values.astype(">u2").tobytes()
    return header + pixels + struct.pack(">H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("name", ["depth.png", "depth.tif", "depth.pgm", "float.tif", "big.tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_more_than_8_bits_keeps_its_values(tmp_path: Path, name: str, channels: int) -> None:
    path = _deep_images(tmp_path)[name]
    (image,), _ = example_call([f"2x{channels}x2x3"], path, normalize=False)
    expected = torch.from_numpy(DEPTHS.astype(np.float32) / 65535).expand(2, channels, 2, 3)
    torch.testing.assert_close(image, expected, rtol=1e-6, atol=0)


def test_an_image_of_16_bits_is_resized_in_them(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6), 1000, dtype=np.uint16)).save(tmp_path / "flat.png")
    (image,), _ = example_call(["1x1x9x5"], tmp_path / "flat.png", normalize=False)
    torch.testing.assert_close(image, torch.full((1, 1, 9, 5), 1000 / 65535))


def test_integers_of_unknown_range_are_refused_by_their_mode(tmp_path: Path) -> None:
    Image.fromarray(np.array([[70000]], dtype=np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(InputError, match=r"wide\.tif cannot be read: .* mode I, .*--npz"):
        example_call(image=tmp_path / "wide.tif")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_image_is_turned_as_its_orientation_says(tmp_path: Path, dtype: type[np.generic]) -> None:
    values = np.zeros((4, 6), dtype=dtype)
    values[0, 5] = np.iinfo(dtype).max  # type: ignore[type-var]
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera that was held upright: to be turned clockwise
    Image.fromarray(values).save(tmp_path / "turned.png", exif=exif)
    (image,), _ = example_call(image=tmp_path / "turned.png", normalize=False)
    assert image.shape == (1, 3, 6, 4)
    assert image.nonzero().tolist() == [[0, channel, 5, 3] for channel in range(3)]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK"])
def test_an_image_of_8_bits_or_fewer_is_as_pillow_converts_it(tmp_path: Path, mode: str) -> None:
    ramp = Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3) * 3).convert(mode)
    path = tmp_path / ("ramp.tif" if mode == "CMYK" else "ramp.png")
    ramp.save(path)
    (image,), _ = example_call(image=path, normalize=False)
    expected = np.asarray(ramp.convert("RGB")).astype(np.float32) / 255
    torch.testing.assert_close(image[0], torch.from_numpy(expected).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (["1x3x4x4", "1x3x4x4"], "give --input once"),
        (["3x4x4"], "batch x 3"),
        (["1x2x4x4"], "batch x 3"),
        (["1x3x4x4:uint8"], "floating-point"),
        (["1x1x4x4"], "--no-normalize"),
    ],
)
def test_an_image_declines_shapes_that_it_cannot_take(picture: Path, shapes: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        example_call(shapes, picture)


def test_an_image_that_unpacks_to_far_more_is_refused(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 4)
    with pytest.raises(InputError, match="decompression bomb"):
        example_call(image=picture)


def test_arrays_that_unpack_to_far_more_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", np.zeros(100_000))
    monkeypatch.setattr("ampopt.cli.input_source.MOST_ARRAY_BYTES", 10_000)
    assert (tmp_path / "a.npz").stat().st_size < 10_000
    with pytest.raises(InputError, match="and 10000 is the most"):
        example_call(npz=tmp_path / "a.npz")


@pytest.mark.parametrize("option", ["image", "npz"])
@pytest.mark.parametrize("case", ODD)
def test_what_is_no_plain_file_is_refused(option: str, case: str, tmp_path: Path) -> None:
    make, reason = ODD[case]
    make(tmp_path / "x")
    with pytest.raises(InputError, match=f"--{option}: .*{reason}"):
        example_call(**{option: tmp_path / "x"})  # type: ignore[arg-type]


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    for name in ("text.png", "missing.png"):
        with pytest.raises(InputError, match=name):
            example_call(image=tmp_path / name)


def test_an_image_without_pillow_names_the_extra(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"ampopt\[vision\]"):
        example_call(image=picture)


def test_unnamed_arrays_are_positional_in_order_and_named_ones_keywords(tmp_path: Path) -> None:
    arrays = [np.full((1,), index, dtype=np.int32) for index in range(11)]
    np.savez(tmp_path / "a.npz", *arrays, mask=np.ones((2, 2), dtype=np.float32))
    args, kwargs = example_call(npz=tmp_path / "a.npz")
    assert [int(arg) for arg in args] == list(range(11))
    assert args[0].dtype is torch.int32
    assert list(kwargs) == ["mask"]
    assert kwargs["mask"].dtype is torch.float32


def _bad_arrays(folder: Path) -> dict[str, Path]:
    """Files that hold no arrays for a model, by the reason."""
    paths = {
        name: folder / f"{name}.npz" for name in ("missing", "text", "pickled", "words", "empty", "single")
    }
    paths["text"].write_text("no archive")
    np.savez(paths["pickled"], np.array([object()], dtype=object))
    np.savez(paths["words"], np.array(["a", "b"]))
    np.savez(paths["empty"])
    with paths["single"].open("wb") as file:
        np.save(file, np.ones(3))
    return paths


@pytest.mark.parametrize("name", ["missing", "text", "pickled", "words", "empty", "single"])
def test_a_file_without_usable_arrays_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.npz"):
        example_call(npz=_bad_arrays(tmp_path)[name])


def test_arrays_exclude_the_other_inputs(tmp_path: Path, picture: Path) -> None:
    for shapes, image in ((["1x3"], None), ([], picture)):
        with pytest.raises(AmpoptError, match="--npz has all inputs"):
            example_call(shapes, image, tmp_path / "a.npz")
