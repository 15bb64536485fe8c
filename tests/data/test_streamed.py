"""Data larger than memory: the rows are those of the same file read whole, each once a pass, and nothing grows."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.test_readers import everything, jsonl, rows

from tidemill.data import readers
from tidemill.data.source import Order, PassedOver, open_source
from tidemill.data.streamed import rows as streamed
from tidemill.data.streamed.shuffled import scattered
from tidemill.data.streamed.stores import PIECE, line_ends
from tidemill.errors import ConfigError, DataError
from tidemill.flow.feed import Feed
from tidemill.models.box import find, hub
from tidemill.recipe.config import Config, Data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))


def opened(path, seed: int = 0, **settings):
    return open_source(Data(source=str(path), **{"held_out": 0, "stream": True, **settings}), seed)


def write(path: Path, made: list[dict]) -> str:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pylist(made)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        jsonl(path, made)
    return str(path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000, 4097])
def test_a_computed_order_is_a_permutation(size: int) -> None:
    for key in [(0, 0), (0, 1), (7, 0)]:
        assert sorted(scattered(i, size, *key) for i in range(size)) == list(range(size))
    if size > 60:
        one, other = ([scattered(i, size, 0, turn) for i in range(size)] for turn in (0, 1))
        assert one != other and one != list(range(size))
        assert sum(abs(a - b) for a, b in itertools.pairwise(one)) / size > size / 5, "neighbours stay neighbours"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_streamed_rows_are_those_of_the_file_read_whole(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", rows(50))
    whole, _ = open_source(Data(source=path, held_out=0, stream=False), 0)
    source, _ = opened(path)
    assert isinstance(source, streamed.StreamedRows) and everything(source) == everything(whole)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_every_row_of_several_files_comes_once_a_pass(tmp_path: Path, suffix: str) -> None:
    for part in range(3):
        write(tmp_path / f"train-{part}{suffix}", rows(60)[part * 20 : part * 20 + 20 - part])
    source, _ = opened(tmp_path)
    passes = [[Order(source, 5)(p) for p in range(n * 57, n * 57 + 57)] for n in range(3)]
    assert all(sorted(one) == list(range(57)) for one in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] == [Order(source, 5)(p) for p in range(57)]


def test_lines_are_found_at_the_borders_of_pieces_and_without_a_last_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": "x" * (PIECE - 16)}).encode()
    assert len(line) == PIECE - 2
    path.write_bytes(line + b"\r\n" + b'{"prompt": "b"}\n\n   \n{"prompt": "c"}')
    source, _ = opened(path)
    assert source.size == 5 and source.example(1).prompt == "b" and source.example(4).prompt == "c"
    assert source.example(4).where == f"{path}:5"
    for blank in (2, 3):
        with pytest.raises(PassedOver):
            source.example(blank)


def test_a_changed_file_is_indexed_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl(path, rows(3))
    assert len(line_ends(path)) == 3
    jsonl(path, rows(5))
    os.utime(path, ns=(1, 1))
    assert len(line_ends(path)) == 5


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "file"))
    path = jsonl(tmp_path / "a.jsonl", rows(4))
    assert [e.prompt for e in everything(opened(path)[0])] == [f"{i}+1=" for i in range(4)]


def test_held_out_rows_are_never_trained_on_nor_are_others_with_their_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(30) + rows(30))
    source, aside = opened(path, held_out=5)
    out = {example.prompt for example in everything(aside)}
    assert len(out) == 5
    trained = [e.prompt for e in source.usable(range(source.size))]
    assert len(trained) == 50 and not out & set(trained)
    assert [e.prompt for e in everything(opened(path, held_out=5)[1])] == [e.prompt for e in everything(aside)]
    with pytest.raises(DataError, match="none is left to train on"):
        opened(path, held_out=60)


class Tokens:
    """Stands in for an encoder: a prompt's tokens are its characters."""

    def encode(self, example) -> list[int]:
        return [ord(c) for c in example.prompt]

    def tiles(self, example, tokens) -> tuple:
        return ()


