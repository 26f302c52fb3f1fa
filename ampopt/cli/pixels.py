"""The pixels of an opened image, the right way up, and the number that stands for white."""

from __future__ import annotations

from typing import Any

import numpy as np

from ampopt.errors import need

OF_16_BITS = ("PNG", "PPM")
"""Formats whose integers have at most 16 bits, although Pillow may hold them in 32."""


def upright(opened: Any, channels: int) -> tuple[Any, float]:
    """A Pillow image, turned as its EXIF orientation says, and the value that is 1 once it is scaled.

    Of 8 bits it is RGB or, with one channel, gray; of 16 bits, whose range is 65535, and of floats, which
    stay as they are, it is gray in Pillow's mode F. Pillow's own conversion cuts the latter two off at 255.

    Raises ValueError, which names the mode, for integers of unknown range, and for a mode that Pillow cannot
    convert.
    """
    mode, kind = opened.mode, np.dtype(need("PIL.ImageMode", "vision").getmode(opened.mode).typestr)
    is_of_16_bits = kind.newbyteorder("=") == np.uint16 or (mode == "I" and opened.format in OF_16_BITS)
    turned = need("PIL.ImageOps", "vision").exif_transpose(opened)
    if kind.kind == "b" or kind == np.uint8:
        return turned.convert("RGB" if channels == 3 else "L"), 255.0
    if is_of_16_bits or kind.kind == "f":
        values = np.asarray(turned).astype(np.float32)
        return need("PIL.Image", "vision").fromarray(values), 65535.0 if is_of_16_bits else 1.0
    raise ValueError(
        f"Pillow opens it in mode {mode}, integers whose range is not known: save it with 8 or 16 bits, or "
        "give its values with --npz"
    )
