"""The transfer dock: sample flow between workers, without a centre that touches the bytes."""

from tidemill.dock.api import Dock, DockState, Lease, StageCounts, Want

__all__ = ["Dock", "DockState", "Lease", "StageCounts", "Want"]
