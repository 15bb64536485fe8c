"""A program for a run's environment: asks the model once."""

import json
import urllib.request


def solve(base_url, api_key, task):
    data = json.dumps({"prompt": task["prompt"], "max_tokens": 4}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/completions", data, headers), timeout=60) as answer:
        return float(len(json.load(answer)["choices"][0]["text"]) % 2)
