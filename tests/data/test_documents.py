"""Raw text to go on pre-training with: documents are cut to size, each token is learned once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_prompts import decoded, tokenizer
from tests.faults.test_resume import RECIPE

from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, FileRows, open_source
from tidemill.errors import DataError
from tidemill.flow.feed import PairFeed
from tidemill.recipe.config import Config, Data
from tidemill.run import start


def everything(path: Path, **settings: Any) -> list[Example]:
    source = open_source(Data(source=str(path), held_out=0, **settings), seed=0)[0]
    return [source.example(i) for i in range(source.size or 0)]


def feed(*texts: str, longest: int = 8, rows: int = 1, **settings: Any) -> PairFeed:
    config = Config(
        data=Data(max_prompt_tokens=longest - 2, shuffle=False, **settings),
        rollout={"max_new_tokens": 2},
        train={"prompts_per_step": rows},
    )
    examples = tuple(Example("", text=text, where=f"f:{i + 1}") for i, text in enumerate(texts))
    return PairFeed(FileRows("texts", examples), config, PromptTokens(tokenizer(), config.data))


def given(source: PairFeed) -> list[tuple[str, str]]:
    rows = source.rows()
    starts = rows.values("prompt_length").tolist()
    tokens = [rows["tokens"][i].tolist() for i in range(rows.rows)]
    assert all(rows["mask"][i].all() for i in range(rows.rows))
    return [(decoded(t[:s]), decoded(t[s:])) for t, s in zip(tokens, starts)]


def test_a_text_column_and_a_text_file_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one two", "url": "u"}) + "\n")
    (tmp_path / "b.txt").write_text("a whole\n\nfile")
    (found,) = everything(tmp_path / "a.jsonl")
    assert (found.text, found.prompt, found.meta) == ("one two", "", {"url": "u"})
    assert [e.text for e in everything(tmp_path / "b.txt")] == ["a whole\n\nfile"]


def test_a_column_called_text_is_still_a_column_for_a_template(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    (found,) = everything(tmp_path / "a.jsonl", template="say {text}")
    assert found.text is None and found.meta == {"text": "one"}


def test_texts_beside_data_files_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (tmp_path / "LICENSE.txt").write_text("free")
    assert [e.prompt for e in everything(tmp_path)] == ["1+1="]


def test_documents_are_held_out_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(6)))
    train, aside = open_source(Data(source=str(tmp_path / "a.jsonl"), held_out=2), seed=0)
    assert (train.size, aside.size) == (4, 2)


@pytest.mark.parametrize(("row", "said"), [({"text": 5}, "has a text that is a number"), ({"text": " "}, "empty text")])
def test_a_text_that_is_none_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{said}"):
        everything(tmp_path / "a.jsonl")


def test_every_token_of_a_long_document_but_its_first_is_learned_once() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    rows = given(feed(text, rows=4))
    assert all(len(prompt) == 1 and len(response) <= len("1234567[E]") for prompt, response in rows)
    assert rows[0][0] + "".join(response for _, response in rows) == text + "[E]"
    assert [prompt for prompt, _ in rows[1:]] == [response[-1] for _, response in rows[:-1]]


@pytest.mark.parametrize("length", [1, 6, 7, 8, 13, 14, 15])
def test_no_length_leaves_a_piece_without_anything_to_learn(length: int) -> None:
    pieces = PromptTokens(tokenizer(), Data()).encode_text(Example("", text="a" * length), 8)
    assert all(len(p) == 1 and 1 <= len(r) <= 7 for p, r, _ in pieces)
    assert sum(len(r) for _, r, _ in pieces) == length


def test_a_resumed_feed_goes_on_in_the_middle_of_a_document() -> None:
    texts = ("abcdefghijklmnopqrst", "0123456789", "xyz")
    plain = feed(*texts)
    expected = [given(plain) for _ in range(7)]
    for stopped in range(7):
        first = feed(*texts)
        for _ in range(stopped):
            first.rows()
        state = json.loads(json.dumps(first.state()))
        second = feed(*texts)
        second.restore(state)
        assert [given(second) for _ in range(7 - stopped)] == expected[stopped:]
        assert second.rows().values("id").tolist() == [7]


def test_a_document_is_no_prompt() -> None:
    with pytest.raises(DataError, match="f:1: the row is a document, not a prompt") as caught:
        PromptTokens(tokenizer(), Data()).encode(Example("", text="x", where="f:1"))
    assert "eval.size=0" in caught.value.remedy


def test_a_run_learns_from_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("1+2=3 " * 40)
    own = {
        **RECIPE,
        "folder": str(tmp_path),
        "algorithm": {"name": "sft"},
        "data": {"source": str(tmp_path / "text.txt"), "held_out": 0, "max_prompt_tokens": 24},
        "eval": {"size": 0},
        "train": {"steps": 12, "prompts_per_step": 4, "samples_per_prompt": 1},
        "learn": {"lr": 1e-2},
    }
    start.train(own)
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["nll"] for line in lines]
    assert losses[-1] < 0.6 * losses[0]
