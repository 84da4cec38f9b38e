"""Stacked clients: read and checked as the list of pairs is, in memory or on the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse

import fedexact as fx
from fedexact import parts
from fedexact.clients import aligned
from problems import ALGORITHMS, random_targets
from protocol import assert_same_run

N_ROWS = np.array([7, 1, 30, 8, 2, 29])  # two buckets
P = 3
NAMES = ["Bern", "Basel", "Chur", "Genf", "Olten", "Zug"]
FEATURES = ["age", "chol", "bmi"]


def stacked(seed: int, loss: str = "squared") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N_ROWS.sum(), P))
    return X, random_targets(loss, X @ rng.normal(size=P), rng)


def pairs(X: Any, y: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    ends = np.cumsum(N_ROWS)
    return [(X[e - n : e], y[e - n : e]) for n, e in zip(N_ROWS, ends, strict=True)]


def on_disk(array: np.ndarray, path: Path, dtype: Any = np.float64) -> np.memmap:
    """The array, read-only from a file."""
    np.save(path, array.astype(dtype))
    return np.load(path, mmap_mode="r")


Store = Callable[..., fx.Clients]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """`Clients` whose X and y are memory maps."""

    def clients(X: np.ndarray, y: np.ndarray, dtype: Any = np.float64, **names: Any) -> fx.Clients:
        maps = on_disk(X, tmp_path / "X.npy", dtype), on_disk(y, tmp_path / "y.npy", dtype)
        return fx.Clients(*maps, N_ROWS, **names)

    return clients


# --- the same problem ----------------------------------------------------------------------------


def test_stacked_rows_are_the_list_of_pairs() -> None:
    X, y = stacked(0)
    x = np.array([0.3, -0.1, 0.7])
    problems = [
        fx.Problem(clients, l2=0.2, weights="clients", names=NAMES, feature_names=FEATURES)
        for clients in (pairs(X, y), fx.Clients(X, y, N_ROWS))
    ]
    for problem in problems:
        assert problem.names == NAMES
        assert problem.feature_names == FEATURES
        assert np.array_equal(problem.n_rows, N_ROWS)
    assert problems[0].fingerprint == problems[1].fingerprint
    assert np.array_equal(problems[0].grad(x), problems[1].grad(x))
    expected = np.mean([0.5 * np.mean((A @ x - b) ** 2) for A, b in pairs(X, y)]) + 0.1 * x @ x
    assert problems[1].value(x) == pytest.approx(expected, rel=1e-14)


def test_stacked_sparse_rows_are_the_dense_ones() -> None:
    X, y = stacked(1)
    X[np.abs(X) < 0.8] = 0.0
    x = np.array([0.3, -0.1, 0.7, 0.2])
    dense, sparse = (
        fx.Problem(fx.Clients(A, y, N_ROWS), fit_intercept=True, l2=0.2)
        for A in (X, scipy.sparse.coo_array(X))
    )
    assert sparse.data.sparse
    np.testing.assert_allclose(sparse.grad(x), dense.grad(x), rtol=0, atol=1e-14)
    np.testing.assert_allclose(sparse.hessian(x), dense.hessian(x), rtol=0, atol=1e-14)


def test_duplicate_entries_of_a_sparse_matrix_are_added() -> None:
    entries = np.array([1.0, 2.0, 4.0]), (np.array([0, 0, 1]), np.array([0, 0, 1]))
    X = scipy.sparse.coo_array(entries, shape=(2, 2))
    (first, _), (second, _) = fx.Clients(X, [0.0, 0.0], [1, 1]).pairs()
    assert first.toarray().tolist() == [[3.0, 0.0]]
    assert second.toarray().tolist() == [[0.0, 4.0]]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_sums_over_rows_are_sums_over_clients(
    store: Store, monkeypatch: pytest.MonkeyPatch, fit_intercept: bool, shards: int
) -> None:
    """In memory, from two devices, and from the disk in several parts."""
    monkeypatch.setattr(parts, "CHUNK", 40 * P)
    X, y = stacked(2)
    data = store(X, y)
    x = np.linspace(-0.5, 1.0, P + fit_intercept)
    for in_memory in (True, False):
        problem = fx.Problem(
            data, weights="clients", fit_intercept=fit_intercept, shards=shards, in_memory=in_memory
        )
        by_rows = problem.sum_over_rows(_gradient, x)
        by_clients = problem.sum_over_clients(_gradient, x)
        Z = np.column_stack([np.ones((len(X), int(fit_intercept))), X])
        expected = sum(A.T @ (A @ x - b) / len(A) for A, b in pairs(Z, y))
        np.testing.assert_allclose(by_rows, expected, rtol=1e-13)
        np.testing.assert_allclose(by_clients, expected, rtol=1e-13)


def _gradient(oracle: Any, x: jax.Array) -> jax.Array:
    return oracle.grad(x)


# --- rows on the disk ----------------------------------------------------------------------------

CASES = {
    "FOCUS": ("squared", ALGORITHMS["FOCUS 3"]),
    "FedDR, squared": ("squared", ALGORITHMS["FedDR"]),
    "FedDR": ("logistic", ALGORITHMS["FedDR"]),
    "SCAFFOLD, mini-batches": ("logistic", lambda: fx.SCAFFOLD(local_steps=3, batch_size=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_on_the_disk_give_the_run_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where the pass over all rows is made of several parts."""
    monkeypatch.setattr(parts, "CHUNK", 40 * P)
    loss, algorithm = CASES[name]
    X, y = stacked(3, loss)
    kwargs = {"loss": loss, "l2": 0.1, "fit_intercept": True}
    memory = fx.Problem(fx.Clients(X, y, N_ROWS), **kwargs)
    disk = fx.Problem(store(X, y), in_memory=False, **kwargs)
    assert disk.data.on_disk
    assert disk.fingerprint == memory.fingerprint
    np.testing.assert_allclose(disk.constants().L_k, memory.constants().L_k, rtol=1e-13)
    np.testing.assert_allclose(disk.constants().l_k, memory.constants().l_k, rtol=1e-12)
    expected, found = (
        fx.solve(problem, algorithm(), fx.Bernoulli(0.4), rounds=20, record_every=5)
        for problem in (memory, disk)
    )
    assert_same_run(found, expected, 1e-13)


