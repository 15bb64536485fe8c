"""The page's server: what it tells, whom it tells it, and what it refuses."""

import json
import os
import socket

import pytest
from starlette.testclient import TestClient

from tests.watch import made
from tidemill.observe import control
from tidemill.watch import guard
from tidemill.watch.runs import Runs
from tidemill.watch.server import application


def client(root, **settings) -> TestClient:
    return TestClient(application(Runs.at(root), token="", **settings), base_url="http://127.0.0.1")


@pytest.fixture
def root(tmp_path):
    made.run(tmp_path, "one", steps=50)
    made.run(tmp_path, "other", steps=40, lr=2e-5)
    return tmp_path


def hold(run) -> None:
    """As the process that writes a run holds it."""
    (run / "lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "now"}))


def test_runs_of_a_folder_are_listed_with_their_state(root):
    hold(root / "other")
    told = client(root).get("/api/runs").json()
    assert {r["name"]: (r["state"], r["step"], r["steps"]) for r in told["runs"]} == {
        "one": ("finished", 50, 50),
        "other": ("running", 40, 40),
    }
    assert not told["may_control"]


def test_a_run_is_chosen_by_its_own_folder(root):
    told = client(root / "one").get("/api/runs").json()
    assert told["chosen"] == "one" and len(told["runs"]) == 2


def test_the_overview_has_the_last_values_and_warnings_in_words(root):
    told = client(root).get("/api/run", params={"run": "one"}).json()
    assert told["last"]["step"] == 50 and "reward" in told["metrics"]
    with (root / "one" / "metrics.jsonl").open("a") as out:
        out.writelines(json.dumps(made.metrics(s) | {"truncated_share": 0.9}) + "\n" for s in range(51, 60))
    told = client(root).get("/api/run", params={"run": "one"}).json()
    assert any("cut off at rollout.max_new_tokens" in text for text in told["warnings"])


def test_curves_samples_groups_flow_weights_and_settings_are_told(root):
    page = client(root)
    curves = page.get("/api/series", params={"run": "one", "name": ["reward", "lr"], "from": 10, "to": 20}).json()
    assert curves["is_whole"] and curves["curves"]["reward"][0] == list(range(10, 21))
    found = page.get("/api/samples", params={"run": "one", "sort": "-reward", "n": 3}).json()
    assert [s["reward"] for s in found["samples"]] == [1.0, 1.0, 1.0]
    group = page.get("/api/group", params={"run": "one", "at": found["samples"][0]["at"]}).json()
    assert len(group) == 2
    assert page.get("/api/flow", params={"run": "one"}).json()["last"]["time/rollout"] == 0.6
    assert page.get("/api/weights", params={"run": "one"}).json()["checkpoints"][0]["bytes"] == 1000
    assert page.get("/api/config", params={"run": "one"}).json()["learn"] == {"lr": 1e-5}


def test_two_runs_are_compared(root):
    told = client(root).get("/api/compare", params={"one": "one", "other": "other"}).json()
    assert [(s["key"], s["one"], s["other"]) for s in told["settings"]] == [
        ("train.steps", 50, 40),
        ("learn.lr", 1e-5, 2e-5),
    ]
    assert (told["first"]["step"], told["first"]["name"]) == (1, "lr")
    assert told["prompts"][0]["one"]["prompt"] == told["prompts"][0]["other"]["prompt"]


@pytest.mark.parametrize("name", ["nothing", "../one", "/etc", "one/..", ""])
def test_a_run_outside_the_folder_is_not_found(root, name):
    answer = client(root / "one").get("/api/run", params={"run": name})
    assert answer.status_code == 404 and "there is no run" in answer.json()["error"]


def test_a_wrong_number_or_sort_is_refused_in_words(root):
    page = client(root)
    assert page.get("/api/series", params={"run": "one", "points": "many"}).status_code == 400
    assert "sorted by" in page.get("/api/samples", params={"run": "one", "sort": "colour"}).json()["error"]


def test_the_page_itself_loads_nothing_from_elsewhere(root):
    page = client(root)
    text = page.get("/").text
    assert "http://" not in text and "https://" not in text
    assert page.get("/static/vendor/uPlot.iife.min.js").status_code == 200
    assert "default-src 'self'" in page.get("/").headers["content-security-policy"]


# Who may see it


def guarded(root, **more) -> TestClient:
    app = application(Runs.at(root), token="s3cret", hosts=guard.LOOPBACK, **more)
    return TestClient(app, base_url="http://127.0.0.1:8640")


def test_without_the_token_nothing_is_told(root):
    page = guarded(root)
    for path in ("/", "/api/runs", "/static/js/app.js", "/?token=wrong", "/api/runs?token="):
        assert page.get(path).status_code == 401, path


def test_the_token_becomes_a_cookie_and_leaves_the_address(root):
    page = guarded(root)
    answer = page.get("/?token=s3cret&run=one", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/?run=one"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert page.get("/api/runs").status_code == 200


def test_a_program_may_bring_the_token_as_a_header(root):
    assert guarded(root).get("/api/runs", headers={"authorization": "Bearer s3cret"}).status_code == 200


def test_a_foreign_name_that_leads_here_is_refused(root):
    answer = guarded(root).get("/api/runs?token=s3cret", headers={"host": "evil.example"})
    assert answer.status_code == 421


# Steering


def asked(run) -> list[dict]:
    file = run / control.ASKED
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_page_that_only_reads_takes_no_command(root):
    hold(root / "one")
    answer = client(root).post("/api/control", json={"run": "one", "kind": "stop"})
    assert answer.status_code == 403 and asked(root / "one") == []


def test_a_command_is_left_for_the_run(root):
    hold(root / "one")
    page = client(root, may_control=True)
    answer = page.post("/api/control", json={"run": "one", "kind": "set", "key": "learn.lr", "value": "3e-6"})
    assert answer.status_code == 200
    assert [(c["kind"], c["key"], c["value"]) for c in asked(root / "one")] == [("set", "learn.lr", 3e-6)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"run": "one", "kind": "explode"}, "no command"),
        ({"run": "one", "kind": "set", "key": "train.steps", "value": 1}, "cannot be changed"),
        ({"run": "one", "kind": "set", "key": "learn.lr", "value": 7}, "out of bounds"),
        ({"run": "one", "kind": "set", "key": "learn.lr", "value": "nan"}, "out of bounds"),
        ({"run": "one", "kind": "set", "key": "learn.lr", "value": "fast"}, "no number"),
        ({"run": "other", "kind": "stop"}, "is not running"),
        ({"run": "../one", "kind": "stop"}, "there is no run"),
        ({"kind": "stop"}, "run and kind"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused_in_words(root, body, why):
    hold(root / "one")
    answer = client(root, may_control=True).post("/api/control", json=body)
    assert answer.status_code in (400, 404) and why in answer.json()["error"]
    assert asked(root / "one") == [] and asked(root / "other") == []


def test_a_form_of_a_foreign_page_cannot_command(root):
    hold(root / "one")
    page = client(root, may_control=True)
    answer = page.post("/api/control", content='{"run": "one", "kind": "stop"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and asked(root / "one") == []


# What every worker did, and what a sample's tokens and images are


def test_the_timeline_gives_the_newest_steps_or_those_that_are_asked_for(root):
    page = client(root)
    newest = page.get("/api/timeline", params={"run": "one", "n": 2}).json()
    asked = page.get("/api/timeline", params={"run": "one", "n": 2, "step": 5}).json()
    assert [one["step"] for one in newest["steps"]] == [49, 50] and [one["step"] for one in asked["steps"]] == [4, 5]
    assert asked["workers"]["learner-0"] == [
        ["learn", 0.62, 0.9], ["publish", 0.9, 0.95], ["learn", 1.62, 1.9], ["publish", 1.9, 1.95],
    ]  # fmt: skip
    assert list(asked["workers"]) == ["learner-0", "reward-0", "rollout-0", "rollout-1"] and asked["seconds"] == 2.0


def test_a_run_without_a_timeline_has_an_empty_one(root):
    for file in (root / "one" / "timeline").iterdir():
        file.unlink()
    assert client(root).get("/api/timeline", params={"run": "one"}).json()["steps"] == []


def test_a_group_has_what_the_learner_made_of_its_tokens(root):
    page = client(root)
    at = page.get("/api/samples", params={"run": "one"}).json()["samples"][0]["at"]
    group = page.get("/api/group", params={"run": "one", "at": at}).json()
    assert [one["ratio"] for one in group] == [[1.0, 1.2, 0.8, 1.0]] * 2
    assert group[0]["pieces"] == ["one", " two", " three", " four"] and group[1]["mask"] == [1, 0, 0, 1]


def test_a_picture_is_given_and_no_other_file(root):
    page = client(root)
    found = page.get("/api/image", params={"run": "one", "name": made.IMAGE})
    assert found.status_code == 200 and found.headers["content-type"] == "image/png"
    for name in ("../config.yaml", "config.yaml", f"{8:032x}.png", "../images/" + made.IMAGE):
        assert page.get("/api/image", params={"run": "one", "name": name}).status_code == 404
