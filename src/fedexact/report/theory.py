"""What `fedexact theory` shows and writes: predictions, and beside them what runs show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
NARROW = 80  # columns
SHOWN = 5e-5  # the smallest number that four decimals show
BY_THEORY = "by\ntheory"
NEVER = "never"

Predictions = Mapping[str, Prediction]  # by label
Observations = Mapping[str, Observation]


def prediction_table(predictions: Predictions, width: int) -> RenderableType:
    """One line per algorithm: where it ends up, how fast, and what it costs.

    Closer together below 100 columns, in two tables below 80; long labels are wrapped.
    """
    headings = (
        BY_THEORY, "dist.\nSE", "dist.\nnorm", "moves\nby", "error\n/ round",
        "rounds", "MB\nup", "MB\ndown", "row\ngrad.",
    )  # fmt: skip
    rows = {label: _predicted(p) for label, p in predictions.items()}
    parts = [slice(0, 9)] if width >= NARROW else [slice(0, 5), slice(5, 9)]
    tables = []
    for part in parts:
        table = _table(("algorithm", *headings[part]), width)
        for label, cells in rows.items():
            table.add_row(Text(label, style="bold"), *cells[part])
        tables.append(table)
    return Group(*tables)


def prediction_notes(predictions: Predictions) -> RenderableType:
    """How to read the table, what is biased and why, assumptions that do not hold."""
    notes = [
        "by theory: whether its limit is the pooled solution (exact) or another point (biased)",
        "dist.: of the limit to the pooled solution, of the worst coefficient in standard errors "
        "(SE) and as the norm",
        "moves by: root mean square distance to the limit in the long run",
        "error / round: factor of the distance to the limit per round, ± the standard error where "
        "it is simulated",
        "rounds, MB and row gradients (row grad.): to shrink the distance to the limit by "
        f"{_tol(predictions)}; never: it does not get there; -: unknown",
    ]
    every = predictions.items()
    for names, why in _by_words((k, p.exactness.why) for k, p in every if not p.exactness.exact):
        notes.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} biased: {why}")
    violated = _by_words((label, what) for label, p in every for what in p.violated)
    for names, what in violated:
        breach = (
            "violates an assumption of its" if len(names) == 1 else "violate an assumption of their"
        )
        notes.append(f"{', '.join(names)} {breach} guarantee: {what}")
    unknown = _by_words((label, words) for label, p in every for words in p.unknown)
    notes += [f"{', '.join(names)}: {words}" for names, words in unknown]
    if not violated:
        notes.append("the assumptions of all guarantees are met")
    return lines_of(notes)


def observation_table(
    predictions: Predictions, observations: Observations, width: int
) -> RenderableType:
    """Two lines per algorithm: predicted, and below it observed. Readable from 60 columns on."""
    units = [p.limit is not None and p.limit.distance_se is not None for p in predictions.values()]
    se = all(units) and all(o.distance_se is not None for o in observations.values())
    beside = () if width < NARROW else ("",)
    table = _table(
        (
            "algorithm", *beside, f"dist.\n{'SE' if se else 'norm'}", "moves\nby",
            "error\n/ round", "±", "rounds", "row\ngrad.",
        ),
        width,
    )  # fmt: skip
    for label, o in observations.items():
        name = Text(label, style="bold")
        if not beside:
            table.add_row(name)
            name = Text("- predicted\n- observed")
        both = ("predicted\nobserved",) if beside else ()
        table.add_row(name, *both, *_compared(predictions[label], o, se))
    notes = [
        "observed, dist.: of the last model to the pooled solution",
        "observed, moves by: root mean square distance to the predicted limit in the last half of "
        "the run, for those that do not settle",
        "observed, error / round: slope of the distance to the predicted limit in the later half "
        "of its fall; ±: standard error, over the seeds",
        "observed, rounds and row gradients: until that distance had shrunk by "
        f"{_tol(predictions)}; -: not reached, or too few recordings",
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


def _predicted(p: Prediction) -> list[str]:
    """The cells of the table of predictions, but for the label."""
    error = _error(p.rate and p.rate.error)
    return [
        "exact" if p.exactness.exact else "biased",
        _cell(p.limit and p.limit.distance_se),
        _cell(p.limit and p.limit.distance),
        _cell(p.limit and p.limit.spread),
        _factor(p.rate and p.rate.per_round) + (f"\n± {error}" if error else ""),
        _count(p.rounds),
        _megabytes(p.total(p.cost.bytes_up)),
        _megabytes(p.total(p.cost.bytes_down)),
        _count(p.total(p.cost.gradients)),
    ]


def _compared(p: Prediction, o: Observation, se: bool) -> list[str]:
    """The cells of the table of observations, each predicted over observed."""
    return [
        _two(
            _cell(p.limit and (p.limit.distance_se if se else p.limit.distance)),
            _cell(o.distance_se if se else o.distance),
        ),
        _two(
            _cell(p.limit and p.limit.spread),
            _cell(None if o.level is None or p.settles else o.level),
        ),
        _two(_factor(p.rate and p.rate.per_round), _factor(o.per_round)),
        _two(_error(p.rate and p.rate.error), _error(o.error)),
        _two(_count(p.rounds), _count(o.rounds)),
        _two(_count(p.total(p.cost.gradients)), _count(o.gradients)),
    ]


def _table(headings: Sequence[str], width: int) -> Table:
    """An empty table that wraps labels and never cuts a value; close together below 100 columns."""
    table = new_table(*headings)
    if width < ROOMY:
        table.padding, table.show_edge = 0, False
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
        if column.header in ("", BY_THEORY):
            column.justify = "left"
    return table


def _by_words(said: Iterable[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Labels and words, from labels with words: those with the same words together."""
    labels: dict[str, list[str]] = {}
    for label, words in said:
        labels.setdefault(words, []).append(label)
    return [(names, words) for words, names in labels.items()]


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


def _factor(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value >= SHOWN else _cell(value)


def _error(value: float | None) -> str:
    return _factor(value) if value else ""


def _two(predicted: str, observed: str) -> str:
    return f"{predicted}\n{observed}"
