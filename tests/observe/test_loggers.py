"""Loggers: each against its real package writing offline where that is installed; none stops or delays a run."""

import csv
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tidemill.observe.loggers import api, background
from tidemill.observe.loggers.api import RunInfo
from tidemill.observe.loggers.background import Background, close, start

STEPS = [(1, {"reward": 0.25, "eval/pass@8": 0.5}), (2, {"reward": 0.5, "loss": float("nan")})]


def logged(name: str, run: RunInfo) -> str:
    loggers = start([name], run)
    for step, metrics in STEPS:
        loggers[0].log(step, metrics)
    loggers[0].event("finish", "ended")
    return close(loggers)


def info(folder: Path, **more) -> RunInfo:
    return RunInfo("sums", folder, settings={"learn.lr": 1e-6, "data.args": {}}, **more)


class Hanging:
    def log(self, step, metrics) -> None:
        time.sleep(60)

    def event(self, kind, text) -> None: ...

    def close(self) -> None: ...


class Failing(Hanging):
    def log(self, step, metrics) -> None:
        raise SystemExit("the server said no")


def test_csv_has_a_row_a_step_and_grows_columns(tmp_path):
    assert logged("csv", info(tmp_path)) == ""
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert rows == [
        {"step": "1", "reward": "0.25", "eval/pass@8": "0.5", "loss": ""},
        {"step": "2", "reward": "0.5", "eval/pass@8": "", "loss": ""},
    ]


def test_a_resumed_run_drops_csv_rows_that_come_again(tmp_path):
    logged("csv", info(tmp_path))
    loggers = start(["csv"], info(tmp_path, first=1))
    loggers[0].log(2, {"reward": 0.75})
    close(loggers)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [(row["step"], row["reward"]) for row in rows] == [("1", "0.25"), ("2", "0.75")]


def test_a_logger_that_fails_is_switched_off_with_one_warning(tmp_path):
    told = []
    logger = Background("csv", Failing, told.append)
    logger.log(1, {"a": 1.0})
    logger._thread.join(5)
    for step in range(2, 9):
        logger.log(step, {"a": 1.0})
    assert told == ["CSV events were not all written: the server said no (metrics.jsonl has everything)"]
    assert logger._queue.empty()


def test_a_logger_that_hangs_costs_no_step_and_the_end_waits_only_so_long(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_S", 0.2)
    logger = Background("csv", Hanging)
    began = time.perf_counter()
    for step in range(1000):
        logger.log(step, {"a": 1.0})
    assert time.perf_counter() - began < 0.5
    assert "still at work" in close([logger])
    assert time.perf_counter() - began < 2.0


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    assert "pip install 'tidemill[swanlab]'" in logged("swanlab", info(tmp_path))


def test_a_webhook_is_told_of_events_only(tmp_path):
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert logged("webhook", info(tmp_path, webhook=f"http://127.0.0.1:{server.server_port}/hook")) == ""
    server.shutdown()
    assert got == [{"run": "sums", "event": "finish", "step": 2, "text": "sums: ended"}]


def test_a_webhook_that_nobody_answers_is_switched_off(tmp_path):
    assert "refused" in logged("webhook", info(tmp_path, webhook="http://127.0.0.1:9/hook"))


def test_prometheus_tells_the_newest_values(tmp_path):
    made = api.make("prometheus", info(tmp_path))
    for step, metrics in STEPS:
        made.log(step, metrics)
    text = urllib.request.urlopen(f"http://127.0.0.1:{made.port}/metrics").read().decode()
    made.close()
    assert 'tidemill_reward{run="sums"} 0.5' in text and 'tidemill_step{run="sums"} 2.0' in text
    assert 'tidemill_loss{run="sums"} NaN' in text
    assert all(re.fullmatch(r'(# TYPE \w+ gauge|\w+\{run="sums"\} \S+)', line) for line in text.splitlines())


# Real packages, in whichever environment has them: this one, or TIDEMILL_LOGGERS_PYTHON's

OTHER = os.environ.get("TIDEMILL_LOGGERS_PYTHON", "")
WRITE = """
import sys
sys.path.insert(0, "src")
from pathlib import Path
from tidemill.observe.loggers import RunInfo
from tidemill.observe.loggers.background import close, start
run = RunInfo("sums", Path(sys.argv[2]), settings={"learn.lr": 1e-6, "data.args": {}})
loggers = start([sys.argv[1]], run)
loggers[0].log(1, {"reward": 0.25, "eval/pass@8": 0.5})
loggers[0].log(2, {"reward": 0.5, "loss": float("nan")})
loggers[0].event("finish", "ended")
print("TROUBLE", close(loggers))
"""
READ = {
    "wandb": """
import struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb
data, at, part = next(Path(sys.argv[1]).rglob("*.wandb")).read_bytes(), 7, b""
while at + 7 <= len(data):  # LevelDB's log: blocks of 32 KiB, each piece with checksum, length and kind before it
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    size, kind = struct.unpack_from("<HB", data, at + 4)
    part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):  # whole, or last
        record = pb.Record.FromString(part)
        part = b""
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
            if "reward" in items:
                print("FOUND", record.history.step.num, float(items["reward"]))
""",
    "mlflow": """
import os, sys
from pathlib import Path
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
client = mlflow.MlflowClient((Path(sys.argv[1]) / "mlruns").as_uri())
run = client.search_runs([e.experiment_id for e in client.search_experiments()])[0]
for m in client.get_metric_history(run.info.run_id, "reward"):
    print("FOUND", m.step, m.value)
assert run.data.params["learn.lr"] == "1e-06"
""",
    "trackio": """
import sqlite3, json, sys
from pathlib import Path
base = sqlite3.connect(next(p for p in Path(sys.argv[1]).rglob("*.db")))
for step, metrics in base.execute("select step, metrics from metrics order by step"):
    found = json.loads(metrics)
    if "reward" in found:
        print("FOUND", step, found["reward"])
""",
    "swanlab": r"""
import re, struct, sys
from pathlib import Path
from swanlab.sdk.internal.core_python.store import DataStoreReader
reader = DataStoreReader()
reader.open(next(Path(sys.argv[1]).rglob("*.swanlab")))
while (data := reader.scan()) is not None:
    found = re.search(rb"\n\x06reward\x10(.)\x18.*\*\t\t(.{8})", data, re.DOTALL)  # name, step, value as a double
    if found:
        print("FOUND", found[1][0], struct.unpack("<d", found[2])[0])
""",
}


def python_with(package: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    if OTHER and subprocess.run([OTHER, "-c", f"import {package}"], capture_output=True).returncode == 0:
        return OTHER
    pytest.skip(f"{package} is not installed here; TIDEMILL_LOGGERS_PYTHON names a Python that has it")


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(READ))
def test_a_real_package_writes_offline_what_is_read_back(package, tmp_path):
    python = python_with(package)
    root = Path(__file__).resolve().parents[2]
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path / "home")}
    keep = {k: v for k, v in os.environ.items() if not k.lower().endswith("proxy")}
    folder = tmp_path / "run"
    folder.mkdir()
    told = [
        subprocess.run([python, "-c", *c], cwd=root, env=keep | offline, capture_output=True, text=True, timeout=120)
        for c in ((WRITE, package, str(folder)), (READ[package], str(folder)))
    ]
    assert "TROUBLE \n" in told[0].stdout, told[0].stdout + told[0].stderr
    assert [line for line in told[1].stdout.splitlines() if line.startswith("FOUND")] == [
        "FOUND 1 0.25",
        "FOUND 2 0.5",
    ], told[1].stdout + told[1].stderr
