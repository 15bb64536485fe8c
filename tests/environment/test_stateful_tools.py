"""Tools that keep something over a conversation: code in the sandbox, and texts to search."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, BertTokenizer

from tidemill.environment.api import Task
from tidemill.environment.tools import python
from tidemill.environment.tools.environment import Tools
from tidemill.environment.tools.find import toolbox
from tidemill.environment.tools.search import BM25, Passage, passages
from tidemill.errors import ConfigError


@pytest.fixture
def code():
    """A python tool, as a function of a program."""
    made = []

    def make(**limits):
        [tool] = toolbox([{"python": limits}]).values()
        made.append(tool)
        return lambda text: tool.call({"code": text})

    yield make
    for tool in made:
        tool.close()
    python.POOL.close()


def test_names_stay_from_call_to_call_and_a_last_value_is_told(code):
    run = code()
    assert run("a = 20\ndef double(x): return 2 * x") == ""
    assert run("print('so')\ndouble(a) + 2") == "so\n42"


def test_what_code_raises_is_told_and_its_names_stay(code):
    run = code()
    run("a = 1")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        run("a = 7\n1 / 0")
    assert run("a") == "7"
    with pytest.raises(ValueError, match="SyntaxError"):
        run("def")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("while True: pass", "longer than 0.5 s"),
        ("print('x' * 10**6)", "printed more than"),
        ("import ctypes; ctypes.string_at(0)", "was ended"),
    ],
)
def test_a_limit_ends_the_program_and_the_next_call_begins_anew(code, text, says):
    run = code(wall_s=0.5)
    run("a = 1")
    with pytest.raises(ValueError, match=says):
        run(text)
    with pytest.raises(ValueError, match="NameError"):
        run("a")
    assert run("a = 2\na") == "2"


def test_conversations_know_nothing_of_each_other(code):
    one, other = code(), code()
    one("secret = 5")
    with pytest.raises(ValueError, match="NameError"):
        other("secret")


def test_a_sandbox_that_is_used_again_has_nothing_of_the_conversation_before(code):
    [first] = toolbox(["python"]).values()
    first.call({"code": "secret = 5\nopen('left.txt', 'w').write('secret')"})
    used = first._sandbox
    first.close()
    [second] = toolbox(["python"]).values()
    with pytest.raises(ValueError, match="NameError"):
        second.call({"code": "secret"})
    assert second._sandbox is used
    with pytest.raises(ValueError, match="FileNotFoundError"):
        second.call({"code": "open('left.txt').read()"})
    second.close()


@pytest.mark.parametrize(
    "text",
    [
        "open('/etc/passwd').read()",
        "__import__('socket').create_connection(('127.0.0.1', 1))",
        "__import__('subprocess').run(['/bin/true'])",
        "open(__import__('os').path.expanduser('~/.ssh/id_rsa')).read()",
    ],
)
def test_code_reaches_no_files_no_network_and_no_programs(code, text):
    with pytest.raises(ValueError, match=r"PermissionError|OSError|FileNotFoundError|BlockingIOError|ended"):
        code()(text)


def test_a_pool_keeps_the_second_conversation_from_waiting(code):
    [first] = toolbox(["python"]).values()
    first.call({"code": "1"})
    first.close()
    [second] = toolbox(["python"]).values()
    began = time.monotonic()
    second.call({"code": "1"})
    assert time.monotonic() - began < 1.0  # a copy of a process that runs
    second.close()


def test_a_conversation_is_told_of_results_and_errors():
    tools = Tools(Task(), ["python"], opening="<", closing=">")
    assert "42" in tools.step("<x = 6 * 7\nx>").text
    assert "43" in tools.step("<x + 1>").text
    turn = tools.step("<y>")
    assert "NameError" in turn.text and turn.parts["failed_calls"] == 1.0
    tools.close()
    python.POOL.close()


# Search


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tides.md").write_text("# Tides\n\nThe moon pulls the sea.\n\nA mill turns with the tide at noon.\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "bread.txt").write_text("Bread is baked of flour and water.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG tide tide tide")
    return tmp_path


def search(folder, **settings):
    [tool] = toolbox([{"search": {"folder": str(folder), **settings}}]).values()
    return lambda query: tool.call({"query": query})


def test_the_best_passage_comes_first_with_its_place(folder):
    look = search(folder, passage=30)
    assert look("mill at noon").startswith("[tides.md:5]\nA mill turns")
    assert look("flour") == "[deep/bread.txt:1]\nBread is baked of flour and water."
    assert look("zebra") == "nothing was found"


def test_no_more_passages_than_asked_for(folder):
    assert search(folder, passage=30, most=1)("the tide").count("[") == 1


def test_a_query_is_words_and_never_a_path(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.txt"
    outside.write_text("the secret word")
    (folder / "link.txt").symlink_to(outside)
    look = search(folder, passage=31)
    assert look("secret word") == "nothing was found" and look("../secret.txt") == "nothing was found"


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no texts"):
        search(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        search(tmp_path / "gone")


@given(st.lists(st.text("abc \n", max_size=60), min_size=1, max_size=5), st.integers(5, 40))
@settings(max_examples=60, deadline=None)
def test_passages_hold_every_word_of_a_text_in_order_and_are_short(texts, size):
    from tidemill.environment.tools.search import _of_text

    for text in texts:
        found = list(_of_text("x", text, size))
        assert "".join("".join(p.text for p in found).split()) == "".join(text.split())
        assert all(0 < len(p.text) <= 2 * size for p in found)


@given(
    st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=8), min_size=1, max_size=8),
    st.sampled_from("abcde"),
)
@settings(max_examples=60, deadline=None)
def test_scores_are_the_formulas(texts, query):
    """BM25 as its paper writes it, one document at a time."""
    import math

    found = BM25([Passage("", " ".join(text)) for text in texts]).scores(query)
    mean = sum(map(len, texts)) / len(texts)
    n = sum(query in text for text in texts)
    for text, score in zip(texts, found):
        often = text.count(query)
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        expected = idf * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * len(text) / mean))
        assert score == pytest.approx(expected)


def test_an_embedding_model_ranks_by_meaning_of_its_own(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bread", "is", "baked", "of", "flour", "and", "water", "."]
    (place / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(place)
    BertTokenizer(str(place / "vocab.txt")).save_pretrained(place)
    look = search(folder, passage=30, most=1, model=str(place))
    assert look("Bread is baked of flour and water.").startswith("[deep/bread.txt:1]")


def test_settings_that_a_tool_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="no argument 'wal_s'"):
        toolbox([{"python": {"wal_s": 1}}])
    with pytest.raises(ConfigError, match="is no tool"):
        toolbox([{"python": {}, "search": {}}])


def test_a_class_is_a_tool_with_a_memory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count.py").write_text(
        "class Count:\n"
        "    schema = {'type': 'function', 'function': {'name': 'count', 'parameters': {}}}\n"
        "    def __init__(self, start: int = 0): self.at = start\n"
        "    def call(self, arguments): self.at += 1; return self.at\n"
        "class Nothing: ...\n"
    )
    first, second = (toolbox([{"count.py:Count": {"start": 5}}])["count"] for _ in range(2))
    assert (first.call({}), first.call({}), second.call({})) == (6, 7, 6)
    assert toolbox(["count.py:Count"])["count"].call({}) == 1
    with pytest.raises(ConfigError, match="is no tool"):
        toolbox(["count.py:Nothing"])


def test_passages_of_a_folder_are_read_in_one_order(folder):
    assert [p.place for p in passages(folder, 30)] == ["deep/bread.txt:1", "tides.md:1", "tides.md:3", "tides.md:5"]
