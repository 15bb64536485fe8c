"""Settings of the images that prompts show."""

from __future__ import annotations

from pydantic import Field

from tidemill.recipe.section import Section


class ImageSettings(Section):
    max_tokens: int | None = Field(
        None, ge=1, description="most tokens of one image, which is made smaller to fit; none: the model's own limit"
    )
    max_pixels: int = Field(
        1 << 26, ge=1, le=1 << 30, description="an image with more is a bad row; its file is not decoded"
    )
    blank: bool = Field(False, description="show every image as plain grey, to see how much the model really looks")
