"""Images of rows: what is read, what is refused, and in which words."""

import base64
import io
import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from tidemill.data import survey
from tidemill.data.pictures import opened, shown
from tidemill.data.pictures.opened import NoPicture
from tidemill.data.source import open_source
from tidemill.errors import DataError
from tidemill.recipe.config import Config, Data
from tidemill.recipe.images import ImageSettings

PIL = pytest.importorskip("PIL.Image")


def image(mode: str = "RGB", size: tuple[int, int] = (20, 10), kind: str = "PNG", **more) -> bytes:
    found = io.BytesIO()
    PIL.new(mode, size).save(found, kind, **more)
    return found.getvalue()


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A whole PNG of that size, all of one colour, in less than a megabyte."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


def animation() -> bytes:
    found = io.BytesIO()
    frames = [PIL.new("L", (8, 8), shade) for shade in (0, 255)]
    frames[0].save(found, "GIF", save_all=True, append_images=frames[1:])
    return found.getvalue()


BAD = {
    "cut.png": (image("RGB", (200, 200))[:-60], "broken or cut short"),
    "head.png": (image()[:20], "broken or cut short|not an image"),
    "bomb.png": (bomb(), "900,000,000|far too large"),
    "moving.gif": (animation(), "animation of 2 frames"),
    "print.jpg": (image("CMYK", kind="JPEG"), "CMYK colours.*convert it to RGB"),
    "empty.png": (b"", "is empty"),
    "words.png": (b"not an image at all\n" * 40, "is not an image"),
    "page.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "gone.png": (None, "is not there"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_with_its_line_before_the_run(name: str, tmp_path) -> None:
    content, why = BAD[name]
    (tmp_path / "good.png").write_bytes(image())
    if content is not None:
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "what?", "answer": "1", "image": one} for one in ("good.png", "good.png", name)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, _ = open_source(Data(source=str(file), held_out=0), seed=0)
    config = Config(name="x", data={"source": str(file), "held_out": 0})
    tracemalloc.start()
    with pytest.raises(DataError, match=why) as refused:
        survey.with_images(config, survey.checked(source))
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert f"{file}:3" in refused.value.message and name in refused.value.message
    assert "on_bad_row=skip" in refused.value.remedy


def test_a_folder_and_an_address_and_other_things_are_no_images(tmp_path) -> None:
    for value, why in [
        ("http://somewhere/a.png", "on the network"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png,abc", "not base64"),
        (3, "is int"),
        (np.zeros((2, 2), np.uint8), "array of uint8 of shape"),
        (np.zeros((2, 2, 3), np.float32), "array of float32"),
    ]:
        with pytest.raises(NoPicture, match=why):
            opened.as_picture(value)
    with pytest.raises(NoPicture, match="is a folder"):
        opened.check(opened.as_picture(str(tmp_path)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_usual_colours_become_red_green_and_blue(mode: str) -> None:
    found = opened.decoded(image(mode))
    assert found.mode == "RGB" and found.size == (20, 10)


def test_transparency_lies_on_white() -> None:
    assert opened.decoded(image("RGBA")).getpixel((0, 0)) == (255, 255, 255)


def test_every_form_of_a_row_shows_the_same(tmp_path) -> None:
    data = image("RGB", (6, 4))
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "what?"}
    forms = [
        {"prompt": "what?", "image": "a.png"},
        {"prompt": "what?", "images": ["a.png"]},
        {"prompt": "what?", "image": {"path": "a.png", "bytes": None}},
        {"prompt": "what?", "image": url},
        {"messages": [{"role": "user", "content": [part, text]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, text]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, text]}], "image": "a.png"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in forms))
    source, _ = open_source(Data(source=str(file), held_out=0), seed=0)
    for i in range(len(forms)):
        example = source.example(i)
        assert [opened.size_of(one) for one in example.images] == [(4, 6)], forms[i]
        assert "image" not in example.meta and "images" not in example.meta
        if not isinstance(example.prompt, str):
            assert example.prompt[-1]["content"][0] == {"type": "image"}


def test_an_image_both_in_a_column_and_in_a_message_is_refused(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(image())
    row = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}], "image": "a.png"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="both in a column and in a message"):
        open_source(Data(source=str(file), held_out=0), seed=0)[0].example(0)


def test_a_bad_row_is_left_out_where_that_is_asked_for(tmp_path) -> None:
    (tmp_path / "good.png").write_bytes(image())
    (tmp_path / "bad.png").write_bytes(b"")
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "what?", "answer": "1", "image": one} for one in ("good.png", "bad.png")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(file), "held_out": 0, "on_bad_row": "skip"}
    config = survey.with_images(Config(name="x", data=data), survey.checked(open_source(Data(**data), seed=0)[0]))
    assert config.data.images == ImageSettings()


def test_places_for_images_in_messages() -> None:
    words = [{"role": "system", "content": "see"}, {"role": "user", "content": "a <image> b <image>"}]
    made = shown.with_parts(words, 2, "row")
    assert [part["type"] for part in made[1]["content"]] == ["text", "image", "text", "image"]
    first = shown.with_parts([{"role": "user", "content": "what?"}], 2, "row")
    assert [part["type"] for part in first[0]["content"]] == ["image", "image", "text"]
    with pytest.raises(DataError, match="places for 2 images, the row has 1 image"):
        shown.with_parts(words, 1, "row")
