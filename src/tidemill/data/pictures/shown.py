"""What a prompt shows: its images as tiles, and the places that they take among its tokens.

A prompt says where its images stand by `<image>` in a text, or by parts of kind `image` in messages; one that says
nothing shows them first. A chat template writes the model's own mark for each, which is then written out in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.data.pictures import opened
from tidemill.data.pictures.opened import NoPicture, Picture, refused
from tidemill.data.source import Example, Message
from tidemill.errors import ConfigError, DataError
from tidemill.models.vision.views.find import within
from tidemill.models.vision.views.view import CannotPlan, Plan, View, misplaced
from tidemill.tiles import Tile, Tiles

if TYPE_CHECKING:
    from tidemill.recipe.config import ImageSettings

HERE = "<image>"  # in a text: an image stands here
GREY = 127
KINDS_OF_PARTS = ("image", "image_url", "input_image")


@dataclass(frozen=True, slots=True)
class Pictures:
    """How a run's model takes images. `view`: of the model, within the recipe's budget of tokens."""

    view: View
    settings: ImageSettings

    @staticmethod
    def of(view: View | None, settings: ImageSettings | None) -> Pictures | None:
        if settings is None:
            return None
        if view is None:
            raise ConfigError(
                "the data shows images (data.images), but the model reads only text",
                "use a model that takes images (docs/vision.md), or omit the column with data.columns.images=none",
            )
        return Pictures(within(view, settings.max_tokens), settings)

    def plans(self, pictures: Sequence[Picture], where: str) -> list[Plan]:
        found = []
        for number, picture in enumerate(pictures):
            try:
                found.append(self.view.plan(*opened.size_of(picture, self.settings.max_pixels)))
            except (NoPicture, CannotPlan) as why:
                raise refused(where, number, picture, why) from None
        return found

    def written(self, text: str, plans: Sequence[Plan], where: str) -> str:
        """The text with each of the template's marks written out as its image's places."""
        parts = text.split(self.view.mark)
        if len(parts) - 1 != len(plans):
            raise DataError(
                f"{where}: the prompt has {len(parts) - 1} marks for images ({self.view.mark}) and {len(plans)} images",
                f"write {HERE} once for each image; the model's own mark cannot be written",
            )
        return self.partly(text, plans)

    def partly(self, text: str, plans: Sequence[Plan]) -> str:
        """The beginning of a conversation, with the marks that it has written out."""
        parts = text.split(self.view.mark)
        return parts[0] + "".join(self.view.written(plan) + part for plan, part in zip(plans, parts[1:]))

    def placed(self, text: str, plans: Sequence[Plan], where: str, clean: Callable[[str], str] = str) -> str:
        """A plain text with its images' places in it. `clean`: changes what is text."""
        parts = [clean(part) for part in _split(text, len(plans), where)]
        return parts[0] + "".join(self.view.written(plan) + part for plan, part in zip(plans, parts[1:]))

    def tiles(self, pictures: Sequence[Picture], tokens: Sequence[int], where: str, plans: Sequence[Plan]) -> Tiles:
        """The tiles of a prompt's images, where its tokens have places for them."""
        places = np.flatnonzero(np.asarray(tokens) == self.view.token)
        found: list[Tile] = []
        taken = 0
        for number, (picture, plan) in enumerate(zip(pictures, plans)):
            for pixels, count in zip(self._cut(picture, plan, number, where), plan.tokens):
                at = int(places[taken]) if taken < len(places) else len(tokens)
                found.append(Tile(pixels, at, count, number))
                taken += count
        if (wrong := misplaced(tokens, found, self.view)) is not None:
            raise DataError(f"{where}: {wrong}", "the model's own mark for images cannot be written in a prompt")
        return tuple(found)

    def _cut(self, picture: Picture, plan: Plan, number: int, where: str) -> list[Any]:
        try:
            image = opened.decoded(picture, self.settings.max_pixels)
        except NoPicture as why:
            raise refused(where, number, picture, why) from None
        made = self.view.cut(image, plan)
        return [np.full_like(pixels, GREY) for pixels in made] if self.settings.blank else made


def _split(text: str, images: int, where: str) -> list[str]:
    parts = text.split(HERE)
    if len(parts) == 1:
        return [""] * images + parts
    if len(parts) - 1 != images:
        raise DataError(
            f"{where}: the prompt says {HERE} {_times(len(parts) - 1)} and has {_times(images, 'image')}",
            f"write {HERE} once for each image, or not at all to show them first",
        )
    return parts


def _times(count: int, what: str = "time") -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


# Messages


def in_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Any]]:
    """Messages whose images are bare parts of kind `image`, and what these show, in their order."""
    found: list[Any] = []
    return [_without(message, found) for message in messages], found


def _without(message: Mapping[str, Any], found: list[Any]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in KINDS_OF_PARTS:
            shown = _in_part(part)
            found.extend([] if shown is None else [shown])
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _in_part(part: Mapping[str, Any]) -> Any:
    """What a part shows, whichever form it has; None where the row's own column has it."""
    value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in KINDS_OF_PARTS for part in parts)


def text_with_places(message: Mapping[str, Any]) -> str:
    """The text of a message, with `<image>` where it shows one."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    own = [part for part in content if isinstance(part, Mapping)]
    return "".join(HERE if part.get("type") in KINDS_OF_PARTS else str(part.get("text", "")) for part in own)


def with_parts(messages: Sequence[Mapping[str, Any]], images: int, where: str) -> list[Message]:
    """Messages in which every image is a part of its own: `<image>` in a text becomes one, and where nothing says where
    images stand, the first message of the user shows them."""
    made = [{**m, "content": _parts(m["content"]) if HERE in str(m["content"]) else m["content"]} for m in messages]
    marks = sum(1 for _ in _image_parts(made))
    if marks == 0 and images:
        first = next((i for i, m in enumerate(made) if m["role"] == "user"), 0)
        words = made[first]["content"]
        own = words if isinstance(words, list) else [{"type": "text", "text": str(words)}]
        made[first] = {**made[first], "content": [{"type": "image"}] * images + own}
    elif marks != images:
        raise DataError(
            f"{where}: the messages have places for {_times(marks, 'image')}, the row has {_times(images, 'image')}",
            f"give every image a part of kind image, or write {HERE} where it stands",
        )
    return made


def _image_parts(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from (p for p in message["content"] if isinstance(p, Mapping) and p.get("type") == "image")


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return [own for part in content for own in (_parts(part["text"]) if _is_text(part) else [part])]
    words = str(content).split(HERE)
    made: list[Any] = []
    for i, text in enumerate(words):
        made += [{"type": "image"}] if i else []
        made += [{"type": "text", "text": text}] if text else []
    return made


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


# Rows


def of_row(
    named: Mapping[str, Any], messages: Sequence[Any] | None, folder: Any
) -> tuple[tuple[Picture, ...], list[Any]]:
    """The images of a row, of its columns `images` or `image` and of its messages, and the messages without them."""
    column = named.get("images") if named.get("images") is not None else named.get("image")
    given = [] if column is None else list(column) if isinstance(column, (list, tuple)) else [column]
    bare, inside = in_messages(messages or [])
    if given and inside:
        raise NoPicture("is both in a column and in a message; give it once")
    return tuple(opened.as_picture(value, folder) for value in given or inside), bare


def check_rows(examples: Sequence[Example], settings: ImageSettings) -> None:
    """Refuse the first image that cannot be decoded."""
    for example in examples:
        for number, picture in enumerate(example.images):
            try:
                opened.check(picture, settings.max_pixels)
            except NoPicture as why:
                raise refused(example.where, number, picture, why) from None
