"""Non-negative least squares on relative errors: coefficients from measured points, none of them below zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

ROUNDS = 4000


def fit(
    points: Sequence[tuple[Mapping[str, float], float]], prior: Mapping[str, float] | None = None, pull: float = 0.1
) -> dict[str, float]:
    """Coefficients by feature so that the sum of features comes to each point's seconds, errors weighed by size.
    `prior`: what a coefficient is where the points do not say otherwise; `pull`: how much that counts."""
    names = sorted({name for cost, _ in points for name, amount in cost.items() if amount})
    if not names:
        return {}
    rows = np.array([[cost.get(name, 0.0) / seconds for name in names] for cost, seconds in points])
    wanted = np.ones(len(points))
    start = np.array([(prior or {}).get(name, 0.0) for name in names])
    scale = np.sqrt((rows**2).mean(0)) + 1e-30  # each feature by how much it can explain
    is_known = np.array([name in (prior or {}) for name in names])
    rows_all = np.vstack([rows / scale, pull * np.sqrt(len(points)) * np.diag(is_known.astype(float))])
    aims = np.concatenate([wanted, pull * np.sqrt(len(points)) * is_known * start * scale])
    found = _descend(rows_all, aims)
    return dict(zip(names, (found / scale).tolist(), strict=True))


def _descend(rows: np.ndarray, aims: np.ndarray) -> np.ndarray:
    """By coordinates: exact in each, until nothing moves."""
    gram, towards = rows.T @ rows, rows.T @ aims
    found = np.zeros(len(towards))
    for _ in range(ROUNDS):
        before = found.copy()
        for i in range(len(found)):
            if gram[i, i] > 0:
                found[i] = max(0.0, found[i] + (towards[i] - gram[i] @ found) / gram[i, i])
        if np.abs(found - before).max() <= 1e-9 * max(1.0, np.abs(found).max()):
            break
    return found


def off(points: Sequence[tuple[Mapping[str, float], float]], coefficients: Mapping[str, float]) -> float:
    """The median of how far points lie from what the coefficients say, as a share."""
    errors = [
        abs(sum(amount * coefficients.get(name, 0.0) for name, amount in cost.items()) / seconds - 1)
        for cost, seconds in points
    ]
    return median(errors) if errors else 0.0
