"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

from tidemill.cli import (  # each registers its commands, in the order that `tidemill --help` lists them
    bench,  # isort: skip
    convert,  # isort: skip
    diff,  # isort: skip
    dock,  # isort: skip
    doctor,  # isort: skip
    evaluate,  # isort: skip
    export,  # isort: skip
    generate,  # isort: skip
    jobs,  # isort: skip
    launch,  # isort: skip
    models,  # isort: skip
    new,  # isort: skip
    plan,  # isort: skip
    plot,  # isort: skip
    recipes,  # isort: skip
    reshard,  # isort: skip
    serve,  # isort: skip
    simulate,  # isort: skip
    status,  # isort: skip
    train,  # isort: skip
    watch,  # isort: skip
)
from tidemill.cli.frame import app, explain, main

__all__ = [
    "app",
    "bench",
    "convert",
    "diff",
    "dock",
    "doctor",
    "evaluate",
    "explain",
    "export",
    "generate",
    "jobs",
    "launch",
    "main",
    "models",
    "new",
    "plan",
    "plot",
    "recipes",
    "reshard",
    "serve",
    "simulate",
    "status",
    "train",
    "watch",
]
