"""A conversation that goes on by its own tokens reads as the chat template would have written it."""

from __future__ import annotations

import random

import pytest

from tests.chat.made import ENDS, TEMPLATES, tokenizer
from tidemill.chat.template import Chat, TemplateError

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = [{"role": "user", "content": "what is one and one?"}]
# What the model writes to call, in each family's form.
CALLED = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "harmony": '<|channel|>commentary to=functions.add<|message|>{"a": 1}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
}


def end_of(family: str, called: bool = False) -> str:
    return {"harmony": "<|call|>" if called else "<|end|>"}.get(family, ENDS[family])


@pytest.mark.parametrize("family", [f for f in TEMPLATES if f != "qwen3"])
def test_words_go_on_as_the_template_writes_them(family: str) -> None:
    chat = Chat(tokenizer(family))
    own = {"harmony": "<|channel|>final<|message|>"}.get(family, "")
    said = {"role": "assistant", "content": "two"}
    new = [{"role": "user", "content": "sure?"}]
    prompt, spoken = chat.prompt(ASKED), chat.encode(f"{own}two{end_of(family)}")
    follow = chat.follow(said, new, None, has_ended=True)
    assert follow is not None
    assert chat.tokenizer.decode([*prompt, *spoken, *follow]) == chat.render([*ASKED, said, *new], None, asks=True)
    assert [*prompt, *spoken, *follow] == chat.prompt([*ASKED, said, *new])


@pytest.mark.parametrize("family", CALLED)
def test_a_tools_result_goes_on_as_the_template_writes_it(family: str) -> None:
    chat = Chat(tokenizer(family))
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    new = [{"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"}]
    prompt = chat.prompt(ASKED, [TOOL])
    spoken = chat.encode(CALLED[family] + end_of(family, called=True))
    follow = chat.follow(said, new, [TOOL], has_ended=True)
    assert follow is not None
    text = str(chat.tokenizer.decode([*prompt, *spoken, *follow], skip_special_tokens=False))
    whole = chat.render([*ASKED, said, *new], [TOOL], asks=True)
    assert text.replace(" ", "").replace("\n", "") == whole.replace(" ", "").replace("\n", "")
    assert chat.tokenizer.decode(follow, skip_special_tokens=False) in whole


def test_a_message_that_was_cut_is_closed_for_the_model() -> None:
    chat = Chat(tokenizer("qwen"))
    said, new = {"role": "assistant", "content": "two"}, [{"role": "user", "content": "sure?"}]
    cut, ended = (chat.follow(said, new, None, has_ended=e) for e in (False, True))
    assert cut == [chat.tokenizer.eos_token_id, *ended]


def test_several_results_share_one_message_where_the_template_joins_them() -> None:
    chat = Chat(tokenizer("qwen"))
    said = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    new = [{"role": "tool", "content": text} for text in ("2", "3")]
    text = chat.tokenizer.decode(chat.follow(said, new, [TOOL], has_ended=True))
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2


def test_thoughts_that_a_template_leaves_out_later_stay_where_they_were_sampled() -> None:
    chat = Chat(tokenizer("qwen3"))
    said = {"role": "assistant", "content": "two", "reasoning_content": "one and one"}
    follow = chat.follow(said, [{"role": "user", "content": "sure?"}], None, has_ended=True)
    assert follow is None or "<think>" not in chat.tokenizer.decode(follow)


def test_a_template_that_refuses_says_why() -> None:
    chat = Chat(tokenizer("gemma"))
    with pytest.raises(TemplateError, match="no such role"):
        chat.prompt([{"role": "system", "content": "be brief"}, *ASKED])


def test_a_template_that_leaves_tools_out_has_them_told_in_words() -> None:
    chat = Chat(tokenizer("gemma"))
    assert not chat.takes_tools([TOOL]) and Chat(tokenizer("qwen")).takes_tools([TOOL])
    text = chat.tokenizer.decode(chat.prompt(ASKED, [TOOL]))
    assert '"name": "add"' in text and "tool_code" in text and "what is one and one?" in text


def test_nobody_but_the_template_writes_special_tokens() -> None:
    chat, rng = Chat(tokenizer("qwen")), random.Random(5)
    print("seed 5")
    words = [*chat.specials.values(), "a", " ", "\n", "<|im_", "end|>", "<", "|>"]
    for _ in range(50):
        text = "".join(rng.choices(words, k=8))
        prompt = chat.prompt([{"role": "user", "content": text}])
        plain = chat.prompt([{"role": "user", "content": ""}])
        assert [t for t in prompt if t in chat.specials] == [t for t in plain if t in chat.specials], text


def test_special_tokens_of_a_call_are_seen_and_others_are_not() -> None:
    chat = Chat(tokenizer("qwen", "<tool_call>", "</tool_call>"))
    tokens = chat.encode(CALLED["qwen"] + "<|im_end|>")
    assert chat.text(tokens) == CALLED["qwen"]
    assert [call.name for call in chat.read(tokens).calls] == ["add"]
