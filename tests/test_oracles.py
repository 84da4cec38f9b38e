"""The objective of a client that holds rows, its prox in three ways, and the buckets."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import fedexact as fx
from fedexact.core import float64
from fedexact.losses import Huber, Logistic, Loss, Multinomial, Rows, make_loss
from fedexact.oracles import RowOracle, Stack, bucket_sizes, factorise
from stacks import stack_of

D = 4  # coefficients of the linear losses
RIDGE = 0.3

value = jax.jit(RowOracle.value)
grad = jax.jit(RowOracle.grad)
hessian = jax.jit(RowOracle.hessian)
stochastic_grad = jax.jit(RowOracle.stochastic_grad, static_argnames="batch_size")
prox = jax.jit(RowOracle.prox)
slow_grad = jax.jit(lambda oracle, x: jax.grad(oracle.value)(x))
slow_hessian = jax.jit(lambda oracle, x: jax.hessian(oracle.value)(x))


def make(
    loss: Loss,
    X: Any,
    y: Any,
    weight: Any = None,
    ridge: float = 0.0,
    method: str = "newton",
    n_rows: int | None = None,
) -> RowOracle:
    """One client, of the mean of its rows unless weights are given."""
    rows = Rows(jnp.asarray(X, float), jnp.asarray(y, float))
    m = len(rows.y)
    weight = jnp.full(m, 1.0 / m) if weight is None else jnp.asarray(weight, float)
    return RowOracle(
        loss=loss,
        ridge=jnp.full(loss.dim(rows.X.shape[1]), ridge),
        rows=rows,
        weight=weight,
        n_rows=jnp.asarray(m if n_rows is None else n_rows),
        smoothness=loss.curvature(rows, weight) + ridge,
        strong_convexity=jnp.asarray(ridge),
        prox_method=method,
    )


def data(case: str, m: int = 12, seed: int = 0) -> tuple[Loss, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(m), rng.normal(size=(m, D - 1))])
    eta = X @ rng.normal(size=D)
    flipped = rng.random(m) < 0.3
    match case:
        case "squared":
            return make_loss("squared"), X, eta + rng.normal(size=m)
        case "logistic":
            return make_loss("logistic"), X, ((eta > 0) ^ flipped).astype(float)
        case "separable":
            return make_loss("logistic"), X, (eta > 0).astype(float)
        case "poisson":
            return make_loss("poisson"), X, rng.poisson(np.exp(0.5 * eta)).astype(float)
        case "large counts":
            return make_loss("poisson"), X, rng.poisson(np.exp(0.5 * eta + 12.0)).astype(float)
        case "huber":
            return Huber(0.7), X, eta + 5.0 * rng.standard_t(1, size=m)
        case _:
            return Multinomial(3), X[:, :2], rng.integers(0, 3, m).astype(float)


CASES = ["squared", "logistic", "separable", "poisson", "large counts", "huber", "multinomial"]


def client(case: str, **kwargs: Any) -> RowOracle:
    return make(*data(case), **kwargs)


def vector(oracle: RowOracle, seed: int, scale: float = 1.0) -> jax.Array:
    return scale * jnp.asarray(np.random.default_rng(seed).normal(size=len(oracle.ridge)))


def residual(oracle: RowOracle, u: jax.Array, v: jax.Array, step: float) -> float:
    """|grad f(u) + (u - v) / step| in units of what it is the difference of."""
    g = grad(oracle, u)
    norm = jnp.linalg.norm
    H = norm(hessian(oracle, u))
    scale = norm(g) + H * norm(u) + (norm(u) + norm(v)) / step
    return float(norm(g + (u - v) / step) / scale)


def padded(oracle: RowOracle, extra: int) -> RowOracle:
    """The client behind whose rows stand rows of weight 0."""
    X, y = oracle.rows
    rows = Rows(jnp.concatenate([X, 7.0 + X[:extra]]), jnp.concatenate([y, y[:extra]]))
    weight = jnp.concatenate([oracle.weight, jnp.zeros(extra)])
    return dataclasses.replace(oracle, rows=rows, weight=weight)


# --- value and derivatives ------------------------------------------------------------------------


def test_least_squares_by_hand():
    # client 1 of the two-client example, as sums: f(x) = 1/2 (2^2 + (x - 2)^2)
    oracle = factorise(make(make_loss("squared"), [[0.0], [1.0]], [2.0, 2.0], weight=[1.0, 1.0]))
    x = jnp.array([5.0])
    assert float(value(oracle, x)) == pytest.approx(0.5 * (4 + 9), abs=1e-14)
    np.testing.assert_allclose(grad(oracle, x), [3.0], atol=1e-14)
    np.testing.assert_allclose(hessian(oracle, x), [[1.0]], atol=1e-14)
    np.testing.assert_allclose(prox(oracle, x, 0.5, x), [(2 + 5 / 0.5) / (1 + 1 / 0.5)], atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_derivatives_are_those_of_the_value(case: str):
    oracle = client(case, ridge=RIDGE)
    x = vector(oracle, 1)
    np.testing.assert_allclose(grad(oracle, x), slow_grad(oracle, x), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(hessian(oracle, x), slow_hessian(oracle, x), rtol=1e-10, atol=1e-10)


def test_the_ridge_acts_per_coordinate():
    oracle = client("logistic")
    some = dataclasses.replace(oracle, ridge=jnp.array([0.0, 1.0, 2.0, 3.0]))
    x = vector(oracle, 2)
    assert float(some.value(x) - oracle.value(x)) == pytest.approx(
        0.5 * float(x[1] ** 2 + 2 * x[2] ** 2 + 3 * x[3] ** 2), rel=1e-12
    )


# --- prox -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1e-4, 1e-1, 1e2, 1e6])
@pytest.mark.parametrize("case", CASES)
def test_newton_prox_is_optimal(case: str, step: float):
    oracle = client(case)
    for seed, scale in itertools.product((0, 1), (1e-2, 3.0)):
        v = vector(oracle, seed, scale)
        u = prox(oracle, v, step, jnp.zeros_like(v))
        assert residual(oracle, u, v, step) < 1e-12


@pytest.mark.parametrize("step", [1e-4, 1e-1, 1e2, 1e6])
def test_factored_prox_solves_the_normal_equations(step: float):
    loss, X, y = data("squared")
    oracle = factorise(make(loss, X, y, ridge=RIDGE))
    v = vector(oracle, 3, 10.0)
    u = prox(oracle, v, step, jnp.zeros_like(v))
    H = X.T @ X / len(y) + (RIDGE + 1 / step) * np.eye(D)
    np.testing.assert_allclose(u, np.linalg.solve(H, X.T @ y / len(y) + v / step), rtol=1e-12)
    assert residual(oracle, u, v, step) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_prox_inverts_the_forward_step(case: str):
    # u = prox(u + step grad f(u)): a closed form for every convex f
    oracle = client(case, ridge=RIDGE)
    u = vector(oracle, 4)
    step = 1.0 / float(jnp.linalg.norm(hessian(oracle, u)))
    v = u + step * grad(oracle, u)
    for start in (u, v, jnp.zeros_like(u)):
        rounding = 1e-12 * (1.0 + float(jnp.linalg.norm(v)))
        np.testing.assert_allclose(prox(oracle, v, step, start), u, rtol=0, atol=rounding)


@pytest.mark.parametrize("case", ["separable", "large counts", "huber"])
def test_newton_prox_does_not_depend_on_the_start(case: str):
    oracle = client(case)
    v, step = vector(oracle, 5), 1e3
    from_zero = prox(oracle, v, step, jnp.zeros_like(v))
    for seed in range(3):
        far = prox(oracle, v, step, vector(oracle, seed, 10.0))
        np.testing.assert_allclose(far, from_zero, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_prox_is_firmly_nonexpansive(case: str):
    oracle = client(case)
    for seed, step in itertools.product(range(5), (1e-2, 10.0)):
        v, w = vector(oracle, seed, 4.0), vector(oracle, 100 + seed, 4.0)
        change = prox(oracle, v, step, v) - prox(oracle, w, step, w)
        assert float(change @ change) <= float(change @ (v - w)) * (1 + 1e-9)


def test_newton_prox_with_a_rank_deficient_hessian():
    # two equal columns and 1 / step far below the rounding of the Hessian
    rng = np.random.default_rng(0)
    column = 1e6 * rng.normal(size=30)
    y = (rng.random(30) < 0.5).astype(float)
    oracle = make(make_loss("logistic"), np.column_stack([column, column]), y)
    v, step = jnp.array([1.0, -1.0]), 1e8
    u = prox(oracle, v, step, jnp.zeros(2))
    assert residual(oracle, u, v, step) < 1e-12
    assert float(jnp.sum(u)) == pytest.approx(0.0, abs=1e-4)  # the coefficient of the column


def test_prox_of_one_row_and_one_coefficient():
    # log(1 + e^u) + (u - v)^2 / (2 step) with v = u0 + step sigmoid(u0)
    oracle = make(make_loss("logistic"), [[1.0]], [0.0])
    u0, step = 0.4, 2.0
    v = jnp.array([u0 + step / (1 + np.exp(-u0))])
    assert float(prox(oracle, v, step, v)[0]) == pytest.approx(u0, abs=1e-14)


# --- prox by gradient steps -----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["squared", "logistic", "huber", "multinomial", "poisson"])
def test_gradient_prox_keeps_the_relative_rule(case: str):
    oracle = client(case, ridge=RIDGE, method="gradient")
    for seed, step in itertools.product(range(4), (0.1, 3.0)):
        v, start = vector(oracle, seed), vector(oracle, 50 + seed)
        u = prox(oracle, v, step, start)
        r = jnp.linalg.norm(grad(oracle, u) + (u - v) / step)
        assert float(r) <= 0.5 * float(jnp.linalg.norm(u - start)) / step
        assert float(jnp.linalg.norm(u - start)) > 0.0


@pytest.mark.parametrize("case", ["squared", "logistic", "poisson"])
def test_warm_started_gradient_prox_converges_to_the_prox(case: str):
    oracle = client(case, ridge=RIDGE)
    inexact = dataclasses.replace(oracle, prox_method="gradient")
    v, step = vector(oracle, 6), 1.0
    u = jnp.zeros_like(v)
    for _ in range(60):
        u = prox(inexact, v, step, u)
    np.testing.assert_allclose(u, prox(oracle, v, step, v), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(prox(inexact, v, step, u), u, rtol=1e-14, atol=1e-14)


def test_gradient_prox_backtracks_where_the_curvature_grows():
    oracle = make(make_loss("poisson"), [[1.0]], [1.0], method="gradient")
    v, step, start = jnp.array([0.0]), 1.0, jnp.array([5.0])

    def objective(u: jax.Array) -> float:
        return float(value(oracle, u) + jnp.sum((u - v) ** 2) / (2 * step))

    slope = grad(oracle, start) + (start - v) / step
    plain = start - slope / (oracle.smoothness + 1 / step)
    assert objective(plain) > objective(start)
    u = prox(oracle, v, step, start)
    assert objective(u) < objective(start)
    assert float(jnp.linalg.norm(grad(oracle, u) + (u - v) / step)) <= 0.5 * float(
        abs(u - start)[0]
    )


# --- rows: padding, batches, stacks ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str):
    oracle = client(case, ridge=RIDGE)
    more = padded(oracle, 5)
    x = vector(oracle, 7, 0.3)
    for method in (value, grad, hessian):
        np.testing.assert_allclose(method(more, x), method(oracle, x), rtol=1e-13, atol=1e-13)
    step = 1.0 / float(jnp.linalg.norm(hessian(oracle, x)))
    np.testing.assert_allclose(
        prox(more, x, step, x), prox(oracle, x, step, x), rtol=1e-12, atol=1e-12
    )
    key = jax.random.key(3)
    batch = stochastic_grad(oracle, x, key, batch_size=4)
    np.testing.assert_array_equal(stochastic_grad(more, x, key, batch_size=4), batch)


def test_a_batch_of_one_is_a_row_drawn_uniformly():
    loss, X, y = data("logistic", m=5)
    weight = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    oracle = padded(make(loss, X, y, weight=weight, ridge=RIDGE), 3)
    x = vector(oracle, 8)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: oracle.stochastic_grad(x, key, 1)))
    drawn = np.asarray(draw(keys))

    probability = 1 / (1 + np.exp(-X @ np.asarray(x)))
    per_row = 5 * (weight * (probability - y))[:, None] * X + RIDGE * np.asarray(x)[None, :]
    np.testing.assert_allclose(per_row.mean(axis=0), grad(oracle, x), rtol=1e-12)
    distance = np.abs(drawn[:, None, :] - per_row[None, :, :]).max(axis=2)
    assert distance.min(axis=1).max() < 1e-12  # every draw is one of the real rows
    counts = np.bincount(distance.argmin(axis=1), minlength=5)
    assert np.abs(counts - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)


def test_batches_are_unbiased():
    oracle = client("poisson", ridge=RIDGE)
    x = vector(oracle, 9, 0.3)
    keys = jax.random.split(jax.random.key(1), 3000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: oracle.stochastic_grad(x, key, 6)))(keys))
    error = drawn.std(axis=0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(axis=0) - grad(oracle, x)) < 5 * error).all()


def test_batches_are_functions_of_the_key():
    oracle = client("logistic")
    x = vector(oracle, 10)
    one, again, other = (
        np.asarray(stochastic_grad(oracle, x, jax.random.key(seed), batch_size=3))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


@jax.jit
def answers(oracle: RowOracle, x: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    batch = oracle.stochastic_grad(x, jax.random.key(0), 2)
    return oracle.value(x), oracle.grad(x), oracle.hessian(x), batch, oracle.prox(v, 0.7, x)


def same_leaves(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in leaves)


@pytest.mark.parametrize("method", ["newton", "gradient"])
def test_a_client_of_a_stack_is_that_client(method: str):
    singles = [
        make(*data("logistic", m=9, seed=seed), ridge=RIDGE, method=method, n_rows=9 - seed)
        for seed in range(3)
    ]
    stacked = stack_of(singles)
    pick = jax.jit(Stack.client)
    for j, single in enumerate(singles):
        picked = pick(stacked, jnp.asarray(j))
        assert same_leaves((picked.rows, picked.weight), (single.rows, single.weight))
        assert picked.prox_method == method
        x, v = vector(single, j), vector(single, 10 + j)
        assert same_leaves(answers(picked, x, v), answers(single, x, v))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_client_among_others_of_other_sizes(shards: int, sparse: bool):
    """Also the first and the last ones, whose slices are moved to stay inside the rows."""
    rng = np.random.default_rng(1)
    clients = [data("logistic", m=m, seed=k)[1:] for k, m in enumerate([30, 4, 33, 3] * 2)]
    clients = [(A * (rng.random(A.shape) < 0.5), b) for A, b in clients]
    given = [(scipy.sparse.csr_array(A), b) for A, b in clients] if sparse else clients
    problem = fx.Problem(given, loss="logistic", l2=RIDGE, weights="clients", shards=shards)
    compiled = jax.jit(answers)
    with float64():
        for k, (A, b) in enumerate(clients):
            single = make(Logistic(), A, b, ridge=RIDGE)
            slot, bucket = problem.layout.slot_of[k], int(problem.layout.bucket_of[k])
            x, v = vector(single, k), vector(single, 10 + k)
            for size in (bucket, None):
                mine = problem.oracles.client(slot, size)
                assert float(jnp.sum(mine.weight > 0)) == len(b)
                for got, expected in zip(compiled(mine, x, v), compiled(single, x, v), strict=True):
                    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["newton", "gradient"])
def test_prox_of_all_clients_at_once(method: str):
    singles = [make(*data("separable", m=9, seed=seed), method=method) for seed in range(3)]
    stacked = stack_of(singles)
    v = jnp.stack([vector(single, 3, 2.0) for single in singles])
    together = jax.jit(jax.vmap(lambda j, v: stacked.client(j).prox(v, 50.0, 0.0 * v)))(
        jnp.arange(3), v
    )
    for j, single in enumerate(singles):
        alone = prox(single, v[j], 50.0, 0.0 * v[j])
        np.testing.assert_allclose(together[j], alone, rtol=1e-10)


# --- buckets --------------------------------------------------------------------------------------


def best_by_enumeration(n_rows: np.ndarray, max_buckets: int, slack: float) -> tuple[int, int]:
    """(number of buckets, padded rows) over all ways to cut the sorted sizes."""
    sizes = np.sort(n_rows)
    N = len(sizes)
    best: tuple[int, int] = (0, 0)
    for b in range(1, min(max_buckets, len(np.unique(sizes))) + 1):
        padded_rows = min(
            sum(int(sizes[end - 1]) * (end - start) for start, end in itertools.pairwise(cuts))
            for inner in itertools.combinations(range(1, N), b - 1)
            for cuts in [(0, *inner, N)]
        )
        best = (b, padded_rows)
        if padded_rows <= slack * sizes.sum():
            break
    return best


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.1, 1.5]),
)
def test_buckets_are_the_best_partition(sizes: list[int], max_buckets: int, slack: float):
    n_rows = np.array(sizes)
    buckets = bucket_sizes(n_rows, max_buckets, slack)
    check_partition(n_rows, buckets)
    rows = sum(size * len(members) for size, members in buckets)
    assert (len(buckets), rows) == best_by_enumeration(n_rows, max_buckets, slack)


def check_partition(n_rows: np.ndarray, buckets: list[tuple[int, np.ndarray]]) -> None:
    everybody = np.concatenate([members for _, members in buckets])
    assert sorted(everybody) == list(range(len(n_rows)))
    assert [size for size, _ in buckets] == [n_rows[members].max() for _, members in buckets]
    assert all((np.diff(members) > 0).all() for _, members in buckets)
    assert sorted(size for size, _ in buckets) == [size for size, _ in buckets]


def test_equal_clients_share_one_bucket():
    [(size, members)] = bucket_sizes(np.full(6, 17))
    assert size == 17
    assert members.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("N", [300, 5000])
def test_a_power_law_of_sizes_fits_in_few_buckets(N: int):
    u = np.random.default_rng(0).random(N)
    n_rows = np.minimum(20_000, (2 / u**1.2).astype(int))
    buckets = bucket_sizes(n_rows)
    check_partition(n_rows, buckets)
    assert len(buckets) <= 14
    assert sum(size * len(members) for size, members in buckets) <= 1.25 * n_rows.sum()
