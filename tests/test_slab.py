"""States of many clients: only those that were visited take memory, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.engines import slab
from fedexact.engines.compiled import Compiled
from fedexact.engines.slab import FEW, Slab
from fedexact.engines.state import initial
from fedexact.layout import Layout
from fedexact.solve import setting_of

MANY = FEW + 50  # clients


def scattered(n_clients: int, **kwargs: object) -> fx.Problem:
    """Clients of one or two rows."""
    rng = np.random.default_rng(0)
    n_rows = rng.integers(1, 3, n_clients)
    X = rng.normal(size=(n_rows.sum(), 2))
    y = X @ np.array([1.0, -2.0]) + 0.1 * rng.normal(size=len(X))
    return fx.Problem(fx.Clients(X, y, n_rows), l2=0.5, **kwargs)  # type: ignore[arg-type]


def assert_equal(a: fx.Result, b: fx.Result) -> None:
    """Bit for bit."""
    for side in ("server", "clients"):
        mine, theirs = getattr(a, side), getattr(b, side)
        assert mine.keys() == theirs.keys()
        for field in mine:
            assert np.array_equal(mine[field], theirs[field]), field
    assert a.history.equals(b.history)
    assert a.never_present == b.never_present


@pytest.fixture(scope="module")
def many() -> fx.Problem:
    return scattered(MANY)


X0 = np.array([0.3, -0.2])

ALGORITHMS: dict[str, Callable[[], fx.Algorithm]] = {
    "FOCUS": lambda: fx.FOCUS(lr=1e-3),
    "FedDR": lambda: fx.FedDR(step=0.3),
    "FedProx": lambda: fx.FedProx(step=0.3),  # a client holds nothing between its visits
}


def run(problem: fx.Problem, name: str, rounds: int = 6, **kwargs: object) -> fx.Result:
    kwargs = {"participation": fx.Uniform(40), "record_every": 3, "x0": X0, **kwargs}
    return fx.solve(problem, ALGORITHMS[name](), rounds=rounds, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_places_when_visited_are_places_from_the_start(
    many: fx.Problem, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lazy = run(many, name)
    monkeypatch.setattr(slab, "FEW", MANY)
    assert_equal(lazy, run(many, name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_never_visited_keep_the_initial_state(many: fx.Problem, name: str) -> None:
    result = run(many, name)
    never = np.isin(many.names, result.never_present)
    assert MANY - 240 <= never.sum() < MANY - 200
    algorithm = ALGORITHMS[name]().resolve(setting_of(many, fx.Uniform(40)))
    server, clients = initial(algorithm, many, jnp.asarray(X0))
    assert np.all(Compiled().load(many, server, clients).clients.place < 0)
    leaves, states = jax.tree.leaves(clients), result.clients.values()
    for expected, got in zip(leaves, states, strict=True):
        assert got.shape == (MANY, *np.shape(expected)[1:])
        assert np.array_equal(got[never], np.asarray(expected)[never])
        assert not np.array_equal(got[~never], np.asarray(expected)[~never])


def test_a_resumed_run_is_the_uninterrupted_one(many: fx.Problem) -> None:
    half = run(many, "FedDR", rounds=3)
    assert_equal(run(many, "FedDR", resume=half), run(many, "FedDR"))


@pytest.mark.parametrize("shards", [1, 2])
def test_places_grow_with_the_clients_visited(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """From few places to one for everybody, in rounds that visit more and more clients."""
    problem = scattered(60, shards=shards)
    mask = np.tri(12, 60, dtype=int).repeat(5, axis=1)[:, :60]
    everybody = run(problem, "FedDR", rounds=12, participation=fx.Trace(mask))
    monkeypatch.setattr(slab, "FEW", 4)
    grown = run(problem, "FedDR", rounds=12, participation=fx.Trace(mask))
    assert_equal(grown, everybody)


@pytest.mark.parametrize("shards", [1, 2])
def test_as_many_places_as_visits_need(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    monkeypatch.setattr(slab, "FEW", 4)
    n_rows = np.full(100, 2)
    layout = Layout(n_rows, n_rows, shards)
    lazy = Slab.load(layout, np.broadcast_to(np.array([1.0, 2.0]), (100, 2)))
    sizes, visited = [], np.zeros(0, int)
    for ids in ([0, 99], [0, 1, 1, 99], [60, 61, 62, 63], np.arange(100)):
        before = {k: int(lazy.place[k]) for k in visited}
        visited = np.union1d(visited, ids)
        lazy = lazy.with_places(layout, np.asarray(ids))
        assert all(lazy.place[k] == place for k, place in before.items())
        assert np.array_equal(np.flatnonzero(lazy.place >= 0), visited)
        for s in range(shards):
            mine = lazy.place[visited[layout.shard_of[visited] == s]]
            assert np.array_equal(np.sort(mine), np.arange(len(mine)))
        sizes.append(lazy.states.shape[0])
        assert np.array_equal(lazy.in_client_order(layout), np.tile([1.0, 2.0], (100, 1)))
    assert sizes == [4, 4, 16, 100]


def test_states_that_differ_have_their_places_from_the_start() -> None:
    n_rows = np.ones(MANY, int)
    layout = Layout(n_rows, n_rows, 1)
    states = np.arange(2.0 * MANY).reshape(MANY, 2)
    loaded = Slab.load(layout, states)
    assert np.all(loaded.place >= 0)
    assert loaded.with_places(layout, np.arange(MANY)) is loaded
    assert np.array_equal(loaded.in_client_order(layout), states)
