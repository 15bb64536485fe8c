"""A job as a detached process of a machine, reached by a shell there: started, asked about, stopped.

The job holds a lock on a file while anything of it lives, so a reused process number is never taken for it.
"""

from __future__ import annotations

import shlex

from tidemill.launch.job import State, Status

STATES: dict[int, State] = {0: "done", 75: "stopped", 143: "stopped"}  # 143: asked before it had begun
# The trap keeps this shell alive while its child ends, so that the exit status is written.
KEEP = "trap : TERM INT; sh ./job.sh; echo $? >exit.new; mv exit.new exit"


def start(folder: str) -> str:
    wait = "while [ ! -e exit ] && flock -n lock true; do sleep 0.1; done"
    begin = f"setsid flock -w 10 lock sh -c {shlex.quote(KEEP)} </dev/null >>log 2>&1 & echo $! >pid"
    return f"cd {shlex.quote(folder)} && rm -f exit && {{ {begin}; }} && {wait}; cat pid"


def status(folder: str) -> str:
    ended = "if [ -e exit ]; then cat exit; else echo lost; fi"
    return f"cd {shlex.quote(folder)} && if flock -n lock true; then {ended}; else echo running; fi"


def stop(folder: str) -> str:
    return f'cd {shlex.quote(folder)} && if ! flock -n lock true; then kill -TERM "-$(cat pid)"; fi'


def logs(folder: str, lines: int) -> str:
    return f"cd {shlex.quote(folder)} && tail -n {lines} log"


def read_status(output: str) -> Status:
    word = output.strip()
    if word == "running":
        return Status("running")
    if not word.isdigit():
        return Status("lost", "its processes ended without a word: the machine may have restarted; `launch resume`")
    code = int(word)
    return Status(STATES.get(code, "failed"), "" if code in STATES else f"exit status {code}; `launch logs` says why")
