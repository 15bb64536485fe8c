"""Conversations in the forms people have them; supervised training on every turn that an assistant spoke."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.test_prompts import decoded, tokenizer

from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, FileRows, open_source
from tidemill.errors import DataError
from tidemill.flow.feed import PairFeed
from tidemill.recipe.config import Config, Data

CLOSED = (  # each turn ends with the end token, then a line end that nobody said
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}[E]\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}[E]"
    "{% endgeneration %}{% else %}{{ m.content }}[E]{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (  # as templates that leave earlier thoughts out
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}[E]\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
SHAREGPT = [
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
]


def read(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> list[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(Data(source=str(path), held_out=0, **settings), seed=0)[0]
    return [source.example(i) for i in range(source.size or 0)]


def teacher(template: str = CLOSED, **settings: Any) -> PromptTokens:
    own = tokenizer(chat=True)
    own.chat_template = template
    return PromptTokens(own, Data(learn_turns="all", **settings))


def learned(encode: PromptTokens, example: Example) -> tuple[str, list[str]]:
    """The whole text, and the stretches of it that are learned."""
    prompt, response, mask = encode.encode_taught(example)
    assert len(mask) == len(response) and mask[0]
    marks = [False] * len(prompt) + mask
    text = [decoded([token]) for token in [*prompt, *response]]
    runs: list[str] = []
    for i, (letter, is_learned) in enumerate(zip(text, marks)):
        if is_learned:
            runs = [*runs, letter] if i == 0 or not marks[i - 1] else [*runs[:-1], runs[-1] + letter]
    return "".join(text), runs


# Forms


@pytest.mark.parametrize("column", ["conversations", "conversation"])
def test_sharegpt_turns_become_messages_by_themselves(tmp_path: Path, column: str) -> None:
    (example,) = read(tmp_path, {column: SHAREGPT, "id": 7})
    assert example.prompt == TURNS[:3] and example.response == "2" and example.messages == TURNS
    assert example.meta == {"id": 7}


def test_sharegpts_system_column_and_tools_are_part_of_the_conversation(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "b"},
        {"from": "gpt", "value": "c"},
    ]
    (example,) = read(tmp_path, {"system": "s", "conversations": turns})
    assert [m["role"] for m in example.messages or ()] == ["system", "user", "assistant", "tool", "assistant"]


def test_openais_parts_and_calls_are_understood(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it?"}]
    call = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]
    rows = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "4", "tool_call_id": "a", "name": None},
        {"role": "assistant", "content": "4"},
    ]
    (example,) = read(tmp_path, {"messages": rows})
    assert example.messages is not None
    assert example.messages[0]["content"] == "what is it?"
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": call}
    assert "name" not in example.messages[2], "null is what a columnar file has in place of nothing"


def test_a_rows_tools_reach_the_template() -> None:
    own = tokenizer(chat=True)
    own.chat_template = "{% for t in tools %}<{{ t.name }}>{% endfor %}{{ messages[0].content }}"
    for tools in ([{"name": "look"}], json.dumps([{"name": "look"}])):
        tokens = PromptTokens(own, Data()).encode(Example(TURNS[:1], meta={"tools": tools}))
        assert decoded(tokens) == "<look>hi"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "martian", "value": "x"}]}, "has a message from 'martian'; it can be system, "),
        ({"conversations": [{"value": "x"}]}, "has a message without role and content"),
        ({"conversations": []}, "has an empty list of messages"),
        ({"messages": ["x"]}, "has a message without role and content"),
        ({"messages": [{"role": "user"}]}, "has a message without role and content"),
    ],
)
def test_a_broken_conversation_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:1: {said}"):
        read(tmp_path, row)


def test_a_column_that_changes_its_type_half_way_is_named_with_its_line(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": 17}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: has a prompt that is a number"):
        read(tmp_path, *rows)
    assert len(read(tmp_path, *rows, on_bad_row="skip")) == 1


# What is learned


@pytest.mark.parametrize("template", [CLOSED, MARKED], ids=["by turns", "by the template"])
def test_every_turn_of_the_assistant_is_learned_with_its_end_and_nothing_else(template: str) -> None:
    text, runs = learned(teacher(template), Example(TURNS[:3], response="2", messages=TURNS))
    assert text == "<user>hi[E]\n<assistant>hello[E]\n<user>1+1?[E]\n<assistant>2[E]\n"
    assert runs == ["hello[E]", "2[E]"]


def test_a_conversation_that_ends_with_the_user_still_teaches_the_turns_before() -> None:
    assert learned(teacher(), Example(TURNS[:3], messages=TURNS[:3]))[1] == ["hello[E]"]


def test_a_template_that_closes_no_turn_gets_an_end_behind_the_last() -> None:
    open_ended = CLOSED.replace("[E]\n", "")
    text, runs = learned(teacher(open_ended), Example(TURNS[:3], messages=TURNS))
    assert text.endswith("<assistant>2[E]") and runs == ["hello", "2[E]"]


def test_the_system_message_of_the_recipe_goes_first() -> None:
    text, runs = learned(teacher(system="be brief"), Example(TURNS[:3], messages=TURNS))
    assert text.startswith("<system>be brief[E]\n<user>hi") and runs == ["hello[E]", "2[E]"]


def test_by_default_the_last_turn_alone_is_learned() -> None:
    own = tokenizer(chat=True)
    own.chat_template = CLOSED
    example = Example(TURNS[:3], response="2", messages=TURNS)
    prompt, response, mask = PromptTokens(own, Data()).encode_taught(example)
    assert decoded(prompt).endswith("1+1?[E]\n<assistant>") and decoded(response) == "2[E]" and all(mask)


def test_rows_for_the_learner_carry_the_mask() -> None:
    config = Config(data=Data(learn_turns="all", shuffle=False), train={"prompts_per_step": 2})
    examples = (Example(TURNS[:3], messages=TURNS), Example(TURNS[:1], messages=TURNS[:2]))
    rows = PairFeed(FileRows("two", examples), config, teacher()).rows()
    for i, expected in enumerate((["hello[E]", "2[E]"], ["hello[E]"])):
        start = int(rows.values("prompt_length")[i])
        response, mask = rows["tokens"][i][start:], np.asarray(rows["mask"][i])
        assert len(mask) == len(response)
        assert decoded(response[mask != 0].tolist()) == "".join(expected)


# What cannot be learned


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(DataError, match="f:3: the chat template renders earlier turns differently") as caught:
        teacher(FORGETFUL).encode_taught(Example(TURNS[:3], messages=TURNS, where="f:3"))
    assert "data.learn_turns=last" in caught.value.remedy


def test_a_conversation_without_an_assistants_turn_is_named() -> None:
    with pytest.raises(DataError, match="f:3: the conversation has no assistant's turn"):
        teacher().encode_taught(Example(TURNS[:1], messages=TURNS[:1], where="f:3"))


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_chat_template_that_raises_names_the_row_and_what_it_said(turns: Any) -> None:
    own = tokenizer(chat=True)
    own.chat_template = "{{ raise_exception('roles must alternate') }}"
    encode = PromptTokens(own, Data(learn_turns=turns))
    with pytest.raises(DataError, match=r"f:3: the chat template refuses .*: roles must alternate") as caught:
        encode.encode_taught(Example(TURNS[:3], response="2", messages=TURNS, where="f:3"))
    assert "data.on_bad_row=skip" in caught.value.remedy


def test_bad_conversations_are_skipped_and_counted_where_the_recipe_says_so() -> None:
    config = Config(data=Data(learn_turns="all", shuffle=False, on_bad_row="skip"), train={"prompts_per_step": 1})
    examples = (Example(TURNS[:1], messages=TURNS[:1], where="f:1"), Example(TURNS[:1], messages=TURNS[:2]))
    feed = PairFeed(FileRows("two", examples), config, teacher())
    assert feed.rows().rows == 1 and len(feed.bad_rows) == 1 and "f:1" in feed.bad_rows[0]
