"""Chat formats: how each family of models writes calls of tools. One file a family; `detect` finds a template's own."""

from __future__ import annotations

from tidemill.chat.formats.api import Format
from tidemill.chat.formats.deepseek import DeepSeek
from tidemill.chat.formats.gemma import Gemma
from tidemill.chat.formats.harmony import Harmony
from tidemill.chat.formats.hermes import Hermes
from tidemill.chat.formats.llama import Llama
from tidemill.chat.formats.mistral import Mistral
from tidemill.chat.formats.xml import Xml
from tidemill.errors import ConfigError, did_you_mean

# In the order in which they are asked whether a template is theirs: the more particular ones first.
FORMATS: dict[str, Format] = {
    made.name: made for made in (Harmony(), DeepSeek(), Mistral(), Xml(), Gemma(), Llama(), Hermes())
}


def detect(template: str) -> Format:
    """The format that a chat template writes calls in; Hermes, the most common one, where it writes none."""
    return next((each for each in FORMATS.values() if each.is_of(template)), FORMATS["hermes"])


def named(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(
            f"there is no tool format {name!r}{did_you_mean(name, FORMATS)}", f"there are {', '.join(FORMATS)}"
        )
    return FORMATS[name]
