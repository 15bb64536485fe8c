"""The reward `judge`: a language model behind any OpenAI-compatible endpoint reads the response and gives a score."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request

from tidemill.errors import RewardError
from tidemill.reward.api import Reward, Sample

PROMPT = """Judge the response to the question below. {instruction}
Question:
{prompt}
{reference}Response:
{response}
End with one line: SCORE: a number from 0 to {scale:g}."""
SCORE = re.compile(r"SCORE\s*[:=]\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # HTTP states worth another try


def judge(
    sample: Sample,
    url: str,
    model: str,
    instruction: str = "Is it correct and helpful?",
    scale: float = 10.0,
    key_variable: str = "OPENAI_API_KEY",
    retries: int = 3,
    backoff_s: float = 0.5,
    request_s: float = 30.0,
    max_tokens: int = 512,
    pass_above: float = 0.5,
) -> Reward:
    """The score divided by `scale`. `url` is the endpoint's base (…/v1); the key is read from an environment variable.

    An endpoint that is down or busy is tried again `retries` times, waiting longer each time; then this reward fails
    and `rewards.on_error` decides. Set `rewards.timeout_s` above `request_s` and the waits together.
    """
    reference = f"Known answer:\n{sample.answer}\n" if sample.answer else ""
    text = PROMPT.format(
        instruction=instruction, prompt=sample.prompt, reference=reference, response=sample.response, scale=scale
    )
    said = ask(url, model, text, os.environ.get(key_variable, ""), retries, backoff_s, request_s, max_tokens)
    found = SCORE.findall(said)
    if not found:
        raise RewardError(f"the judge at {url} gave no score; it said {said[:200]!r}")
    score = min(max(float(found[-1]) / scale, 0.0), 1.0)
    return Reward(score, correct=score > pass_above)


def ask(
    url: str, model: str, text: str, key: str, retries: int, backoff_s: float, request_s: float, max_tokens: int
) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    address = f"{url.rstrip('/')}/chat/completions"
    why = ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=request_s) as reply:
                content = json.load(reply)["choices"][0]["message"]["content"]
                return str(content or "")
        except urllib.error.HTTPError as error:
            why = f"answered with HTTP {error.code}"
            if error.code not in PASSING:
                break
        except (urllib.error.URLError, OSError) as error:
            why = f"cannot be reached ({getattr(error, 'reason', error)})"
        except (KeyError, IndexError, TypeError, ValueError) as error:
            why = f"gave no chat completion ({type(error).__name__})"
    raise RewardError(f"the judge at {address} {why}, tried {attempt + 1} times")
