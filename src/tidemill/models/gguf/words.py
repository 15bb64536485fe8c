"""The tokenizer in a GGUF file: vocabulary, merges, special tokens and chat template, as transformers opens them.

Two kinds exist: byte-level BPE with merges ("gpt2", whose splitting of text is known only by a name in the file), and
SentencePiece's BPE ("llama", whose merges follow from the scores of its pieces).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tidemill.errors import ModelError, did_you_mean
from tidemill.models.gguf.file import Opened


class Kind(IntEnum):
    """What the file says of each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level tokenizer cuts text before merges."""

    pattern: str | None  # None: GPT-2's own
    has_lone_digits: bool = False  # before the pattern
    ignores_merges: bool = False  # a piece that is a word of its own is taken whole
    is_composed: bool = False  # text in Unicode's composed form (NFC) first
    begins: bool = False  # a begin token is put first where the file does not say


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _CASED_TAIL
GPT4O = f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?" + r"|\p{N}{1,3}" + _CASED_TAIL
SPLITS = {
    "gpt-2": Split(None),
    "smollm": Split(None, has_lone_digits=True),
    "llama-bpe": Split(LLAMA3, ignores_merges=True, begins=True),
    "qwen2": Split(QWEN2, is_composed=True),
    "tekken": Split(TEKKEN, ignores_merges=True, begins=True),
    "gpt-4o": Split(GPT4O),
}


def tokenizer_of(opened: Opened) -> Any:
    """Build a fast tokenizer of transformers, special tokens and chat template in place."""
    from transformers import PreTrainedTokenizerFast

    words = _words(opened)
    kind = opened.metadata.get("tokenizer.ggml.model")
    if kind not in BUILDERS:
        raise ModelError(
            f"{opened.path} has a tokenizer of the kind {kind!r}, which is not known",
            f"{' and '.join(BUILDERS)} are; --tokenizer FOLDER takes one from elsewhere",
        )
    backend = BUILDERS[kind](opened, words)
    _add_special(backend, words, _swallows_space(opened))
    _add_begin_and_end(opened, backend, words)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=int(opened.setting("context_length", 1 << 30)),
        **_roles(opened, words),
    )
    tokenizer.chat_template = opened.metadata.get("tokenizer.chat_template")
    return tokenizer


def end_ids(opened: Opened, tokenizer: Any) -> list[int]:
    """List the tokens at which generation stops: the file's end tokens, and the one that closes an assistant's turn in
    the chat template, which is often another."""
    ids = [_role_id(opened, role) for role in ("eos", "eot")]
    found = [i for i in ids if i is not None]
    closing = _closes_turn(tokenizer)
    return list(dict.fromkeys(found + ([closing] if closing is not None else [])))


# The two kinds


def _byte_level(opened: Opened, words: list[tuple[str, Kind]]) -> Tokenizer:
    split = _split(opened)
    merges = [tuple(merge.split(" ")) for merge in opened.metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {text: i for i, (text, kind) in enumerate(words) if kind is not Kind.UNUSED}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.ignores_merges))
    if split.is_composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.has_lone_digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(opened: Opened) -> Split:
    name = str(opened.metadata.get("tokenizer.ggml.pre", "none"))
    if name not in SPLITS:
        raise ModelError(
            f"{opened.path}: its tokenizer splits text by {name!r}, which is not known{did_you_mean(name, SPLITS)}",
            f"known: {', '.join(SPLITS)}; --tokenizer FOLDER takes the model's own from a Hugging Face folder",
        )
    return SPLITS[name]


def _sentence_pieces(opened: Opened, words: list[tuple[str, Kind]]) -> Tokenizer:
    vocabulary = {text: i for i, (text, kind) in enumerate(words) if kind is not Kind.UNUSED}
    unknown = next((text for text, kind in words if kind is Kind.UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocabulary, list(_merges(opened, words)), unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(words)
        )
    )
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if opened.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer, backend.decoder = spaces, decoders.Sequence(back)
    return backend


def _has_bytes(words: list[tuple[str, Kind]]) -> bool:
    return any(kind is Kind.BYTE for _, kind in words)


def _merges(opened: Opened, words: list[tuple[str, Kind]]) -> Iterator[tuple[str, str]]:
    """List every way to make a piece of two others, the best piece first; of equal ones the longer left part."""
    scores = opened.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(words):
        raise ModelError(f"{opened.path}: its tokenizer lacks scores", "--tokenizer FOLDER takes one from elsewhere")
    pieces = {text for text, kind in words if kind in (Kind.NORMAL, Kind.USER_DEFINED)}
    found = [
        (float(scores[i]), cut, text)
        for i, (text, _) in enumerate(words)
        if text in pieces
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    found.sort(key=lambda way: (way[0], way[1], len(way[2])), reverse=True)
    return ((text[:cut], text[cut:]) for _, cut, text in found)


BUILDERS = {"gpt2": _byte_level, "llama": _sentence_pieces}

# Special tokens


def _words(opened: Opened) -> list[tuple[str, Kind]]:
    texts = opened.metadata.get("tokenizer.ggml.tokens")
    if not texts:
        raise ModelError(f"{opened.path} has no tokenizer", "--tokenizer FOLDER takes one from a Hugging Face folder")
    kinds = opened.metadata.get("tokenizer.ggml.token_type") or [Kind.NORMAL] * len(texts)
    return [(text, Kind(kind)) for text, kind in zip(texts, kinds)]


def _add_special(backend: Tokenizer, words: list[tuple[str, Kind]], swallow_space: frozenset[str]) -> None:
    """Add what is found in text before anything is split, in the file's order, so that ids stay."""
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=kind is not Kind.USER_DEFINED, rstrip=text in swallow_space)
            for text, kind in words
            if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
        ]
    )


