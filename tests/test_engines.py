"""All engines run the same rounds: every algorithm, participation, seed, layout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

import fedexact as fx
from fedexact.engines import ENGINES, compiled
from fedexact.participation import Cohorts
from problems import ALGORITHMS, PARTICIPATIONS, fast_only, least_squares, logistic, programs
from protocol import assert_same_run

CLOSE = 1e-11
ROUNDS = 24


def all_engines(problem: fx.Problem, algorithm: fx.Algorithm, **kwargs: object) -> None:
    compiled, *others = [
        fx.solve(problem, algorithm, engine=engine, record_every=8, rounds=ROUNDS, **kwargs)  # type: ignore[arg-type]
        for engine in ENGINES
    ]
    for other in others:
        assert_same_run(compiled, other, CLOSE)


LEAST_SQUARES = least_squares(0)


@pytest.mark.parametrize("participation", fast_only(PARTICIPATIONS, ("full", "rare", "cyclic")))
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_every_algorithm_under_every_participation(
    algorithm: Callable[[], fx.Algorithm], participation: str
) -> None:
    who = PARTICIPATIONS[participation]
    for seed in (0, 1):
        all_engines(LEAST_SQUARES, algorithm(), participation=who, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["FedSplit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("FedProx", "FedDR"))]
)
def test_newton_prox(name: str) -> None:
    all_engines(logistic(1), ALGORITHMS[name](), participation=PARTICIPATIONS["bernoulli"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "FedAvg batch",
        "FOCUS 3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("SCAFFOLD 2", "FedSplit")),
    ],
)
def test_unequal_sizes_one_row_to_many(name: str) -> None:
    problem = least_squares(2, n_rows=(1, 2, 300, 40, 3), l2=0.5)
    assert len(problem.layout.sizes) > 1
    all_engines(problem, ALGORITHMS[name](), participation=fx.Bernoulli(0.5))


@pytest.mark.parametrize("name", ["FedAvg", "FedSplit", "FOCUS"])
def test_one_client_one_feature(name: str) -> None:
    all_engines(least_squares(3, n_rows=(5,), d=1), ALGORITHMS[name]())


@pytest.mark.parametrize("name", ["FedAvg batch", "SCAFFOLD 2", "FedDR", "FOCUS"])
def test_sharding_changes_nothing(name: str) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one JAX device")
    n_rows = (5, 9, 2, 30, 4)
    one, two = (
        fx.solve(
            least_squares(4, n_rows=n_rows, shards=shards, l2=0.5),
            ALGORITHMS[name](),
            fx.Bernoulli(0.5),
            rounds=ROUNDS,
        )
        for shards in (1, 2)
    )
    assert_same_run(one, two, CLOSE)


def test_empty_rounds_change_nothing_and_count(tmp_path) -> None:
    mask = np.zeros((20, 4), int)
    mask[[2, 11]] = 1
    problem = least_squares(5)
    for name in ("FedDR", "FOCUS"):
        sparse = fx.solve(problem, ALGORITHMS[name](), fx.Trace(mask), rounds=20, record_every=1)
        x = sparse.history["objective"].to_numpy()
        changed = np.flatnonzero(np.diff(x)) + 1
        assert set(changed) <= {3, 12}
        assert sparse.rounds == 20
        assert sparse.history["participants"].to_pylist() == [0, *mask.sum(axis=1).tolist()]


def test_an_absent_client_keeps_its_state_bit_for_bit() -> None:
    mask = np.ones((10, 4), int)
    mask[5:, 2] = 0
    problem = least_squares(6)
    for engine in ENGINES:
        for name in ("SCAFFOLD 2", "FedSplit", "FedDR", "FOCUS"):
            states = [
                fx.solve(
                    problem, ALGORITHMS[name](), fx.Trace(mask), rounds=rounds, engine=engine
                ).clients
                for rounds in (5, 10)
            ]
            for field, before in states[0].items():
                after = states[1][field]
                assert np.array_equal(before[2], after[2])
                assert not np.array_equal(before[1], after[1])


def test_nothing_is_compiled_again() -> None:
    """For other floats, seeds, participations and numbers of rounds."""
    problem = least_squares(7)
    fx.solve(problem, fx.FOCUS(lr=0.1, local_steps=2), fx.Uniform(2), rounds=10, record_every=5)
    before = programs()
    for lr, participation, seed, rounds in (
        (0.2, fx.Uniform(3), 1, 10),
        (0.05, fx.Bernoulli(0.3), 2, 15),
        (0.01, fx.Full(), 3, 7),
    ):
        fx.solve(
            problem,
            fx.FOCUS(lr=lr, local_steps=2),
            participation,
            rounds=rounds,
            seed=seed,
            record_every=5,
        )
    assert programs() == before


def test_a_cohort_too_large_for_its_list_is_impossible() -> None:
    """Every participant of every round is visited, whatever the sizes of the rounds."""
    rng = np.random.default_rng(8)
    layout = least_squares(8, n_rows=tuple(rng.integers(1, 60, size=40))).layout
    mask = rng.random((30, 40)) < rng.random((30, 1))
    ids = np.nonzero(mask)[1].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
    visited, _ = compiled.visits(layout, layout.slot_of, Cohorts(ids, offsets), None, 1024)
    for t in range(30):
        seen = []
        for b in range(len(layout.sizes)):
            begin, end = visited.first[t, 0, b : b + 2]
            clients = layout.slots[visited.slots[0, begin:end]]
            assert np.all(layout.bucket_of[clients] == b)
            seen += clients.tolist()
        assert sorted(seen) == np.flatnonzero(mask[t]).tolist()
