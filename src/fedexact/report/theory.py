"""What `fedexact theory` shows and writes: predictions, and beside them what runs show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedexact.files import remove_parts, write_together
from fedexact.report.files import finite, write_parquet
from fedexact.report.text import ROOMY, lines_of, megabytes, new_table, power
from fedexact.theory.observe import Observation
from fedexact.theory.summary import Prediction

FORMAT = 1
NEVER = "never"

Predictions = Mapping[str, Prediction]  # by label
Observations = Mapping[str, Observation]


def prediction_table(predictions: Predictions, width: int) -> Table:
    """One line per algorithm: where it ends up, how fast, and what it costs.

    Readable from 80 columns on; closer together below 100.
    """
    table = new_table(
        "algorithm", "by\ntheory", "dist.\nSE", "dist.\nnorm", "moves\nby", "error\n/ round",
        "rounds", "MB\nup", "MB\ndown", "row\ngrad.",
    )  # fmt: skip
    if width < ROOMY:
        table.padding, table.show_edge = 0, False
    table.columns[1].justify = "left"
    for label, p in predictions.items():
        limit = p.limit
        table.add_row(
            Text(label, style="bold"),
            "exact" if p.exactness.exact else "biased",
            _cell(limit and limit.distance_se),
            _cell(limit and limit.distance),
            _cell(limit and limit.spread),
            _rate(p),
            _count(p.rounds),
            _megabytes(p.total(p.cost.bytes_up)),
            _megabytes(p.total(p.cost.bytes_down)),
            _count(p.total(p.cost.gradients)),
        )
    return table


def prediction_notes(predictions: Predictions) -> RenderableType:
    """How to read the table, what is biased and why, assumptions that do not hold."""
    notes = [
        "dist.: of the limit to the pooled solution, of the worst coefficient in standard errors "
        "(SE) and as the norm; moves by: root mean square distance to the limit in the long run; "
        "rounds, MB and row gradients (row grad.): to shrink the distance to the limit by "
        f"{_tol(predictions)}"
    ]
    for label, p in predictions.items():
        if not p.exactness.exact:
            notes.append(f"{label} is biased: {p.exactness.why}")
        notes += [f"{label} violates an assumption of its guarantee: {w}" for w in p.violated]
        notes += [f"{label}: {words}" for words in p.unknown]
    if not any(p.violated for p in predictions.values()):
        notes.append("the assumptions of all guarantees are met")
    return lines_of(notes)


def observation_table(predictions: Predictions, observations: Observations) -> RenderableType:
    """Predicted beside observed."""
    units = [p.limit is not None and p.limit.distance_se is not None for p in predictions.values()]
    se = all(units) and all(o.distance_se is not None for o in observations.values())
    table = new_table(
        "algorithm", f"dist. {'SE' if se else 'norm'}\npredicted", "observed",
        "moves by\npredicted", "observed",
        "per round\npredicted", "observed", "rounds\npredicted", "observed",
        "row gradients\npredicted", "observed",
    )  # fmt: skip
    for label, o in observations.items():
        p = predictions[label]
        table.add_row(
            Text(label, style="bold"),
            _cell(p.limit and (p.limit.distance_se if se else p.limit.distance)),
            _cell(o.distance_se if se else o.distance),
            _cell(p.limit and p.limit.spread),
            _cell(None if o.level is None or p.settles else o.level),
            _rate(p),
            _with_error(o.per_round, o.error),
            _count(p.rounds),
            _count(o.rounds),
            _count(p.total(p.cost.gradients)),
            _count(o.gradients),
        )
    notes = [
        "observed: dist. of the last model; moves by, the root mean square distance to the "
        "predicted limit in the last half; per round, the slope of that distance in the later half "
        "of its fall; -: not reached, or too few recordings"
    ]
    for label, o in observations.items():
        bad = o.statuses.count("diverged")
        if bad:
            notes.append(f"{label}: {bad} of {len(o.statuses)} runs diverged")
    return Group(table, lines_of(notes))


def write_theory(
    predictions: Predictions, observations: Observations, out: Path, version: str
) -> list[str]:
    """Writes theory.json and theory.parquet to a folder and returns their names."""
    rows = [_row(label, p, observations.get(label)) for label, p in predictions.items()]
    content = json.dumps(finite({"format": FORMAT, "fedexact": version, "algorithms": rows}))
    nested = ("limit", "assumptions", "unknown", "observed")
    flat = [
        {k: v for k, v in row.items() if k not in nested} | _observed(observations.get(label))
        for label, row in zip(predictions, rows, strict=True)
    ]
    out.mkdir(parents=True, exist_ok=True)
    remove_parts(out)
    contents = {
        "theory.json": lambda p: p.write_text(content + "\n", encoding="utf-8"),
        "theory.parquet": lambda p: write_parquet(pa.Table.from_pylist(flat), p),
    }
    write_together(out, contents)
    return list(contents)


# --- details --------------------------------------------------------------------------------------


def _row(label: str, p: Prediction, o: Observation | None) -> dict[str, Any]:
    return {"label": label, **p.to_dict(), "observed": None if o is None else o._asdict()}


def _observed(o: Observation | None) -> dict[str, Any]:
    if o is None:
        return {}
    return {f"observed_{name}": v for name, v in o._asdict().items() if name != "statuses"}


def _tol(predictions: Predictions) -> str:
    return f"{next(iter(predictions.values())).tol:g}"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else power(value)


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return NEVER
    return f"{value:.0f}" if value < 1e5 else f"{value:.2g}"


def _megabytes(value: float | None) -> str:
    if value is None:
        return "-"
    return megabytes(value / 1e6) if math.isfinite(value) else NEVER


def _rate(p: Prediction) -> str:
    return "-" if p.rate is None else _with_error(p.rate.per_round, p.rate.error)


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + (f"\n± {error:.4f}" if error else "")