def _swallows_space(opened: Opened) -> frozenset[str]:
    """Name special tokens that take the white space behind them: Phi-3's do, which llama.cpp knows and no file says."""
    if opened.architecture != "phi3" or opened.metadata.get("tokenizer.ggml.model") != "llama":
        return frozenset()
    special = {text for text, kind in _words(opened) if kind is Kind.CONTROL}
    return frozenset(special - {"<unk>", "<s>", "<|endoftext|>"})


def _add_begin_and_end(opened: Opened, backend: Tokenizer, words: list[tuple[str, Kind]]) -> None:
    is_pieces = opened.metadata.get("tokenizer.ggml.model") == "llama"
    begins = opened.metadata.get("tokenizer.ggml.add_bos_token", is_pieces or _split(opened).begins)
    ends = opened.metadata.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = _role_id(opened, "bos") if begins else None, _role_id(opened, "eos") if ends else None
    named = [(words[i][0], i) for i in (bos, eos) if i is not None]
    if not named:
        return
    before, after = [words[bos][0]] if bos is not None else [], [words[eos][0]] if eos is not None else []
    own = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=named,
    )
    backend.post_processor = own


def _roles(opened: Opened, words: list[tuple[str, Kind]]) -> dict[str, str]:
    """Name begin, end, unknown and padding; padding is the end token where the file has none."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {key: words[i][0] for key, role in keys.items() if (i := _role_id(opened, role)) is not None}
    if "eos_token" not in found:
        raise ModelError(f"{opened.path} names no end token", "--tokenizer FOLDER takes a tokenizer from elsewhere")
    return {"pad_token": found["eos_token"]} | found


def _role_id(opened: Opened, role: str) -> int | None:
    found = opened.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return int(found) if found is not None and int(found) < len(opened.metadata["tokenizer.ggml.tokens"]) else None


def _closes_turn(tokenizer: Any) -> int | None:
    """Find the special token right behind an assistant's words. None where the template refuses two plain messages."""
    if not tokenizer.chat_template:
        return None
    said = "tide mill"
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates are programs of others; one that fails is met again, and explained, where it is used
        return None
    ids = tokenizer(text.rpartition(said)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids + _control_ids(tokenizer) else None


def _control_ids(tokenizer: Any) -> list[int]:
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def from_folder(folder: Path) -> Any:
    """Open a tokenizer from elsewhere, where the file's own cannot be used."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ModelError(f"--tokenizer {folder} cannot be opened: {error}", "give a Hugging Face folder") from error
