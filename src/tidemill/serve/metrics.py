"""Counters of a server, in Prometheus' text form."""

from __future__ import annotations

import bisect
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.serve.link import Answering
    from tidemill.serve.service import Served

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by model and how they ended
        self.prompt_tokens: Counter[str] = Counter()
        self.made_tokens: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()  # by status
        self.seconds: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))
        self.seconds_sum: Counter[str] = Counter()
        self.began = time.time()

    def answered(self, model: str, answering: Answering, seconds: float) -> None:
        for completion in answering.done:
            self.requests[model, completion.finish if completion is not None else "cancelled"] += 1
        self.prompt_tokens[model] += len(answering.request.prompt)
        self.made_tokens[model] += sum(map(len, answering.tokens))
        self.seconds[model][bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds_sum[model] += seconds  # type: ignore[assignment]  # a float sum

    def text(self, models: dict[str, Served]) -> str:
        lines = [f"# TYPE tidemill_up_seconds gauge\ntidemill_up_seconds {time.time() - self.began:.3f}"]
        for name, kind, counts in (
            ("samples_total", "counter", {f'model="{m}",finish="{f}"': c for (m, f), c in self.requests.items()}),
            ("prompt_tokens_total", "counter", {f'model="{m}"': c for m, c in self.prompt_tokens.items()}),
            ("generated_tokens_total", "counter", {f'model="{m}"': c for m, c in self.made_tokens.items()}),
            ("refused_total", "counter", {f'status="{s}"': c for s, c in self.refused.items()}),
            ("open_requests", "gauge", {f'model="{n}"': m.link.open_requests for n, m in models.items()}),
            ("weight_version", "gauge", {f'model="{n}"': m.version for n, m in models.items()}),
            ("engine_steps_total", "counter", {f'model="{n}"': m.link.steps for n, m in models.items()}),
        ):
            lines.append(f"# TYPE tidemill_{name} {kind}")
            lines += [f"tidemill_{name}{{{labels}}} {count}" for labels, count in counts.items()]
        lines.append("# TYPE tidemill_request_seconds histogram")
        for model, counts_s in self.seconds.items():
            total = 0
            for edge, count in zip([*map(str, BUCKETS_S), "+Inf"], counts_s):
                total += count
                lines.append(f'tidemill_request_seconds_bucket{{model="{model}",le="{edge}"}} {total}')
            lines.append(f'tidemill_request_seconds_sum{{model="{model}"}} {self.seconds_sum[model]:.6f}')
            lines.append(f'tidemill_request_seconds_count{{model="{model}"}} {total}')
        return "\n".join(lines) + "\n"
