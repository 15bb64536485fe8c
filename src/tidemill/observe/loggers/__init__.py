"""Loggers: where a run's metrics go besides its own files. Several at once; none can stop a run or delay a step."""

from tidemill.observe.loggers.api import NAMES, Logger, RunInfo
from tidemill.observe.loggers.background import Background, start

__all__ = ["NAMES", "Background", "Logger", "RunInfo", "start"]
