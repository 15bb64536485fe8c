"""The transfer dock: sample flow between workers, without a centre that touches the bytes."""

from tidemill.dock.api import Dock, DockState, Lease, LeaseExpired, StageCounts, Want
from tidemill.dock.local import LocalDock

__all__ = ["Dock", "DockState", "Lease", "LeaseExpired", "LocalDock", "StageCounts", "Want"]
