"""The documentation's notebook, run whole by a kernel of its own: progress as a widget, tables and curves inline."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "trainer.ipynb"


def shown(cell, kind: str = "text/html") -> str:
    """What a cell's last output of a kind says."""
    found = [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]
    return found[-1] if found else ""


def printed(cell) -> str:
    return "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")


def test_ten_cells_run_and_show_a_widget_a_table_and_a_curve(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == 10
    widget = shown(cells[4])
    assert "finished" in widget and 'aria-valuenow="12"' in widget and "<svg" in widget
    assert len([o for o in cells[4].outputs if o["output_type"] == "display_data"]) == 1, "one widget, drawn anew"
    assert "<th>reward</th>" in shown(cells[5]) and "finished" in shown(cells[5])
    assert "<polyline" in shown(cells[6])
    assert 12 < int(shown(cells[7], "text/plain")) <= 40
    stages = [line.split()[1] for line in printed(cells[8]).splitlines() if line[0].isdigit()]
    assert stages == ["rollout", "reward", "advantage", "learn"] * 3
    assert (tmp_path / "runs" / "digits" / "summary.json").exists()


def test_a_saved_notebook_holds_no_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
