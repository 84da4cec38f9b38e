"""What a finished experiment leaves in its output folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedexact.config import Outcome, Prepared, Run
from fedexact.data import Federation
from fedexact.files import remove_parts, write_together
from fedexact.report.figure import convergence_figure, curves, image

FORMAT = 1
COUNTS = ("uploads", "bytes_up", "bytes_down", "gradient_evaluations", "objective")


def write_report(outcome: Outcome, out: Path, version: str) -> list[str]:
    """Writes all files, each complete or not at all, and returns their names."""
    experiment = outcome.prepared.experiment
    resolved = {run.label: run.result for run in outcome.runs}
    figure = convergence_figure(*curves(outcome), experiment.title or "Experiment")
    contents: dict[str, Callable[[Path], object]] = {
        "result.json": lambda p: p.write_text(result_json(outcome, version), encoding="utf-8"),
        "history.parquet": lambda p: write_parquet(history(outcome), p),
        "experiment.toml": lambda p: p.write_text(experiment.to_toml(resolved), encoding="utf-8"),
        "figure.png": lambda p: p.write_bytes(image(figure, "png")),
        "figure.svg": lambda p: p.write_bytes(image(figure, "svg")),
    }
    out.mkdir(parents=True, exist_ok=True)
    remove_parts(out)
    write_together(out, contents)
    return list(contents)


def history(outcome: Outcome) -> pa.Table:
    """One tidy table: algorithm (its label), seed, and the columns of each run's history."""
    parts = []
    for run in outcome.runs:
        table = run.result.history
        n = table.num_rows
        table = table.add_column(0, "seed", pa.array([run.seed] * n, pa.int64()))
        parts.append(table.add_column(0, "algorithm", pa.array([run.label] * n, pa.string())))
    return pa.concat_tables(parts)


def result_json(outcome: Outcome, version: str) -> str:
    """Everything but the histories as JSON; numbers that are not finite are null."""
    prepared = outcome.prepared
    content = {
        "format": FORMAT,
        "fedexact": version,
        "title": prepared.experiment.title,
        "target": prepared.problem.target(),
        "data": _data(prepared),
        "pooled_solution": _solution(prepared),
        "runs": [_run(run, prepared) for run in outcome.runs],
    }
    return json.dumps(finite(content), indent=2) + "\n"


def _data(prepared: Prepared) -> dict[str, Any]:
    federation = prepared.data
    p = prepared.participation.inclusion(prepared.problem.n_clients)
    clients = [
        {"name": name, "rows": int(rows), "dropped": dropped, "participation": float(p_k)}
        for name, rows, dropped, p_k in zip(
            federation.names, federation.n_rows, federation.dropped, p, strict=True
        )
    ]
    return {
        "source": federation.source,
        "target": federation.target,
        "features": list(federation.feature_names),
        "clients": clients,
        "missing": federation.missing,
        "levels": federation.levels,
        "classes": federation.classes,
        "moments": _moments(federation),
        "partition": _partition(federation),
        "notes": [*federation.notes, *prepared.notes],
    }


def _moments(federation: Federation) -> list[dict[str, Any]]:
    m = federation.moments
    return [
        {"column": c, "mean": float(mean), "sd": float(sd), "standardized": bool(done)}
        for c, mean, sd, done in zip(m.columns, m.mean, m.sd, m.standardized, strict=True)
    ]


def _partition(federation: Federation) -> dict[str, Any] | None:
    made = federation.partition
    if made is None:
        return None
    return {
        "rule": made.description,
        "sizes": made.sizes.tolist(),
        "labels": list(made.labels),
        "label_counts": made.label_counts.tolist(),
    }


def _solution(prepared: Prepared) -> dict[str, Any] | None:
    if prepared.reference is None:
        return None
    return {
        "x": _coefficients(prepared, prepared.reference),
        "standard_errors": _coefficients(prepared, prepared.reference_se),
        "original_scale": _original_scale(prepared, prepared.reference),
    }


def _run(run: Run, prepared: Prepared) -> dict[str, Any]:
    result = run.result
    row = kept_row(run)
    return {
        "label": run.label,
        "algorithm": result.algorithm,
        "seed": run.seed,
        "hyperparameters": result.hyperparameters,
        "chosen": result.chosen,
        "exact_by_theory": result.exactness.exact,
        "why": result.exactness.why,
        "status": result.status,
        "message": result.message,
        "rounds": result.rounds,
        "stopped_at_round": result.history.column("round")[-1].as_py(),
        **{key: row[key] for key in COUNTS},
        "distance": distance_of(run, prepared, False),
        "distance_se": distance_of(run, prepared, True),
        "never_present": result.never_present,
        "invariant": result.invariant,
        "certificate": result.certificate.to_dict() if result.certificate else None,
        "x": _coefficients(prepared, result.x),
        "original_scale": _original_scale(prepared, result.x),
    }


def kept_row(run: Run) -> dict[str, Any]:
    """The row of a run's history that belongs to its model: the last one, unless it diverged."""
    rows = run.result.history.to_pylist()
    return next(row for row in reversed(rows) if row["round"] <= run.result.rounds)


def distance_of(run: Run, prepared: Prepared, in_se: bool) -> float | None:
    """Distance of a run's model to the pooled solution, the largest in standard errors or the
    Euclidean norm; None if there is no solution or no standard errors."""
    if prepared.reference is None:
        return None
    error = run.result.x - prepared.reference
    if not in_se:
        return float(np.linalg.norm(error))
    se = prepared.reference_se
    return None if se is None else float(np.max(np.abs(error) / se))


def _coefficients(prepared: Prepared, x: np.ndarray | None) -> Any:
    """By feature name; for several outputs a list per feature."""
    if x is None:
        return None
    names = prepared.problem.feature_names
    values = np.asarray(x).reshape(len(names), -1)
    single = values.shape[1] == 1
    return {n: float(v[0]) if single else v.tolist() for n, v in zip(names, values, strict=True)}


def _original_scale(prepared: Prepared, x: np.ndarray) -> Any:
    """The coefficients of the columns as they were before standardisation, if they exist."""
    moments, fit_intercept = prepared.data.moments, prepared.problem.fit_intercept
    if not (moments.standardized.any() and fit_intercept):
        return None
    matrix = moments.to_original(fit_intercept)
    if len(x) % len(matrix):
        return None
    return _coefficients(prepared, (matrix @ x.reshape(len(matrix), -1)).ravel())


def write_parquet(table: pa.Table, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray | np.generic):
        return finite(value.tolist())
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
