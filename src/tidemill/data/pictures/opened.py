"""Images of rows: paths, bytes, `data:` URLs, arrays or PIL images. Each is checked by its header before it is decoded,
so a file that claims to be enormous costs no memory."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import DataError, MissingExtra

MAX_PIXELS = 1 << 26  # 8,192 × 8,192; decoded, 200 MB
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MODES = ("RGB", "RGBA", "L", "LA", "P", "PA", "1", "I;16")
SKIP = "set data.on_bad_row=skip to leave such rows out"
Picture = Any  # what a row may have: see `as_picture`


class NoPicture(ValueError):
    """What is wrong with an image, as the end of a sentence about it."""


def as_picture(value: Any, folder: Path | None = None) -> Picture:
    """Normalise what a row has: a path (relative to its file's folder), bytes, a `data:` URL, the {"bytes", "path"} of
    dataset files, an array (height, width, 3), or a PIL image."""
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        if value.startswith("data:"):
            return _from_url(value)
        if value.startswith(("http://", "https://")):
            raise NoPicture("is an address on the network; images are read from files, or from the row itself")
        path = Path(value.removeprefix("file://")).expanduser()
        return str(path if path.is_absolute() or folder is None else folder / path)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or 0 in value.shape:
            raise NoPicture(f"is an array of {value.dtype} of shape {value.shape}, not uint8 of (height, width, 3)")
        return value
    if hasattr(value, "convert") and hasattr(value, "size"):
        return value
    raise NoPicture(f"is {type(value).__name__}, not a path, bytes or an image")


def _from_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise NoPicture("is a data: URL that is not base64")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise NoPicture(f"is a data: URL that is not base64 ({error})") from None


def size_of(picture: Picture, most: int = MAX_PIXELS) -> tuple[int, int]:
    """Height and width, by the header alone."""
    if isinstance(picture, np.ndarray):
        return int(picture.shape[0]), int(picture.shape[1])
    with _begun(picture, most) as image:
        return image.height, image.width


def check(picture: Picture, most: int = MAX_PIXELS) -> None:
    """Refuse what could not be decoded, as far as that can be known without keeping pixels."""
    if isinstance(picture, np.ndarray):
        return
    with _begun(picture, most) as image:
        if hasattr(image, "fp"):
            _decode(image)


def decoded(picture: Picture, most: int = MAX_PIXELS) -> Any:
    """A PIL image in RGB; transparency lies on white."""
    pil = pillow()
    if isinstance(picture, np.ndarray):
        return pil.Image.fromarray(picture)
    with _begun(picture, most) as image:
        _decode(image)
        if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
            own = image.convert("RGBA")
            white = pil.Image.new("RGBA", own.size, (255, 255, 255, 255))
            return pil.Image.alpha_composite(white, own).convert("RGB")
        if image.mode == "I;16":
            return pil.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def _decode(image: Any) -> None:
    try:
        image.load()
    except Exception as error:  # a decoder raises what it likes: OSError, SyntaxError, struct.error
        raise NoPicture(f"is broken or cut short ({_first_line(error)})") from None


def _begun(picture: Picture, most: int) -> Any:
    """The image with its header read and found usable; a context."""
    pil = pillow()
    image = picture if hasattr(picture, "convert") else _opened(pil, picture)
    if image.width * image.height > most:
        raise NoPicture(f"has {image.width:,} × {image.height:,} pixels, over data.images.max_pixels ({most:,})")
    if image.width * image.height == 0:
        raise NoPicture("has no pixels")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # of a stereo photograph the first is taken
        raise NoPicture(f"is an animation of {image.n_frames} frames, not one still image")
    if image.mode not in MODES:
        raise NoPicture(f"has {image.mode} colours, which look different from program to program; convert it to RGB")
    return image if not hasattr(picture, "convert") else _Kept(image)


class _Kept:
    """A context around an image that is its owner's to close."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def __enter__(self) -> Any:
        return self.image

    def __exit__(self, *error: object) -> None:
        return None


def _opened(pil: Any, picture: str | bytes) -> Any:
    if isinstance(picture, str):
        path = Path(picture)
        if not path.is_file():
            raise NoPicture("is not there" if not path.exists() else "is a folder")
        if path.stat().st_size == 0:
            raise NoPicture("is empty: it has no bytes")
    elif not picture:
        raise NoPicture("is empty: it has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pil.Image.DecompressionBombWarning)
            return pil.Image.open(picture if isinstance(picture, str) else io.BytesIO(picture), formats=KINDS)
    except pil.UnidentifiedImageError:
        raise NoPicture(f"is not an image ({', '.join(KINDS)})") from None
    except pil.Image.DecompressionBombError as error:
        raise NoPicture(f"is far too large ({_first_line(error)})") from None
    except Exception as error:
        raise NoPicture(f"is broken or cut short ({_first_line(error)})") from None


def named(picture: Picture) -> str:
    """What a message calls it."""
    return Path(picture).name if isinstance(picture, str) else "in the row"


def refused(where: str, number: int, picture: Picture, why: Exception) -> DataError:
    return DataError(f"{where}: image {number + 1} ({named(picture)}) {why}", f"replace it, or {SKIP}")


def pillow() -> Any:
    try:
        import PIL
        import PIL.Image
    except ImportError:
        raise MissingExtra("reading images", "pillow", "vision") from None
    return PIL


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
