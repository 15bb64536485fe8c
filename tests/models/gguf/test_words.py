"""A tokenizer that came through a GGUF file gives the tokens, the text and the conversations of the original."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.models.gguf.sentences import PLAIN, SENTENCES
from tests.models.gguf.test_import import made
from tests.models.gguf.written import bytes_tokenizer, write
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from tidemill.errors import ModelError
from tidemill.models.gguf.convert import import_file

pytest.importorskip("gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As the models' own tokenizer.json files have them, written again here and not taken from the code under test.
CUTS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "gpt-4o": [
        pre_tokenizers.Split(
            Regex(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "tekken": [
        pre_tokenizers.Split(
            Regex(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
                r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def texts() -> list[str]:
    return [text for several in PLAIN.values() for text in several] * 2


def learnt(cut: str) -> Tokenizer:
    """A byte-level tokenizer with merges of its own, that cuts text as one of the published ones does."""
    backend = Tokenizer(models.BPE(ignore_merges=cut in ("llama-bpe", "tekken")))
    backend.pre_tokenizer = pre_tokenizers.Sequence(CUTS[cut])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    return backend


def merges_of(backend: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def in_file(backend: Tokenizer, cut: str, more: Callable[[Any], None] = lambda writer: None) -> Any:
    words = sorted(backend.get_vocab().items(), key=lambda pair: pair[1])

    def add(writer: Any, vocabulary: int) -> None:
        tokens = [text for text, _ in words]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if text in SPECIAL else 1 for text in tokens])
        writer.add_token_merges([" ".join(merge) for merge in merges_of(backend)])
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_bos_token_id(tokens.index("<|im_start|>"))
        writer.add_add_bos_token(False)
        more(writer)

    return add


def imported(tmp_path: Path, tokenizer: Any, architecture: str = "llama", vocabulary: int = 900) -> Any:
    model = made("phi3" if architecture == "phi3" else "llama", vocab_size=vocabulary, num_hidden_layers=1)
    import_file(write(tmp_path / "m.gguf", architecture, model, tokenizer=tokenizer), tmp_path / "folder")
    return AutoTokenizer.from_pretrained(tmp_path / "folder")


def test_there_are_two_hundred_strings_in_ten_languages() -> None:
    assert len(SENTENCES) == len(set(SENTENCES)) == 200 and len(PLAIN) == 10


@pytest.mark.parametrize("cut", CUTS)
def test_byte_level_tokens_and_texts_are_those_of_the_original(tmp_path: Path, cut: str) -> None:
    original = learnt(cut)
    found = imported(tmp_path, in_file(original, cut))
    for text in SENTENCES:
        ids = original.encode(text).ids
        assert found(text)["input_ids"] == ids, text
        assert found.decode(ids) == text


def test_qwens_tokens_are_those_of_transformers_own_class(tmp_path: Path) -> None:
    learner = learnt("llama-bpe")
    original = Qwen2Tokenizer(learner.get_vocab(), merges_of(learner))
    found = imported(tmp_path, in_file(learner, "qwen2"))
    for text in SENTENCES:
        ids = original(text)["input_ids"]
        assert found(text)["input_ids"] == ids, text
        assert found.decode(ids) == unicodedata.normalize("NFC", text)


# SentencePiece

ONLY_BYTES = "₽ㅋ³"  # letters that the vocabulary lacks
PIECES_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


def pieces() -> dict[str, float]:
    """Pieces and scores as SentencePiece's BPE learns them: minus the number of the merge; letters come last."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learner.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=900, show_progress=False))
    joined = dict.fromkeys("".join(merge) for merge in merges_of(learner))
    letters = sorted(text for text in learner.get_vocab() if len(text) == 1)
    known = [text for text in [*joined, *letters] if not set(text) & set(ONLY_BYTES)]
    return {text: -float(i) for i, text in enumerate(known)}


