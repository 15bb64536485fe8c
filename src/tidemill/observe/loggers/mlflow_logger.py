"""MLflow, into the run's own folder unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from tidemill.observe.loggers.api import RunInfo

MOST_PARAMS = 100  # in one call, by MLflow's own limit
LONGEST = 500  # characters of a parameter that every backend takes


class Mlflow:
    def __init__(self, run: RunInfo) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=where)
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:LONGEST]) for key, value in run.settings.items()]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + MOST_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        # MLflow takes letters, digits, and few signs: pass@8 becomes pass_at_8.
        told = [self._metric(name.replace("@", "_at_"), float(v), now, step) for name, v in metrics.items()]
        self._client.log_batch(self._id, metrics=told)

    def event(self, kind: str, text: str) -> None:
        self._client.set_tag(self._id, f"tidemill.{kind}", text[:LONGEST])

    def close(self) -> None:
        self._client.set_terminated(self._id)


open_logger = Mlflow