def test_only_rows_of_participants_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = stacked(4)
    problem = fx.Problem(store(X, y), in_memory=False, l2=0.1)
    mask = np.zeros((4, len(N_ROWS)), int)
    mask[:, [1, 4]] = 1
    read: list[list[int]] = []
    take = fx.Clients.take

    def watched(self: fx.Clients, ids: np.ndarray, capacity: int) -> fx.Clients:
        read.append(ids.tolist())
        return take(self, ids, capacity)

    monkeypatch.setattr(fx.Clients, "take", watched)
    everybody = list(range(len(N_ROWS)))
    fx.solve(problem, fx.FOCUS(lr=0.1), fx.Trace(mask), rounds=4, record_every=2)
    assert [ids for ids in read if ids not in (everybody, [0])] == [[1, 4], [1, 4]]


def test_a_memory_map_of_float32_is_that_of_its_values(store: Store) -> None:
    X, y = stacked(5)
    rounded = X.astype(np.float32).astype(float), y.astype(np.float32).astype(float)
    kwargs = {"l2": 0.1, "fit_intercept": True}
    wide = fx.Problem(fx.Clients(*rounded, N_ROWS), **kwargs)
    x = np.array([0.1, 0.3, -0.1, 0.7])
    runs = []
    for in_memory in (True, False):
        narrow = fx.Problem(store(X, y, np.float32), in_memory=in_memory, **kwargs)
        assert narrow.data.on_disk is not in_memory
        np.testing.assert_allclose(narrow.grad(x), wide.grad(x), rtol=1e-13)
        runs.append(fx.solve(narrow, fx.FOCUS(), fx.Bernoulli(0.5), rounds=10))
    expected = fx.solve(wide, fx.FOCUS(), fx.Bernoulli(0.5), rounds=10)
    for run in runs:
        assert_same_run(run, expected, 1e-13)


def test_a_memory_map_is_not_copied(store: Store) -> None:
    X, y = stacked(6)
    data = store(X, y)
    assert np.shares_memory(fx.Problem(data, in_memory=True).data.X, data.X)
    assert np.shares_memory(fx.Problem(data, in_memory=False).data.X, data.X)


def test_what_needs_all_rows_says_so(store: Store) -> None:
    problem = fx.Problem(store(*stacked(7)), in_memory=False)
    with pytest.raises(fx.InputError, match=r"77 rows stay on the disk.*in_memory=True"):
        _ = problem.oracles


def test_sparse_rows_cannot_stay_on_the_disk() -> None:
    X, y = stacked(7)
    with pytest.raises(fx.InputError, match=r"in_memory=False.*sparse"):
        fx.Problem(fx.Clients(scipy.sparse.csr_array(X), y, N_ROWS), in_memory=False)