def feed_of(path, **data) -> Feed:
    config = Config.model_validate({"data": {"source": str(path), "stream": True, **data}})
    return Feed(open_source(config.data, 0)[0], config, Tokens())


def test_a_feed_passes_over_what_is_held_out_and_resumes_at_the_row(tmp_path: Path) -> None:
    made = rows(40)
    path = jsonl(tmp_path / "a.jsonl", [*made[:20], "", *made[20:]])
    feed = feed_of(path, held_out=10)
    prompts = [e.prompt for e, _ in feed.examples(30)]
    assert len(set(prompts)) == 30 and feed.left_out == 0
    again = feed_of(path, held_out=10)
    first = [e.prompt for e, _ in again.examples(11)]
    last = feed_of(path, held_out=10)
    last.restore(again.state())
    assert first + [e.prompt for e, _ in last.examples(19)] == prompts


def test_a_bad_row_ends_the_run_when_its_turn_comes_or_is_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*rows(9), "{broken"])
    with pytest.raises(DataError, match=r"a\.jsonl:10: is not JSON"):
        list(feed_of(path, held_out=0).examples(10))
    feed = feed_of(path, held_out=0, on_bad_row="skip")
    assert len({e.prompt for e, _ in feed.examples(9)}) == 9
    list(feed.examples(9))
    assert feed.left_out >= 1


def test_a_column_whose_kind_changes_half_way_is_named_by_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*rows(5), {"prompt": 7, "answer": "8"}])
    with pytest.raises(DataError, match=r"a\.jsonl:6: has a prompt that is a number"):
        list(feed_of(path, held_out=0).examples(6))


def test_what_cannot_be_read_by_rows_is_refused_when_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1=,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv cannot be read row by row"):
        opened(tmp_path / "a.csv")


def test_only_large_files_are_streamed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(5))
    assert not isinstance(opened(path, stream="auto")[0], streamed.StreamedRows)
    monkeypatch.setattr(streamed, "STREAMED_FROM", 10)
    assert isinstance(opened(path, stream="auto")[0], streamed.StreamedRows)


def test_a_data_set_of_the_hub_is_fetched_and_read_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "train.jsonl", rows(3))
    monkeypatch.setattr(hub, "fetch_data", lambda name: tmp_path if name == "openai/gsm8k" else None)
    assert [e.prompt for e in everything(opened("openai/gsm8k", stream=False)[0])] == ["0+1=", "1+1=", "2+1="]
    with pytest.raises(DataError, match="neither a file, nor a folder, nor a generator"):
        opened("openai/gsm8k.jsonl")  # a file's name is a file


def test_without_a_network_a_data_set_of_the_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match=r"cannot be reached.*|data\.source=FOLDER") as raised:
        readers.at_hand("nobody/no-such-data")
    assert "--repo-type dataset" in str(raised.value) and "data.source=FOLDER" in str(raised.value)
    assert find.HUB_ID.fullmatch("nobody/no-such-data")


MEMORY = """
import resource, sys
from tidemill.data.source import Order, open_source
from tidemill.recipe.config import Config, Data
source, _ = open_source(Data(source=sys.argv[1], held_out=10, stream=True), 0)
order = Order(source, 0)
def read(n, first):
    for p in range(first, first + n):
        try: source.example(order(p))
        except Exception: pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
early = read(2000, 0)
print(early, read(60_000, 2000), source.size)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as out:
        for i in range(150_000):
            out.write(json.dumps({"prompt": f"{i} " + "x" * 500, "answer": str(i)}) + "\n")
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    early, late, size = map(float, done.stdout.split())
    assert size == 150_000 and path.stat().st_size > 75e6
    assert late - early < 8, f"{early:.0f} MB grew to {late:.0f} MB"
