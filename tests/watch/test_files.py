"""Files of a run are read by bytes: right at every offset, whatever is appended, cut or half written."""

import json
import random

import numpy as np
import pytest

from tests.watch import made
from tidemill.watch import lines, samples
from tidemill.watch.series import Series, thinned


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK", 64)  # many blocks in a small file
    return made.run(tmp_path, steps=40) / "samples.jsonl"


def test_forward_and_backward_give_the_same_lines(file):
    there = list(lines.forward(file, 0, lines.whole_end(file)))
    assert [line.decode() for _, line in there] == file.read_text().splitlines()
    assert list(lines.backward(file, lines.whole_end(file))) == there[::-1]
    assert all(file.read_bytes()[at : at + len(line)] == line for at, line in there)


def test_the_first_line_of_every_step_is_found(file):
    end = lines.whole_end(file)
    for step in range(43):
        at = lines.first_of_step(file, step, end)
        expected = next((a for a, line in lines.forward(file, 0, end) if json.loads(line)["step"] >= step), end)
        assert at == expected, step


def test_a_line_that_is_being_written_does_not_count(file):
    end = lines.whole_end(file)
    with file.open("a") as out:
        out.write('{"step": 41, "resp')
    assert lines.whole_end(file) == end


def test_pages_of_samples_join_to_the_whole_file(file, monkeypatch):
    for sort in ("step", "-step"):
        found, cursor = [], None
        while True:
            page = samples.find(file, samples.Query(sort=sort, count=7, cursor=cursor))
            found += [s["id"] for s in page.samples]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(found) == list(range(4, 164))
        assert found == sorted(found, reverse=sort == "-step")


def test_sorted_stretches_join_to_the_best_of_all(file, monkeypatch):
    monkeypatch.setattr(samples, "BUDGET", 4000)
    best, cursor, stretches = [], None, 0
    while True:
        page = samples.find(file, samples.Query(sort="-reward", count=5, cursor=cursor))
        best = sorted([*best, *page.samples], key=lambda s: (-s["reward"], -s["at"]))[:5]
        cursor, stretches = page.cursor, stretches + 1
        if cursor is None:
            break
    rewards = sorted((json.loads(line)["reward"] for line in file.read_text().splitlines()), reverse=True)
    assert stretches > 1
    assert [s["reward"] for s in best] == rewards[:5]


def test_samples_are_found_by_text_step_and_correctness(file):
    found = samples.find(file, samples.Query(text='OF "STEP 17"')).samples
    assert {s["step"] for s in found} == {17}
    found = samples.find(file, samples.Query(first=5, last=6, correct=False)).samples
    assert [(s["step"], s["correct"]) for s in found] == [(6, False)] * 2 + [(5, False)] * 2


def test_a_group_is_found_whole_from_any_of_its_samples(file):
    for sample in samples.find(file, samples.Query(first=9, last=9)).samples:
        group = samples.group_of(file, sample["at"])
        assert [s["group"] for s in group] == [sample["group"]] * 2
    assert samples.group_of(file, 3) == []  # no line starts there


def test_thinning_keeps_every_spike():
    rng = random.Random(7)
    values = np.array([rng.random() for _ in range(10_000)], np.float32)
    values[[17, 5000, 9999]] = [9.0, -9.0, 8.0]
    at = thinned(values, 200)
    assert len(at) <= 202 and {17, 5000, 9999} <= set(at.tolist())
    assert thinned(values[:50], 200).tolist() == list(range(50))


def test_curves_grow_with_the_file_and_start_anew_when_it_is_cut(tmp_path):
    run = made.run(tmp_path, steps=10)
    series = Series(run / "metrics.jsonl")
    curve = series.curves(["reward", "nothing"], 100)[0]
    assert curve["reward"].steps == list(range(1, 11)) and curve["nothing"].steps == []
    made.append(run, 11, 12)
    assert series.curves(["reward"], 100)[0]["reward"].steps[-1] == 12
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (run / "cut").write_text("".join(kept))
    (run / "cut").replace(run / "metrics.jsonl")  # as a resumed run does
    assert series.curves(["reward"], 100)[0]["reward"].steps == [1, 2, 3, 4, 5]


def test_a_long_file_is_shown_before_it_is_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr("tidemill.watch.series.SOON", 1000)
    series = Series(made.run(tmp_path, steps=3000) / "metrics.jsonl")
    curves, is_whole = series.curves(["reward"], 400)
    assert not is_whole
    assert curves["reward"].steps[0] == 1 and curves["reward"].steps[-1] > 2900 and len(curves["reward"].steps) > 200
    while series.advance():
        pass
    curves, is_whole = series.curves(["reward"], 4000)
    assert is_whole and curves["reward"].steps == list(range(1, 3001))


def test_a_metric_that_some_lines_lack_keeps_its_steps(tmp_path):
    run = made.run(tmp_path, steps=4)
    with (run / "metrics.jsonl").open("a") as out:
        out.write('{"step": 4, "eval/accuracy": 0.5, "loss": null}\n')
    made.append(run, 5, 6)
    found = Series(run / "metrics.jsonl").curves(["eval/accuracy", "reward", "loss"], 100)[0]
    assert (found["eval/accuracy"].steps, found["eval/accuracy"].values) == ([4], [0.5])
    assert found["reward"].steps == [1, 2, 3, 4, 5, 6] and found["loss"].steps == []
