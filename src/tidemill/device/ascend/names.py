"""Ascend NPUs by the names that torch_npu gives them."""

from __future__ import annotations

FAMILIES = {"ascend910_93": "910C", "ascend910b": "910B"}  # what data sheets are filed under, by how names begin


def family(name: str) -> str | None:
    """The data sheet of a device: `Ascend910_9391` is one die of a 910C."""
    return next((sheet for begin, sheet in FAMILIES.items() if name.lower().startswith(begin)), None)
