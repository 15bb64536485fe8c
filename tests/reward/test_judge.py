import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tidemill.errors import RewardError
from tidemill.recipe.config import Rewards
from tidemill.reward.api import Sample
from tidemill.reward.score import Scorer
from tidemill.reward.verifiers.judge import judge


class Endpoint:
    """An OpenAI-compatible server that gives the replies it is told to."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, str]] = []
        self.asked: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, text = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps({"choices": [{"message": {"content": text}}]}).encode())

            def log_message(self, *args) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


SAMPLE = Sample("2+2?", "4", "4", id=3, where="data:1")


def test_the_last_score_counts_and_is_scaled(endpoint) -> None:
    endpoint.replies = [(200, "SCORE: 3? no.\nSCORE: 8")]
    reward = judge(SAMPLE, endpoint.url, "m")
    assert (reward.value, reward.correct) == (0.8, True)
    assert "2+2?" in endpoint.asked[0]["messages"][0]["content"] and endpoint.asked[0]["model"] == "m"


def test_a_busy_endpoint_is_tried_again(endpoint) -> None:
    endpoint.replies = [(503, ""), (429, ""), (200, "SCORE: 10")]
    assert judge(SAMPLE, endpoint.url, "m", backoff_s=0.01).value == 1.0
    assert len(endpoint.asked) == 3


def test_a_refusal_is_not_tried_again(endpoint) -> None:
    endpoint.replies = [(401, "")]
    with pytest.raises(RewardError, match="HTTP 401, tried 1 times"):
        judge(SAMPLE, endpoint.url, "m", backoff_s=0.01)


def test_no_score_in_the_reply_is_an_error(endpoint) -> None:
    endpoint.replies = [(200, "I like it")]
    with pytest.raises(RewardError, match="gave no score"):
        judge(SAMPLE, endpoint.url, "m")


@pytest.mark.parametrize("on_error", ["zero", "fail"])
def test_an_endpoint_that_is_down_is_named_and_the_recipe_decides(on_error) -> None:
    args = {"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 1, "backoff_s": 0.01}
    rewards = Rewards(functions=[{"function": "judge", "args": args}], on_error=on_error)
    with Scorer(rewards) as scorer:
        if on_error == "fail":
            with pytest.raises(RewardError, match=r"sample 3 \(data:1\).*cannot be reached.*tried 2 times"):
                scorer.score([SAMPLE])
        else:
            (scored,) = scorer.score([SAMPLE])
            assert scored.value == 0.0 and "127.0.0.1:9" in scored.error


@pytest.mark.parametrize("on_error", ["zero", "drop", "fail"])
def test_a_run_whose_judge_is_down_ends_and_says_why(on_error, tmp_path) -> None:
    import tidemill

    tiny = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 32}
    args = {"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 1, "backoff_s": 0.01}
    recipe = {
        "folder": str(tmp_path),
        "name": "run",
        "threads": 1,
        "model": {"tiny": tiny | {"alphabet": "0123456789+-= "}},
        "data": {"source": "chain", "args": {"terms": 2}, "max_prompt_tokens": 12},
        "rollout": {"max_new_tokens": 4},
        "rewards": {"functions": [{"function": "judge", "args": args}], "on_error": on_error},
        "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2},
        "eval": {"size": 0, "before": False, "after": False},
        "observe": {"tensorboard": False},
    }
    why = r"sample \d+ \(chain:\d+\).*127.0.0.1:9.*cannot be reached"
    whole = "" if on_error == "fail" else "every reward failed .8 of 8 samples.*"  # single failures do as told
    with pytest.raises(RewardError, match=whole + why):
        tidemill.train(recipe)
