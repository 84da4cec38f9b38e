"""What runs show of what theory predicts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedexact.errors import DivergenceWarning
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.result import Result
from fedexact.solve import solve
from fedexact.theory.summary import Prediction

RECORDINGS = 500  # of an observed run
FLOOR = 1e-13  # relative to the first distance: rounding


class Observation(NamedTuple):
    """What runs of the algorithm show; over several seeds the median."""

    distance: float | None  # of the last model to the pooled solution
    distance_se: float | None  # the same in standard errors, of the worst coefficient
    level: float | None  # root mean square distance to the limit over the last half
    per_round: float | None  # factor of the distance to the limit per round, where it falls
    error: float | None  # standard error of per_round over the seeds; None for one seed
    rounds: float | None  # whole ones, until the distance to the limit had shrunk by the tolerance
    gradients: float | None  # of rows, until then
    bytes: float | None  # up and down, until then
    statuses: tuple[str, ...]  # of the runs


def observe(
    prediction: Prediction,
    problem: Problem,
    participation: Participation | None = None,
    rounds: int = 1000,
    tol: float | None = None,
    seeds: Sequence[int] = (0,),
    pooled: np.ndarray | None = None,
    pooled_se: np.ndarray | None = None,
) -> Observation:
    """Runs the algorithm of a prediction and measures what was predicted.

    Args:
        rounds, tol, seeds: as in `fx.solve`.
        pooled, pooled_se: (d,) the pooled solution and its standard errors, where they exist.
    """
    limit = pooled if prediction.limit is None else prediction.limit.x
    found = []
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # it is in the status
            result = solve(
                problem, prediction.algorithm, participation, rounds=rounds, tol=tol, seed=seed,
                record_every=max(1, rounds // RECORDINGS), reference=limit,
            )  # fmt: skip
        found.append(_measured(result, prediction.tol, pooled, pooled_se))
    pace = [one.per_round for one in found if one.per_round is not None]
    spread = float(np.std(pace, ddof=1) / math.sqrt(len(pace))) if len(pace) > 1 else None
    middle = {
        name: _median([getattr(one, name) for one in found])
        for name in (
            "distance",
            "distance_se",
            "level",
            "per_round",
            "rounds",
            "gradients",
            "bytes",
        )
    }
    return Observation(**middle, error=spread, statuses=tuple(s for o in found for s in o.statuses))


def _measured(
    result: Result, tol: float, pooled: np.ndarray | None, se: np.ndarray | None
) -> Observation:
    """What one run shows."""
    off = None if pooled is None else result.x - pooled
    table = result.history
    round = table["round"].to_numpy().astype(float)
    entry = np.arange(len(round))
    mapping = table["distance"].null_count > 0
    size = table["gradient_mapping" if mapping else "distance"].to_numpy()
    spent = {
        "gradients": table["gradient_evaluations"].to_numpy().astype(float),
        "bytes": (table["bytes_up"].to_numpy() + table["bytes_down"].to_numpy()).astype(float),
    }
    when = crossing(size, tol)
    rounds = None if when is None else math.ceil(np.interp(when, entry, round) - 1e-9)
    return Observation(
        distance=None if off is None else float(np.linalg.norm(off)),
        distance_se=None if off is None or se is None else float(np.max(np.abs(off) / se)),
        level=None if mapping else math.sqrt(float(np.mean(size[len(size) // 2 :] ** 2))),
        per_round=slope(round, size),
        error=None,
        rounds=rounds,
        **{
            name: None if rounds is None else float(np.interp(rounds, round, a))
            for name, a in spent.items()
        },
        statuses=(result.status,),
    )


def slope(round: np.ndarray, size: np.ndarray) -> float | None:
    """Factor per round by which `size` falls in the later half of its fall.

    The fall ends where the run does, at rounding, or at ten times the level at which the last
    fifth of it lies. None where fewer than three recordings fall.
    """
    good = np.isfinite(size) & (size > 0)
    if not good.all():
        round, size = round[: np.argmin(good)], size[: np.argmin(good)]
    if len(size) < 3:
        return None
    level = 10.0 * float(np.median(size[-max(1, len(size) // 5) :]))
    low = max(level, FLOOR * size[0])
    stop = len(size) if not np.any(size <= low) else int(np.argmax(size <= low))
    start = stop // 2
    if stop - start < 3:
        return None
    return math.exp(np.polyfit(round[start:stop], np.log(size[start:stop]), 1)[0])


def crossing(size: np.ndarray, tol: float) -> float | None:
    """Where `size`, log-linear between its entries, first falls to tol times its first entry."""
    below = size <= tol * size[0]
    if not np.any(below) or size[0] == 0:
        return None
    i = int(np.argmax(below))
    high, low = math.log(size[i - 1]), math.log(max(size[i], FLOOR * tol * size[0]))
    return i - 1 + (high - math.log(tol * size[0])) / (high - low)


def _median(values: Sequence[float | None]) -> float | None:
    """The median; None where any of them is missing."""
    if any(value is None for value in values):
        return None
    return float(np.median([value for value in values if value is not None]))