def by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own way: join the neighbours whose piece has the best score, the leftmost first."""
    parts = list(text.replace(" ", "▁"))
    while True:
        ways = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not ways:
            return [piece for part in parts for piece in ([part] if part in scores else as_bytes(part))]
        at = -max(ways)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def as_bytes(letter: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in letter.encode()]


def pieces_in_file(scores: dict[str, float], has_prefix: bool, begins: bool) -> tuple[Any, list[str]]:
    tokens = [*PIECES_SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *scores]

    def add(writer: Any, vocabulary: int) -> None:
        assert len(tokens) == vocabulary
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * (4 + 256) + list(scores.values()))
        writer.add_token_types([2, 3, 3, 3] + [6] * 256 + [1] * len(scores))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(begins)
        writer.add_add_space_prefix(has_prefix)

    return add, tokens


@pytest.mark.parametrize("has_prefix", [True, False], ids=["llama", "gemma"])
def test_sentence_pieces_are_joined_by_their_scores(tmp_path: Path, has_prefix: bool) -> None:
    scores = pieces()
    add, tokens = pieces_in_file(scores, has_prefix, begins=False)
    found = imported(tmp_path, add, vocabulary=len(tokens))
    for text in SENTENCES:
        expected = by_score(" " + text if has_prefix else text, scores)
        assert found.convert_ids_to_tokens(found(text)["input_ids"]) == expected, text
        assert found.decode(found(text)["input_ids"]) == text


def test_a_begin_token_goes_first_where_the_file_says_so(tmp_path: Path) -> None:
    add, tokens = pieces_in_file(pieces(), True, begins=True)
    found = imported(tmp_path, add, vocabulary=len(tokens))
    assert found("tide")["input_ids"][0] == found.bos_token_id == 1
    assert found("tide", add_special_tokens=False)["input_ids"][0] != 1
    assert (found.unk_token, found.eos_token, found.pad_token) == ("<unk>", "</s>", "</s>")


def test_phi_3s_special_tokens_take_the_space_behind_them(tmp_path: Path) -> None:
    add, tokens = pieces_in_file(pieces(), True, begins=False)
    found = imported(tmp_path, add, "phi3", vocabulary=len(tokens))
    assert found("<|user|>\n\ntide")["input_ids"] == found("<|user|>tide")["input_ids"]


# Special tokens and chat


def test_special_tokens_and_the_chat_template_are_those_of_the_file(tmp_path: Path) -> None:
    original = learnt("smollm")
    found = imported(tmp_path, in_file(original, "smollm", lambda writer: writer.add_chat_template(CHATML)))
    assert (found.eos_token, found.bos_token, found.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")
    assert len(found) == 900 and found.model_max_length == 256
    messages = [{"role": "user", "content": "Hi <|im_end|> 12"}]
    text = found.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi <|im_end|> 12<|im_end|>\n<|im_start|>assistant\n"
    ids = found.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    original.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    assert ids == original.encode(text).ids
    assert found.decode(ids, skip_special_tokens=True) == "user\nHi  12\nassistant\n"


def test_generation_stops_where_the_template_closes_a_turn_even_if_the_files_end_token_is_another(
    tmp_path: Path,
) -> None:
    import json

    def of_base(writer: Any) -> None:  # as files have it whose end token is that of the base model
        writer.add_chat_template(CHATML)

    original = learnt("gpt-2")
    words = sorted(original.get_vocab(), key=original.get_vocab().get)

    def add(writer: Any, vocabulary: int) -> None:
        in_file(original, "gpt-2", of_base)(writer, vocabulary)
        writer.kv_data[-1]["tokenizer.ggml.eos_token_id"].value = words.index("<|endoftext|>")

    imported(tmp_path, add)
    stops = json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [words.index("<|endoftext|>"), words.index("<|im_end|>")]


def test_a_chat_template_that_raises_does_not_keep_a_model_from_being_imported(tmp_path: Path) -> None:
    template = "{{ raise_exception('only for tools') }}"
    found = imported(tmp_path, in_file(learnt("gpt-2"), "gpt-2", lambda writer: writer.add_chat_template(template)))
    assert found.chat_template == template


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda writer: writer.add_tokenizer_pre("mystery"), "splits text by 'mystery', which is not known"),
        (lambda writer: writer.add_tokenizer_model("wordpiece"), "a tokenizer of the kind 'wordpiece'"),
        (lambda writer: writer.kv_data[-1].pop("tokenizer.ggml.tokens"), "has no tokenizer"),
        (lambda writer: writer.kv_data[-1].pop("tokenizer.ggml.eos_token_id"), "names no end token"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused_and_another_can_be_given(
    tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    def add(writer: Any, vocabulary: int) -> None:
        bytes_tokenizer(writer, vocabulary)
        for key in ("tokenizer.ggml.pre", "tokenizer.ggml.model"):
            if "mystery" in said or "wordpiece" in said:
                writer.kv_data[-1].pop(key, None)
        change(writer)
        if "mystery" in said:
            writer.add_tokenizer_model("gpt2")

    path = write(tmp_path / "m.gguf", "llama", made("llama"), tokenizer=add)
    with pytest.raises(ModelError, match=said) as caught:
        import_file(path, tmp_path / "folder")
    assert "--tokenizer" in caught.value.remedy
