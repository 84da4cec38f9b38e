"""Ways to run a round of FedAvg: the engine as it is, sharded or not, against a vmap and NumPy.

The repeats of the variants are interleaved and their medians compared, so that a machine whose
speed drifts treats all alike.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedexact as fx
from fedexact.core import client_key, float64, root_key
from fedexact.engines import ENGINES
from fedexact.engines.state import initial
from fedexact.participation import Participation
from fedexact.solve import setting_of

ROUNDS, REPEATS, STEPS = 10, 9, 5


class Workload(NamedTuple):
    name: str
    n_clients: int
    n_rows: int
    d: int
    participation: Participation


WORKLOADS = [
    Workload("W1: 100 clients × 200 rows, d = 100, everybody", 100, 200, 100, fx.Full()),
    Workload("W2: 1000 clients × 50 rows, d = 100, 50 a round", 1000, 50, 100, fx.Uniform(50)),
]

Advance = Callable[[], np.ndarray]  # runs ROUNDS rounds from x = 0 and gives the model


def main() -> str:
    lines = [
        "# Benchmarks",
        "",
        "Made by `python -m benchmarks engine --write`: logistic regression in float64, FedAvg "
        f"with {STEPS} full-batch local steps, median of {REPEATS} interleaved repeats of {ROUNDS} "
        "rounds. Ratios matter, absolute times do not.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"JAX {jax.__version__}, NumPy {np.__version__}.",
    ]
    with float64():
        for workload in WORKLOADS:
            lines += ["", *compare(workload)]
    return "\n".join(lines) + "\n"


def compare(workload: Workload) -> list[str]:
    """A table of the variants on one workload; all must compute the same model."""
    variants = make_variants(workload)
    models = {name: advance() for name, advance in variants.items()}
    first = next(iter(models.values()))
    for name, model in models.items():
        np.testing.assert_allclose(model, first, rtol=1e-10, err_msg=name)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, advance in variants.items():
            start = time.perf_counter()
            advance()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(s) / ROUNDS * 1e3 for name, s in seconds.items()}
    best = min(median.values())
    lines = [f"## {workload.name}", "", "| variant | ms a round | ratio |", "|---|---|---|"]
    return lines + [f"| {n} | {ms:.2f} | {ms / best:.1f} |" for n, ms in median.items()]


def make_variants(workload: Workload) -> dict[str, Advance]:
    clients = make_clients(workload)
    problems = {
        shards: fx.Problem(clients, loss="logistic", l2=0.1, weights="clients", shards=shards)
        for shards in {1, len(jax.devices())}
    }
    algorithm = fx.FedAvg(local_steps=STEPS).resolve(
        setting_of(problems[1], workload.participation)
    )
    mask = workload.participation.mask(workload.n_clients, 0, ROUNDS, 0)
    variants = {
        f"fedexact, map, {shards} device{'s' if shards > 1 else ''}": engine_variant(
            problem, algorithm, workload.participation
        )
        for shards, problem in problems.items()
    }
    variants["vmap over the cohort"] = vmap_variant(problems[1], algorithm, mask)
    variants["vmap over all clients, masked"] = masked_variant(problems[1], algorithm, mask)
    variants["NumPy, a loop over the clients"] = numpy_variant(clients, algorithm, mask)
    return variants


def make_clients(workload: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=workload.d) / np.sqrt(workload.d)
    rows = rng.normal(size=(workload.n_clients, workload.n_rows, workload.d))
    return [(X, (X @ x + rng.normal(size=len(X)) > 0).astype(float)) for X in rows]


def engine_variant(
    problem: fx.Problem, algorithm: fx.FedAvg, participation: Participation
) -> Advance:
    engine = ENGINES["compiled"]
    state = engine.load(problem, *initial(algorithm, problem, jnp.zeros(problem.dim)))
    cohorts = participation.cohorts(problem.n_clients, 0, ROUNDS, 0)

    def advance() -> np.ndarray:
        after, _ = engine.advance(algorithm, problem, state, cohorts, 0, root_key(0))
        return np.asarray(after.server.x)

    return advance


def vmap_variant(problem: fx.Problem, algorithm: fx.FedAvg, mask: np.ndarray) -> Advance:
    cohorts = jnp.asarray(np.array([np.flatnonzero(row) for row in mask]))
    return partial(_run, _vmap_rounds, algorithm, problem.oracles[0], cohorts)


def masked_variant(problem: fx.Problem, algorithm: fx.FedAvg, mask: np.ndarray) -> Advance:
    return partial(_run, _masked_rounds, algorithm, problem.oracles[0], jnp.asarray(mask))


def _run(rounds: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(rounds(*args))


@jax.jit
def _vmap_rounds(algorithm: fx.FedAvg, oracle: Any, cohorts: jax.Array) -> jax.Array:
    def one_round(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
        def visit(k: jax.Array) -> jax.Array:
            return algorithm.local((), x, oracle.client(k), client_key(root_key(0), 0, k))[1]

        return x + jnp.mean(jax.vmap(visit)(ids), axis=0), None

    return jax.lax.scan(one_round, jnp.zeros(oracle.ridge.shape), cohorts)[0]


@jax.jit
def _masked_rounds(algorithm: fx.FedAvg, oracle: Any, mask: jax.Array) -> jax.Array:
    def one_round(x: jax.Array, present: jax.Array) -> tuple[jax.Array, None]:
        def visit(k: jax.Array) -> jax.Array:
            return algorithm.local((), x, oracle.client(k), client_key(root_key(0), 0, k))[1]

        uploads = jax.vmap(visit)(jnp.arange(present.shape[0]))
        total = jnp.sum(jnp.where(present[:, None], uploads, 0.0), axis=0)
        return x + total / jnp.sum(present), None

    return jax.lax.scan(one_round, jnp.zeros(oracle.ridge.shape), mask)[0]


def numpy_variant(
    clients: list[tuple[np.ndarray, np.ndarray]], algorithm: fx.FedAvg, mask: np.ndarray
) -> Advance:
    def advance() -> np.ndarray:
        x = np.zeros(clients[0][0].shape[1])
        for present in mask:
            total, ids = np.zeros_like(x), np.flatnonzero(present)
            for k in ids:
                X, y = clients[k]
                z = x
                for _ in range(algorithm.local_steps):
                    residual = 1.0 / (1.0 + np.exp(-(X @ z))) - y
                    z = z - algorithm.lr * (X.T @ residual / len(y) + 0.1 * z)
                total += z - x
            x = x + total / len(ids)
        return x

    return advance
