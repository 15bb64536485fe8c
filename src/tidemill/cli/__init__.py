"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

from importlib import import_module

from tidemill.cli.frame import app, explain, main

# Each registers its commands, in the order that `tidemill --help` lists them.
FILES = (
    *("train", "recipes", "new", "models", "doctor"),
    *("watch", "status", "plot", "diff", "dock"),
    *("generate", "evaluate", "serve", "export"),
    *("launch", "jobs", "plan", "simulate", "reshard"),
    *("convert", "bench"),
)
for _file in FILES:
    import_module(f"tidemill.cli.{_file}")

__all__ = ["app", "explain", "main"]