@pytest.mark.slow
def test_two_devices_compute_what_one_does() -> None:
    X, y = stacked(8, "logistic")
    problems = [
        fx.Problem(fx.Clients(X, y, N_ROWS), loss="logistic", l2=0.1, shards=shards)
        for shards in (1, 2)
    ]
    for name in ("FOCUS 3", "FedDR"):
        one, two = (
            fx.solve(problem, ALGORITHMS[name](), fx.Bernoulli(0.5), rounds=20)
            for problem in problems
        )
        assert_same_run(one, two, 1e-13)


# --- taking clients out --------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_taken_clients_keep_their_rows(store: Store, ids: list[int]) -> None:
    X, y = stacked(9)
    taken = store(X, y).with_intercept().take(np.array(ids), 100)
    assert taken.X.shape == (100, P + 1)
    for (A, b), k in zip(taken.pairs(), ids, strict=True):
        mine = pairs(X, y)[k]
        assert np.array_equal(A, np.column_stack([np.ones(len(b)), mine[0]]))
        assert np.array_equal(b, mine[1])
    n = N_ROWS[ids].sum()
    assert np.all(taken.X[n:] == taken.X[0])
    assert np.all(taken.y[n:] == taken.y[0])


def test_jax_takes_aligned_arrays_as_they_are() -> None:
    array = aligned((5, 3))
    assert array.ctypes.data % 64 == 0
    array[:] = 1.0
    on_device = jax.device_put(array)
    assert on_device.unsafe_buffer_pointer() == array.ctypes.data


# --- errors --------------------------------------------------------------------------------------


def wrong(value: float, row: int = 9, column: int = 1, dtype: Any = np.float64) -> dict[str, Any]:
    """Arguments with one cell that cannot be used: by default in row 1 of Chur."""
    X, y = stacked(10)
    if column < P:
        X[row, column] = value
    else:
        y[row] = value
    return {"X": X.astype(dtype), "y": y.astype(dtype)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (wrong(np.nan), ["'Chur'", "column 'chol'", "row 1", "nan", "1 of 30 rows", "drop"]),
        (wrong(-np.inf, row=7, column=0), ["'Basel'", "column 'age'", "row 0", "-inf"]),
        (wrong(1e150), ["'Chur'", "column 'chol'", "1e+150", "rescale"]),
        (wrong(np.nan, dtype=np.float32), ["'Chur'", "column 'chol'", "row 1", "nan"]),
        (wrong(np.nan, row=76, column=P), ["'Zug'", "target", "row 28", "nan"]),
        ({"X": np.zeros((77, 0))}, ["'Bern'", "zero columns"]),
        ({"X": np.zeros(77)}, ["(rows, columns)", "(77,)"]),
        ({"y": np.zeros(70)}, ["(77,)", "(70,)"]),
        ({"y": ["a"] * 77}, ["real numbers"]),
        ({"n_rows": [7, 0, 31, 8, 2, 29]}, ["'Basel'", "zero rows"]),
        ({"n_rows": [7, 1, 30, 8, 2, 28]}, ["76", "77 rows"]),
        ({"n_rows": N_ROWS.astype(float)}, ["integers"]),
        ({"names": NAMES[:2]}, ["2 entries for 6 clients"]),
        ({"names": [*NAMES[:5], "Bern"]}, ["'Bern'"]),
        ({"feature_names": ["age"]}, ["1 names for 3 columns"]),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], words: list[str]) -> None:
    X, y = stacked(10)
    good = {"X": X, "y": y, "n_rows": N_ROWS, "names": NAMES}
    if changes.get("X", X).shape[-1] == P:
        good["feature_names"] = FEATURES
    with pytest.raises(fx.InputError) as error:
        fx.Clients(**{**good, **changes})
    for word in words:
        assert re.search(re.escape(word), str(error.value)), (word, str(error.value))


def test_a_bad_entry_of_a_sparse_matrix_is_named() -> None:
    X, y = stacked(10)
    X[np.abs(X) < 0.8] = 0.0
    X[9, 1] = np.nan
    with pytest.raises(fx.InputError, match=r"client 'Chur', column 'chol', row 1: value nan"):
        fx.Clients(scipy.sparse.csr_array(X), y, N_ROWS, NAMES, FEATURES)


def test_a_bad_cell_of_a_memory_map_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rows are checked in several blocks."""
    from fedexact import clients

    monkeypatch.setattr(clients, "CHECKED", 4 * P)
    X, y = stacked(10)
    X[9, 1] = np.nan
    with pytest.raises(fx.InputError, match=r"client 'Chur', column 'chol', row 1: value nan"):
        store(X, y, names=NAMES, feature_names=FEATURES)
