"""The exact prox by Newton steps: which way is chosen, exactness, the dual form, the count."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit

from fedexact.losses import Huber, Loss, Multinomial, Rows, make_loss
from fedexact.losses.design import Sparse
from fedexact.oracles.newton import cast, newton_prox, primal
from fedexact.oracles.proximal import prox_method
from fedexact.oracles.rows import RowOracle

prox = jax.jit(RowOracle.counted_prox)
grad = jax.jit(RowOracle.grad)
hessian = jax.jit(RowOracle.hessian)

TALL, WIDE, SMALL = (80, 40), (40, 60), (12, 4)  # (rows, columns): primal, dual, float64 only
REST = ["squared", "huber"]
LOSSES = ["logistic", "poisson", *REST]


def client(
    name: str, shape: tuple[int, int], ridge: Any = 0.0, seed: int = 0, scale: float = 1.0
) -> RowOracle:
    """The mean of a loss over random rows, with a column of ones first."""
    m, p = shape
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(m), scale * rng.normal(size=(m, p - 1)) / np.sqrt(p)])
    eta = X @ rng.normal(size=p)
    loss: Loss
    match name:
        case "logistic":
            loss, y = make_loss(name), (eta + rng.normal(size=m) > 0).astype(float)
        case "poisson":
            loss, y = make_loss(name), rng.poisson(np.exp(eta)).astype(float)
        case "huber":
            loss, y = Huber(0.7), eta + 3.0 * rng.standard_t(1, size=m)
        case "multinomial":
            loss, y = Multinomial(3), rng.integers(0, 3, m).astype(float)
        case _:
            loss, y = make_loss(name), eta + rng.normal(size=m)
    rows, weight = Rows(jnp.asarray(X), jnp.asarray(y)), jnp.full(m, 1.0 / m)
    d = loss.dim(p)
    return RowOracle(
        loss=loss,
        ridge=jnp.broadcast_to(jnp.asarray(ridge, float), (d,)),
        rows=rows,
        weight=weight,
        n_rows=jnp.asarray(m),
        smoothness=loss.curvature(rows, weight) + jnp.max(jnp.asarray(ridge)),
        strong_convexity=jnp.zeros(()),
    )


def intercept_free(d: int, ridge: float) -> np.ndarray:
    return np.append(0.0, np.full(d - 1, ridge))


def vector(oracle: RowOracle, seed: int, scale: float = 1.0) -> jax.Array:
    return scale * jnp.asarray(np.random.default_rng(seed).normal(size=len(oracle.ridge)))


def residual(oracle: RowOracle, u: jax.Array, v: jax.Array, step: float) -> float:
    """|grad f(u) + (u - v) / step| in units of what it is the difference of."""
    g, norm = grad(oracle, u), jnp.linalg.norm
    scale = norm(g) + norm(hessian(oracle, u)) * norm(u) + (norm(u) + norm(v)) / step
    return float(norm(g + (u - v) / step) / scale)


def sparse(oracle: RowOracle, keep: float, padding: int = 0) -> tuple[RowOracle, RowOracle]:
    """The client with most entries of X set to zero, dense and sparse with entries that pad."""
    rng = np.random.default_rng(1)
    X = np.where(rng.random(oracle.rows.X.shape) < keep, oracle.rows.X, 0.0)
    row, column = np.nonzero(X)
    record = Sparse(
        values=jnp.asarray(np.append(X[row, column], np.zeros(padding))),
        columns=jnp.asarray(np.append(column, np.zeros(padding)), jnp.int32),
        row=jnp.asarray(np.append(row, np.full(padding, len(X) + 3)), jnp.int32),
        shape=X.shape,
    )
    y = oracle.rows.y
    dense, thin = Rows(jnp.asarray(X), y), Rows(record, y)
    return dataclasses.replace(oracle, rows=dense), dataclasses.replace(oracle, rows=thin)


@jax.jit
def by_the_primal(
    oracle: RowOracle, v: jax.Array, step: float, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """counted_prox with (d, d) Newton matrices, whatever the shape of X."""

    def matrix(u: jax.Array, dtype: Any) -> jax.Array:
        rows, weight = cast((oracle.rows, oracle.weight), dtype)
        return oracle.loss.hessian(u.astype(dtype), rows, weight).astype(dtype)

    system = primal(matrix, oracle.ridge + 1.0 / step)
    return newton_prox(oracle._magnitude, oracle.grad, system, v, step, start)


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TALL, WIDE, SMALL])
@pytest.mark.parametrize("step", [1e-3, 1.0, 1e3])
def test_least_squares_is_a_linear_system(shape: tuple[int, int], step: float):
    d = shape[1]
    oracle = client("squared", shape, intercept_free(d, 0.2))
    v = vector(oracle, 1, 3.0)
    X, y = np.asarray(oracle.rows.X), np.asarray(oracle.rows.y)
    H = X.T @ X / len(y) + np.diag(intercept_free(d, 0.2) + 1.0 / step)
    expected = np.linalg.solve(H, X.T @ y / len(y) + v / step)
    for start in (0.0 * v, vector(oracle, 2, 100.0)):
        u = np.asarray(prox(oracle, v, step, start)[0])
        error = np.linalg.norm(u - expected) / np.linalg.norm(expected)
        assert error < 1e-15 * np.linalg.cond(H) + 1e-14


@pytest.mark.parametrize("step", [1e-8, 1e-2, 1.0, 1e2, 1e8])
def test_one_logistic_coefficient_is_a_root(step: float):
    x, y, weight = np.array([1.0, -2.0, 0.5]), np.array([1.0, 1.0, 0.0]), np.array([0.2, 0.5, 0.3])
    rows = Rows(jnp.asarray(x[:, None]), jnp.asarray(y))
    template = client("logistic", (3, 2))
    oracle = dataclasses.replace(
        template, rows=rows, weight=jnp.asarray(weight), ridge=jnp.zeros(1)
    )
    v = 0.3

    def slope(u: float) -> float:
        return float(weight @ (x * (expit(x * u) - y)) + (u - v) / step)

    root = brentq(slope, -10.0, 10.0, xtol=1e-15)
    for start in (-8.0, v, 5.0):
        u = prox(oracle, jnp.array([v]), step, jnp.array([start]))[0]
        assert float(u[0]) == pytest.approx(root, rel=1e-14)


# --- optimality -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"), [*itertools.product(LOSSES, (TALL, WIDE)), ("multinomial", TALL)]
)
def test_optimal_to_rounding_from_near_and_far(name: str, shape: tuple[int, int]):
    oracle = client(name, shape)
    for step, scale in itertools.product((1e-8, 1e-4, 1e-1, 1e1, 1e4, 1e8), (1e-2, 2.0)):
        v = vector(oracle, 3, scale)
        u = prox(oracle, v, step, vector(oracle, 4, 4.0))[0]
        assert residual(oracle, u, v, step) < 1e-14
        near = prox(oracle, v, step, u * (1.0 + 1e-7))[0]
        assert residual(oracle, near, v, step) < 1e-14


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("name", LOSSES)
def test_the_prox_inverts_the_forward_step(name: str, shape: tuple[int, int]):
    # u = prox(u + step grad f(u)), in the units of the condition number of the system
    oracle = client(name, shape, 0.1)
    u = vector(oracle, 5)
    for step in (1e-2, 1.0, 30.0):
        v = u + step * grad(oracle, u)
        H = hessian(oracle, u) + jnp.eye(len(u)) / step
        for start in (0.0 * u, v, u * (1.0 + 1e-4)):
            error = jnp.linalg.norm(prox(oracle, v, step, start)[0] - u)
            assert float(error) < 4e-15 * float(jnp.linalg.cond(H) * jnp.linalg.norm(v))


def test_ill_conditioned_columns_are_left_to_float64():
    # columns of sizes 1 to 1e6: a condition number above what float32 resolves
    oracle = client("logistic", TALL)
    sizes = jnp.logspace(0, 6, TALL[1])
    rows = Rows(oracle.rows.X * sizes[None, :], oracle.rows.y)
    oracle = dataclasses.replace(oracle, rows=rows)
    v, step = vector(oracle, 6) / sizes, 1e-2
    u = prox(oracle, v, step, jnp.zeros_like(v))[0]
    g = grad(oracle, u) + (u - v) / step
    scale = jnp.sum(jnp.abs(rows.X), axis=0) / TALL[0] + (jnp.abs(u) + jnp.abs(v)) / step
    assert float(jnp.max(jnp.abs(g) / scale)) < 1e-13  # in every coefficient's own units


def test_a_full_step_that_overflows_is_halved():
    # counts far above exp of the start: the first Newton step leads to exp(1000)
    oracle = client("poisson", SMALL)
    oracle = dataclasses.replace(oracle, rows=Rows(oracle.rows.X, jnp.full(SMALL[0], 1e6)))
    start = jnp.zeros(SMALL[1])
    v, step = jnp.zeros(SMALL[1]), 1e3
    p = jnp.linalg.solve(oracle.hessian(start) + jnp.eye(len(start)) / step, -oracle.grad(start))
    assert not bool(jnp.isfinite(oracle.value(start + p)))
    u = prox(oracle, v, step, start)[0]
    assert residual(oracle, u, v, step) < 1e-14


# --- the dual form --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize(
    "name", ["logistic", "poisson", *(pytest.param(n, marks=pytest.mark.slow) for n in REST)]
)
def test_dual_and_primal_agree(name: str, step: float):
    d = WIDE[1]
    oracle = client(name, WIDE, intercept_free(d, 0.05))
    v = vector(oracle, 7)
    for start in (jnp.zeros(d), vector(oracle, 8)):
        dual_u, primal_u = prox(oracle, v, step, start)[0], by_the_primal(oracle, v, step, start)[0]
        error = jnp.linalg.norm(dual_u - primal_u) / jnp.linalg.norm(primal_u)
        assert float(error) < 1e-12


@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_sparse_rows_have_the_prox_of_dense_ones(shape: tuple[int, int]):
    oracle = client("poisson", shape, intercept_free(shape[1], 0.05))
    dense, thin = sparse(oracle, keep=0.2, padding=7)
    v = vector(oracle, 9)
    for step in (1e-3, 1.0, 1e3):
        expected = prox(dense, v, step, 0.0 * v)[0]
        np.testing.assert_allclose(
            prox(thin, v, step, 0.0 * v)[0], expected, rtol=0, atol=1e-13 * float(jnp.max(v**2))
        )


def test_rows_of_weight_zero_change_nothing_in_the_dual():
    oracle = client("logistic", WIDE, 0.05)
    X, y = oracle.rows
    rows = Rows(jnp.concatenate([X, X[:5]]), jnp.concatenate([y, y[:5]]))
    more = dataclasses.replace(
        oracle, rows=rows, weight=jnp.concatenate([oracle.weight, jnp.zeros(5)])
    )
    v = vector(oracle, 10)
    for step in (1e-3, 1e3):
        np.testing.assert_allclose(
            prox(more, v, step, v)[0], prox(oracle, v, step, v)[0], rtol=0, atol=1e-13
        )


def test_many_columns_and_few_rows():
    # d = 20,000: a (d, d) matrix would take 3 GB
    oracle = client("logistic", (6, 20_000), intercept_free(20_000, 1e-3))
    _, thin = sparse(oracle, keep=0.01)
    v, step = vector(oracle, 11), 10.0
    u = prox(thin, v, step, 0.0 * v)[0]
    g = grad(thin, u)
    scale = jnp.linalg.norm(g) + (jnp.linalg.norm(u) + jnp.linalg.norm(v)) / step
    assert float(jnp.linalg.norm(g + (u - v) / step) / scale) < 1e-14


# --- the number of gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [pytest.param(TALL, marks=pytest.mark.slow), WIDE, SMALL])
def test_every_gradient_is_counted(shape: tuple[int, int]):
    oracle = client("poisson", shape, 0.01)
    calls: list[jax.Array] = []

    def counting(u: jax.Array) -> jax.Array:
        calls.append(u)
        return oracle.grad(u)

    for start, step in ((0.01, 0.1), (1.0, 100.0), (4.0, 100.0)):
        v, u0 = vector(oracle, 12), vector(oracle, 13, start)
        calls.clear()
        with jax.disable_jit():  # conditionals and loops run as Python's
            system = oracle._newton_system(step)
            _, count = newton_prox(oracle._magnitude, counting, system, v, step, u0)
        assert int(count) == len(calls)
        assert len(calls) > 1


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("name", LOSSES)
def test_a_start_at_the_solution_costs_one_gradient(name: str, shape: tuple[int, int]):
    oracle = client(name, shape, 0.5)
    u, step = vector(oracle, 14), 1.0
    again, count = prox(oracle, u + step * grad(oracle, u), step, u)
    np.testing.assert_array_equal(again, u)
    assert int(count) == 1


def test_warm_starts_cost_fewer_gradients():
    oracle = client("logistic", TALL, 0.1)
    v, step = vector(oracle, 15), 3.0
    u = prox(oracle, v, step, v)[0]
    counts = [int(prox(oracle, v, step, u + vector(oracle, 16, e))[1]) for e in (1.0, 1e-3, 1e-7)]
    assert counts[0] > counts[1] > counts[2]
    assert counts[2] <= 3


# --- clients at once, and the rule ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [TALL, pytest.param(WIDE, marks=pytest.mark.slow)])
def test_clients_at_once_have_the_prox_of_each(shape: tuple[int, int]):
    # the loops run in lockstep: cold, warm and finished clients must not disturb one another
    oracles = [client("poisson", shape, 0.05, seed=seed) for seed in range(3)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *oracles)
    v = jnp.stack([vector(oracles[0], 20 + k) for k in range(3)])
    step = 2.0
    warm = prox(oracles[2], v[2], step, v[2])[0]
    start = jnp.stack([5.0 * v[0], v[1], warm])
    u, counts = jax.jit(jax.vmap(lambda o, v, s: o.counted_prox(v, step, s)))(together, v, start)
    for k, oracle in enumerate(oracles):
        alone, count = prox(oracle, v[k], step, start[k])
        np.testing.assert_allclose(u[k], alone, rtol=0, atol=1e-12)
        assert abs(int(counts[k]) - int(count)) <= 1  # rounding may differ in the last step


@pytest.mark.parametrize(
    ("name", "d", "m", "n_clients", "expected"),
    [
        ("squared", 100, 200, 100, "factored"),
        ("squared", 100, 200, 10**6, "newton"),  # 80 GB of factors
        ("squared", 501, 1000, 10, "gradient"),
        ("squared", 47_000, 300, 10, "newton"),
        ("logistic", 500, 10**5, 10, "newton"),
        ("logistic", 501, 501, 10, "gradient"),
        ("logistic", 47_000, 500, 10**6, "newton"),
        ("logistic", 47_000, 501, 10, "gradient"),
        ("multinomial", 501, 20, 10, "gradient"),
        ("multinomial", 500, 20, 10, "newton"),
    ],
)
def test_the_rule(name: str, d: int, m: int, n_clients: int, expected: str):
    loss = Multinomial(3) if name == "multinomial" else make_loss(name)
    assert prox_method(loss, d, m, n_clients) == expected
