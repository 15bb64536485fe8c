import json

import pytest

from tidemill.data.source import open_source
from tidemill.errors import ConfigError, DataError
from tidemill.recipe.config import Data


def jsonl(path, rows) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def rows(n: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "topic": "sum"} for i in range(n)]


def everything(source) -> list:
    return [source.example(i) for i in range(source.size)]


def all_of(path: str, **settings) -> list:
    return everything(open_source(Data(source=path, held_out=0, **settings), seed=0)[0])


def test_jsonl_rows_become_examples_with_their_line(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(3))
    first, *_, last = all_of(path)
    assert (first.prompt, first.answer, first.meta) == ("0+1=", "1", {"topic": "sum"})
    assert last.where == f"{path}:3"


def test_every_format_gives_the_same_examples(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet

    made = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    jsonl(tmp_path / "a.jsonl", made)
    (tmp_path / "a.json").write_text(json.dumps(made))
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in made))
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n" + "".join(f"{r['prompt']}\t{r['answer']}\n" for r in made))
    pa.parquet.write_table(pa.Table.from_pylist(made), tmp_path / "a.parquet")
    datasets.Dataset.from_list(made).save_to_disk(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(made), "test": datasets.Dataset.from_list(made[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("a dataset")
    pa.parquet.write_table(pa.Table.from_pylist(made[:2]), tmp_path / "hub/data/train-00000-of-00002.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(made[2:]), tmp_path / "hub/data/train-00001-of-00002.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(made[:1]), tmp_path / "hub/data/test-00000-of-00001.parquet")

    names = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "saved", "splits", "hub"]
    for name in names:
        got = [(e.prompt, e.answer) for e in all_of(str(tmp_path / name))]
        assert got == [(r["prompt"], r["answer"]) for r in made], name
    train, held_out = open_source(Data(source=str(tmp_path / "hub"), eval_split="test"), seed=0)
    assert [e.prompt for e in everything(held_out)] == ["0+1="]
    assert [e.prompt for e in everything(train)] == ["1+1=", "2+1=", "3+1=", "4+1="]


def test_columns_are_renamed_and_the_answer_is_cut_out(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "2+2?", "solution": "two and two\n#### 4"}])
    data = {"columns": {"prompt": "question", "answer": "solution"}, "answer_pattern": r"####\s*(\S+)"}
    (example,) = all_of(path, **data)
    assert (example.prompt, example.answer) == ("2+2?", "4")


def test_messages_that_end_with_the_assistant_give_its_words_as_the_response(tmp_path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (example,) = all_of(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]))
    assert (example.prompt, example.response) == (messages[:1], "hello")


def test_held_out_rows_are_kept_apart_even_when_prompts_repeat(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [r for r in rows(20) for _ in range(3)])
    train, held_out = open_source(Data(source=path, held_out=6), seed=1)
    assert {e.prompt for e in everything(train)}.isdisjoint(e.prompt for e in everything(held_out))
    assert train.size + held_out.size == 60 and held_out.size == 6
    again = open_source(Data(source=path, held_out=6), seed=1)[1]
    other = open_source(Data(source=path, held_out=6), seed=2)[1]
    assert everything(held_out) == everything(again) != everything(other)


BAD_LINES = {
    '{"prompt": "a"': "is not JSON",
    "[1, 2]": "is a list, not an object",
    '{"answer": "4"}': "there is no column 'prompt'",
    '{"prompt": null}': "has no prompt",
    '{"prompt": "  "}': "has an empty prompt",
    '{"prompt": 5}': "has a prompt that is a number",
    '{"prompt": []}': "has an empty list of messages",
    '{"prompt": [{"role": "user"}]}': "has a message without role and content",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_row_is_reported_with_file_and_line(tmp_path, line) -> None:
    path = jsonl(tmp_path / "a.jsonl", [rows(1)[0], line, rows(2)[1]])
    with pytest.raises(DataError) as error:
        all_of(path)
    assert f"{path}:2: {BAD_LINES[line]}" in str(error.value)


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl(path, [*BAD_LINES, *rows(2)])
    with path.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    train, _ = open_source(Data(source=str(path), held_out=0, on_bad_row="skip"), seed=0)
    assert (train.size, train.bad_rows) == (2, len(BAD_LINES) + 1)


def test_csv_rows_with_the_wrong_number_of_fields_are_bad(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"two\nlines",1\na,b,c\nd,2\n')
    with pytest.raises(DataError, match=r"a\.csv:4: has 3 fields where the header has 2"):
        all_of(str(path))
    assert [e.prompt for e in all_of(str(path), on_bad_row="skip")] == ["two\nlines", "d"]


def test_a_missing_file_shows_the_nearest_name(tmp_path) -> None:
    jsonl(tmp_path / "train.jsonl", rows(1))
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl"):
        all_of(str(tmp_path / "tran.jsonl"))
    with pytest.raises(DataError, match="did you mean chain"):
        all_of("chian")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.json"])
def test_an_empty_file_says_so(tmp_path, name) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty"):
        all_of(str(tmp_path / name))


def test_a_file_of_blank_lines_and_a_header_alone_are_empty(tmp_path) -> None:
    for name, text in (("a.jsonl", "\n\n"), ("a.csv", "prompt,answer\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="has no rows"):
            all_of(str(tmp_path / name))


def test_a_file_cut_short_says_what_it_is_not(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    for name, kind in (("a.parquet", "Parquet"), ("a.arrow", "Arrow")):
        (tmp_path / name).write_bytes(b"PAR1 and then nothing")
        with pytest.raises(DataError, match=f"cannot be read as {kind}"):
            all_of(str(tmp_path / name))
    (tmp_path / "a.json").write_text('[{"prompt": "a"},')
    with pytest.raises(DataError, match="is not JSON"):
        all_of(str(tmp_path / "a.json"))


def test_all_rows_bad_names_the_first(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["x", "y"])
    with pytest.raises(DataError, match=r"no usable row: .*a\.jsonl:1: is not JSON"):
        all_of(path, on_bad_row="skip")


def test_a_column_that_is_not_there_shows_the_nearest(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="did you mean question"):
        all_of(path, columns={"prompt": "qestion"})
    with pytest.raises(DataError, match=r"(?s)no column 'prompt'.*data.columns.prompt"):
        all_of(path)
    with pytest.raises(DataError, match=r"data\.template names column 'questin'.*did you mean question"):
        all_of(path, template="{questin}")


def test_a_split_that_is_not_there_shows_the_others(tmp_path) -> None:
    for split in ("train", "test"):
        jsonl(tmp_path / f"{split}.jsonl", rows(2))
    with pytest.raises(DataError, match="did you mean test"):
        all_of(str(tmp_path), split="tset")


def test_a_folder_without_data_and_an_unknown_ending_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="has no data file"):
        all_of(str(tmp_path))
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"\.xlsx cannot be read"):
        all_of(str(tmp_path / "a.xlsx"))


def test_holding_out_everything_is_refused(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(5))
    with pytest.raises(DataError, match="none is left to train on"):
        open_source(Data(source=path, held_out=200), seed=0)


def test_an_answer_pattern_without_a_group_is_refused(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(2))
    for pattern in ("####", "("):
        with pytest.raises(ConfigError, match="answer_pattern"):
            all_of(path, answer_pattern=pattern)
