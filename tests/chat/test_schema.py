"""What a model is told of a Python function."""

from __future__ import annotations

from typing import Annotated, Literal

from tidemill.chat.schema import schema_of


def search(query: str, top: int = 3, kind: Literal["news", "papers"] = "news", tags: list[str] | None = None) -> str:
    """Find what is known of something.

    It looks in a local folder.

    Args:
        query (str): what to look for, in a few words
            that may go on
        top: how many to give

    Returns:
        text
    """
    return query


def sphinx(a: float, b: Annotated[bool, "whether to"]) -> None:
    """Do it.

    :param a: how much
    :returns: nothing
    """


def test_names_types_defaults_and_words_come_from_the_function() -> None:
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find what is known of something. It looks in a local folder.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in a few words that may go on"},
                    "top": {"type": "integer", "description": "how many to give", "default": 3},
                    "kind": {"enum": ["news", "papers"], "type": "string", "default": "news"},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["query"],
            },
        },
    }  # fmt: skip


def test_sphinx_words_and_annotations_are_read_too() -> None:
    function = schema_of(sphinx, "other")["function"]
    assert function["name"] == "other" and function["description"] == "Do it."
    assert function["parameters"]["properties"] == {
        "a": {"type": "number", "description": "how much"},
        "b": {"type": "boolean", "description": "whether to"},
    }


def test_a_function_without_types_is_told_by_its_names() -> None:
    assert schema_of(lambda x, *rest, **more: x, "f")["function"]["parameters"] == {
        "type": "object",
        "properties": {"x": {}},
        "required": ["x"],
    }
