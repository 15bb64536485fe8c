import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example
from tidemill.errors import ConfigError, DataError
from tidemill.recipe.config import Data

ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz<>|\n:?"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(ALPHABET)} | {"[E]": len(ALPHABET), "[U]": len(ALPHABET) + 1}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="[E]", unk_token="[U]")
    made.chat_template = CHAT if chat else None
    return made


def decoded(tokens: list[int]) -> str:
    return "".join((*ALPHABET, "[E]", "[U]")[t] for t in tokens)


def test_plain_prompts_are_encoded_as_they_are() -> None:
    tokens = PromptTokens(tokenizer(), Data()).encode(Example("7+5="))
    assert decoded(tokens) == "7+5="


def test_a_pair_ends_with_the_end_token() -> None:
    prompt, response = PromptTokens(tokenizer(), Data()).encode_pair(Example("7+5=", "12", "12"))
    assert (decoded(prompt), decoded(response)) == ("7+5=", "12[E]")


def test_an_empty_response_is_the_end_token_or_refused() -> None:
    made, example = tokenizer(), Example("7+5=", "12", "", where="file:3")
    assert decoded(PromptTokens(made, Data()).encode_pair(example)[1]) == "[E]"
    made.eos_token = None
    with pytest.raises(DataError, match="file:3: the response is empty"):
        PromptTokens(made, Data()).encode_pair(example)


def test_chat_models_get_system_and_user_messages() -> None:
    tokens = PromptTokens(tokenizer(chat=True), Data(system="be brief")).encode(Example("hi"))
    assert decoded(tokens) == "<system>be brief\n<user>hi\n<assistant>"


def test_a_row_of_messages_keeps_its_own_system_message() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    tokens = PromptTokens(tokenizer(chat=True), Data(system="be brief")).encode(Example(messages))
    assert decoded(tokens) == "<system>a\n<user>b\n<assistant>"


def test_the_template_is_filled_from_the_rows_columns() -> None:
    data = Data(template="{topic}: {prompt}?")
    assert decoded(PromptTokens(tokenizer(), data).encode(Example("a", meta={"topic": "x"}))) == "x: a?"


def test_a_template_column_that_is_not_there_shows_the_nearest() -> None:
    with pytest.raises(DataError, match=r"file:3: data.template names column 'topik'.*did you mean topic"):
        PromptTokens(tokenizer(), Data(template="{topik}")).encode(Example("a", meta={"topic": "x"}, where="file:3"))


@pytest.mark.parametrize("template", ["{", "{0}", "{a b}", "{x.y}"])
def test_a_broken_template_is_a_mistake_of_the_recipe(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template"):
        PromptTokens(tokenizer(), Data(template=template)).encode(Example("a"))


def test_a_long_prompt_names_its_row_and_both_lengths() -> None:
    with pytest.raises(DataError, match=r"f.jsonl:7: the prompt has 9 tokens.*max_prompt_tokens \(8\)"):
        PromptTokens(tokenizer(), Data(max_prompt_tokens=8)).encode(Example("1" * 9, where="f.jsonl:7"))


@pytest.mark.parametrize("chat", [False, True])
def test_an_empty_prompt_names_its_row(chat: bool) -> None:
    with pytest.raises(DataError, match=r"f.jsonl:7: the prompt is empty"):
        PromptTokens(tokenizer(chat), Data()).encode(Example("", where="f.jsonl:7"))


def test_messages_without_a_chat_template_are_refused_unless_chat_is_off() -> None:
    example = Example([{"role": "user", "content": "hi"}], where="f:1")
    with pytest.raises(DataError, match="no chat template"):
        PromptTokens(tokenizer(), Data()).encode(example)
    assert decoded(PromptTokens(tokenizer(), Data(chat="off")).encode(example)) == "hi"


def test_settings_that_need_a_chat_template_are_refused_without_one() -> None:
    for data in (Data(chat="on"), Data(system="x")):
        with pytest.raises(ConfigError, match="chat"):
            PromptTokens(tokenizer(), data)
