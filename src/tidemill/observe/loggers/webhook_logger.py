"""A webhook: one JSON object to a URL at the start and end of a run, at a failure and at a health warning."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping

from tidemill.observe.loggers.api import RunInfo

TIMEOUT_S = 5.0


class Webhook:
    """Says `text` too, which Slack, Mattermost and the like show as it is. Metrics are not sent."""

    def __init__(self, run: RunInfo) -> None:
        if not run.webhook.startswith(("https://", "http://")):
            raise ValueError("observe.webhook is no http address: set observe.webhook=https://…")
        self._run = run
        self._step = run.first

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def event(self, kind: str, text: str) -> None:
        told = {"run": self._run.name, "event": kind, "step": self._step, "text": f"{self._run.name}: {text}"}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._run.webhook, json.dumps(told).encode(), headers)
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()

    def close(self) -> None:
        """Every call is over."""


open_logger = Webhook
