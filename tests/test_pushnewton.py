"""PushNewton: Newton where theory says so, superlinear, and safe from x = 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import linprog
from sklearn.linear_model import Lasso

import fedexact as fx
import protocol
from fedexact import config
from fedexact.algorithms.quadratic_model import diagonal, minimise, pack, unpack
from fedexact.engines.state import initial
from fedexact.losses import Logistic, Rows
from fedexact.solve import setting_of
from problems import least_squares, logistic, random_targets
from stacks import even_stack

EXAMPLES = Path(__file__).parents[1] / "examples"


# --- closed forms ---------------------------------------------------------------------------------


def test_least_squares_is_done_once_everybody_was_there() -> None:
    """The models are the f_k themselves, whatever the order of the visits."""
    problem = least_squares(1)
    masks = np.zeros((6, 4), bool)
    masks[[0, 1, 2, 3, 4], [2, 0, 2, 3, 1]] = True
    path = protocol.rounds(problem, fx.PushNewton(), masks)
    pooled = fx.reference(problem)
    assert np.linalg.norm(path.x[3] - pooled) > 1e-3
    assert_allclose(path.x[4:], np.stack([pooled] * 2), rtol=0, atol=1e-12)


def test_a_client_not_seen_counts_as_a_pull_towards_the_start() -> None:
    """x = argmin of the f_k seen and damping/2 |x - x0|^2 for each of the others."""
    problem = least_squares(2)
    oracle, x0, damping = (
        protocol.oracle_of(problem, fx.PushNewton()),
        np.array([1.0, -2.0, 3.0]),
        0.7,
    )
    masks = np.array([[True, True, False, False]])
    path = protocol.rounds(problem, fx.PushNewton(damping=damping), masks, x0=x0)
    A, b = 2 * damping * np.eye(3), 2 * damping * x0
    for k in (0, 1):
        client = oracle.client(k)
        A = A + np.asarray(client.hessian(jnp.zeros(3)))
        b = b - np.asarray(client.grad(jnp.zeros(3)))
    assert_allclose(path.x[0], np.linalg.solve(A, b), rtol=1e-12)


def test_the_first_model_of_a_latecomer_is_tangent_at_the_start() -> None:
    """One after the other, then Newton's step from x0, wherever x was in between."""
    problem, x0 = logistic(3, l2=0.05), np.array([0.5, -1.0, 0.2])
    alone = protocol.rounds(problem, fx.PushNewton(), np.eye(4, dtype=bool), x0=x0)
    together = protocol.rounds(problem, fx.PushNewton(), np.ones((1, 4), bool), x0=x0)
    assert np.linalg.norm(alone.x[2] - x0) > 0.1
    assert_allclose(alone.x[3], together.x[0], rtol=0, atol=1e-13)


def newton(problem: fx.Problem, masks: np.ndarray) -> np.ndarray:
    """(T, d) models of the undamped incremental Newton method, everybody seen at x = 0 first."""
    oracle, d = protocol.oracle_of(problem, fx.PushNewton()), problem.dim
    x, models, path = np.zeros(d), {}, []
    for mask in masks:
        for k in np.flatnonzero(mask).tolist():
            H = np.asarray(oracle.client(k).hessian(jnp.asarray(x)))
            models[k] = H, H @ x - np.asarray(oracle.client(k).grad(jnp.asarray(x)))
        x = np.linalg.solve(sum(H for H, _ in models.values()), sum(v for _, v in models.values()))
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("p", [1.0, 0.4])
def test_it_is_the_incremental_newton_method(p: float) -> None:
    problem = logistic(3, l2=0.05)
    masks = np.random.default_rng(0).random((25, 4)) < p
    masks[0] = True
    path = protocol.rounds(problem, fx.PushNewton(), masks)
    assert_allclose(path.x, newton(problem, masks), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_superlinear_when_clients_come_one_by_one() -> None:
    """Passes over the clients gain more and more digits."""
    problem = logistic(0, d=6, l2=1e-3)
    masks = np.concatenate([np.ones((1, 4), bool), np.tile(np.eye(4, dtype=bool), (8, 1))])
    path = protocol.rounds(problem, fx.PushNewton(), masks)
    error = np.linalg.norm(path.x - fx.reference(problem)[None], axis=1)[4::4]
    ratio = error[1:] / error[:-1]
    assert np.all(np.diff(ratio[:3]) < 0)
    assert ratio[2] < 1e-6


def test_a_triangle_travels() -> None:
    d = 5
    problem = least_squares(5, d=d, n_rows=(8, 8))
    result = fx.solve(problem, fx.PushNewton(), rounds=3)
    last = result.history.to_pylist()[-1]
    assert last["bytes_up"] == 8 * (d * (d + 1) // 2 + d + 1) * 6
    assert last["bytes_down"] == 8 * d * 6


# --- quadratic models -----------------------------------------------------------------------------


def spd(seed: int, d: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    Q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    return (Q * np.logspace(0, -spread, d)) @ Q.T


def test_packing() -> None:
    B = jnp.asarray(spd(0, 4))
    assert pack(B).shape == (10,)
    assert_allclose(unpack(pack(B), 4), B, rtol=0, atol=1e-16)
    assert_allclose(pack(B)[diagonal(4)], jnp.diag(B))


def test_a_singular_model_moves_only_where_it_is_curved() -> None:
    B, center = jnp.diag(jnp.array([2.0, 0.0, 1.0])), jnp.array([1.0, 5.0, 1.0])
    x = minimise(B, jnp.array([2.0, 0.0, 3.0]), center, 1.0, None, jnp.array(1.0))
    assert_allclose(x, [1.0, 5.0, 3.0], rtol=1e-12)
    x = minimise(-B, jnp.zeros(3), center, 1.0, None, jnp.array(1.0))
    assert np.all(np.isfinite(x))


def test_units_do_not_matter() -> None:
    """argmin of 1/2 x^T S B S x - u^T S x is S^-1 B^-1 u."""
    B, S = jnp.asarray(spd(4, 3)), jnp.array([1.0, 1e6, 1e-6])
    u = jnp.array([1.0, -2.0, 0.5])
    scaled = S[:, None] * B * S[None, :]
    x = minimise(scaled, S * u, jnp.zeros(3), jnp.diag(scaled), None, jnp.array(1.0))
    assert_allclose(S * x, jnp.linalg.solve(B, u), rtol=1e-11)


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_units_cost_no_digits_with_a_sign_constraint(scale: float) -> None:
    """Active constraints are met exactly, the other coordinates solve B x = u."""
    rng, S = np.random.default_rng(0), np.array([1.0, scale, 1.0 / scale, 1.0])
    X = rng.normal(size=(50, 4))
    y = X @ np.array([1.0, -1.0, 0.5, 0.1]) + 0.3 * rng.normal(size=50)
    Z = jnp.asarray(X * S)
    x = minimise(Z.T @ Z, Z.T @ y, jnp.zeros(4), 0.0, fx.NonNegative(), jnp.array(1.0))
    x = np.asarray(x)
    assert x[1] == 0.0
    free = x > 0.0
    expected = np.linalg.lstsq(X[:, free], y, rcond=None)[0]
    assert_allclose((S * x)[free], expected, rtol=1e-10)
    assert np.all(X[:, ~free].T @ (y - X @ (S * x)) < 0.0)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize(
    "g",
    [
        fx.L1(0.05),
        fx.ElasticNet(0.05, 0.5),
        fx.NonNegative(),
        fx.Box(-0.2, 0.3),
        fx.L2Ball(0.5),
        fx.GroupLasso(0.05, ((0, 1, 2), (3, 4), (5, 6, 7))),
    ],
    ids=lambda g: g.name,
)
def test_the_minimiser_with_g_is_a_fixed_point(g: Any, spread: float) -> None:
    """x = prox(x - s (B x - u), s N) for another step s than the solver's."""
    B, N = jnp.asarray(spd(1, 8, spread)), 3.0
    u = jnp.asarray(np.random.default_rng(2).normal(size=8))
    x = minimise(B, u, jnp.zeros(8), 1.0, g, jnp.array(N))
    s = 0.7
    r = np.asarray(x - g.prox(x - s * (B @ x - u), s * N))
    assert np.linalg.norm(r) < 1e-12 * max(1.0, float(jnp.linalg.norm(x)))


# --- the pooled answer ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heart() -> config.Prepared:
    return config.prepare(config.load(EXAMPLES / "heart.toml"))


def rounds_to(
    heart: config.Prepared, participation: fx.Participation, seed: int, rounds: int
) -> int:
    """Rounds until the model is within 1e-8 standard errors of the pooled fit."""
    result = fx.solve(
        heart.problem,
        fx.PushNewton(),
        participation,
        rounds=rounds,
        record_every=1,
        seed=seed,
        reference=heart.reference,
        reference_se=heart.reference_se,
    )
    there = np.flatnonzero(result.history["distance_se"].to_numpy() <= 1e-8)
    return int(there[0]) if len(there) else rounds + 1


def test_the_four_hospitals_in_eight_rounds(heart: config.Prepared) -> None:
    assert rounds_to(heart, fx.Full(), 0, 8) <= 8


@pytest.mark.slow
def test_the_four_hospitals_dropping_in_and_out(heart: config.Prepared) -> None:
    needed = [rounds_to(heart, fx.Bernoulli(0.3), seed, 60) for seed in range(20)]
    assert np.median(needed) <= 45


def test_lasso_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(6)
    clients = [
        (X, X @ (3.0 * (np.arange(8) < 3)) + rng.normal(size=30))
        for X in rng.normal(size=(4, 30, 8))
    ]
    problem = fx.Problem(clients, loss="squared", regularizer=fx.L1(0.3))
    result = fx.solve(problem, fx.PushNewton(), fx.Bernoulli(0.4), rounds=60)
    X, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    lasso = Lasso(alpha=0.3, fit_intercept=False, tol=1e-15, max_iter=100_000).fit(X, y)
    assert_allclose(result.x, lasso.coef_, rtol=0, atol=1e-9)
    assert np.array_equal(result.x == 0.0, lasso.coef_ == 0.0)
    assert (result.x == 0.0).any()


@pytest.mark.slow
def test_logistic_lasso_meets_the_optimality_conditions() -> None:
    strength = 0.02
    problem = logistic(7, (30,) * 4, d=8, l2=0.0, regularizer=fx.L1(strength))
    result = fx.solve(problem, fx.PushNewton(), fx.Bernoulli(0.4), rounds=100)
    rows, weight = problem.pooled()
    X, y = np.asarray(rows.X), np.asarray(rows.y)
    grad = X.T @ (np.asarray(weight) * (1 / (1 + np.exp(-X @ result.x)) - y))
    zero = result.x == 0.0
    assert zero.any()
    assert (~zero).any()
    assert np.all(np.abs(grad[zero]) < strength)
    assert_allclose(grad[~zero], -strength * np.sign(result.x[~zero]), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["huber", "poisson", "multinomial"])
def test_other_losses(loss: str) -> None:
    rng = np.random.default_rng(8)
    clients = []
    for _ in range(4):
        X = rng.normal(size=(15, 3))
        clients.append((X, random_targets(loss, X @ np.array([1.0, -1.0, 0.5]), rng)))
    problem = fx.Problem(clients, loss=loss, l2=0.05)
    result = fx.solve(problem, fx.PushNewton(), fx.Bernoulli(0.5), rounds=150)
    assert_allclose(result.x, fx.reference(problem), rtol=0, atol=1e-10)


def columns(loss: str, scale: np.ndarray) -> fx.Problem:
    """Four clients with three columns in units of `scale`, and an intercept."""
    rng = np.random.default_rng(12)
    clients = []
    for X in rng.normal(size=(4, 60, 3)):
        y = random_targets(loss, X @ np.array([1.0, -1.0, 0.5]), rng)
        clients.append((X * scale, y))
    return fx.Problem(clients, loss=loss, fit_intercept=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli(0.4)])
def test_columns_may_have_any_units(loss: str, participation: fx.Participation) -> None:
    scale = np.array([1.0, 1e4, 1e-4])
    plain, scaled = (
        fx.solve(columns(loss, s), fx.PushNewton(), participation, rounds=60).x
        for s in (np.ones(3), scale)
    )
    slopes = slice(0, 3) if scaled[1] / plain[1] < 1e-3 else slice(1, 4)
    units = np.ones(4)
    units[slopes] = scale
    assert_allclose(units * scaled, plain, rtol=1e-11)


# --- the safeguard --------------------------------------------------------------------------------


def test_a_step_over_the_edge_is_taken_back() -> None:
    """Poisson counts of 1000: Newton's first step leads to exp(999), the answer is log 1000."""
    clients = [(np.ones((2, 1)), np.array([1000.0, 1000.0]))] * 2
    problem = fx.Problem(clients, loss="poisson")
    oracle = protocol.oracle_of(problem, fx.PushNewton())
    with np.errstate(over="ignore"):
        far = 0.0 - float(oracle.client(0).grad(jnp.zeros(1))[0])
        assert np.isinf(np.exp(far))
    for participation in (fx.Full(), fx.Bernoulli(0.5)):
        result = fx.solve(problem, fx.PushNewton(), participation, rounds=100)
        assert_allclose(result.x, np.log([1000.0]), rtol=1e-12)


@pytest.mark.slow
def test_a_start_without_curvature() -> None:
    """Huber far from the targets: every Hessian is zero at first."""
    rng = np.random.default_rng(9)
    clients = [
        (X, X @ np.array([20.0, 30.0]) + rng.normal(size=40)) for X in 1 + rng.random((4, 40, 2))
    ]
    problem = fx.Problem(clients, loss="huber")
    oracle = protocol.oracle_of(problem, fx.PushNewton())
    assert not np.any(np.asarray(oracle.client(0).hessian(jnp.zeros(2))))
    for participation in (fx.Full(), fx.Bernoulli(0.5)):
        result = fx.solve(problem, fx.PushNewton(), participation, rounds=200)
        _, grad = problem.value_and_grad(result.x)
        assert np.linalg.norm(grad) < 1e-12


OVERFLOWS = {  # clients whose loss is infinite at the answer of another
    "a count of 3e4 first": (
        [([[1.0]] * 5, [3e4] * 5), ([[1.0]], [0.0]), ([[300.0]], [2.0])],
        1e-6,
    ),
    "a column of 1000 next": ([([[1.0]], [1000.0]), ([[1000.0]], [1.0])], 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("damping", [None, 1.0, 1e-3])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_latecomer_whose_loss_overflows(name: str, damping: float | None) -> None:
    clients, l2 = OVERFLOWS[name]
    problem = fx.Problem(clients, loss="poisson", l2=l2)
    algorithm = fx.PushNewton(damping=damping)
    result = fx.solve(problem, algorithm, fx.Cyclic(len(clients)), rounds=150, record_every=150)
    (first, last) = result.history["gradient_mapping"].to_pylist()
    assert last <= 1e-12 * first


@pytest.mark.parametrize("participation", [fx.Full(), fx.Uniform(1)])
def test_counts_of_all_sizes(participation: fx.Participation) -> None:
    """Counts up to 1e5: steps that raise the gradient a million times are taken back."""
    worst = 0.0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        b = rng.normal(size=2)
        clients = []
        for _ in range(4):
            X = rng.normal(size=(15, 2)) + rng.normal()
            mean = np.exp(np.clip(X @ b + 5.0 * rng.normal(), -20.0, 12.0))
            clients.append((X, rng.poisson(mean)))
        problem = fx.Problem(clients, loss="poisson", fit_intercept=True)
        rounds = 100 if isinstance(participation, fx.Full) else 400
        result = fx.solve(problem, fx.PushNewton(), participation, rounds=rounds, record_every=1)
        mapping = result.history["gradient_mapping"].to_numpy()
        assert result.status == "finished"
        assert mapping[-1] <= 1e-10 * mapping[0]
        worst = max(worst, float(mapping.max() / mapping[0]))
    assert worst > 1e3


class Batch(NamedTuple):
    """Random logistic problems of equally many clients, their rows padded to the same number."""

    rows: Rows  # (problems, N, MOST, ...)
    weight: jax.Array  # (problems, N, MOST)
    smoothness: jax.Array  # (problems, N)
    masks: Any  # (problems, rounds, N)


D, MOST = 4, 6  # features, rows of a client at most


def separable(X: np.ndarray, y: np.ndarray) -> bool:
    """Whether some w != 0 has (2y - 1) X w >= 0, not all zero."""
    A = (2 * y - 1)[:, None] * X
    found = linprog(-A.sum(axis=0), A_ub=-A, b_ub=np.zeros(len(A)), bounds=[(-1, 1)] * X.shape[1])
    return -found.fun > 1e-7


def random_problem(rng: np.random.Generator, N: int) -> tuple[np.ndarray, ...]:
    """X (N, MOST, D), y, mask of the real rows: each client separable, the pool not."""
    while True:
        X = rng.normal(size=(N, MOST, D)) + rng.integers(0, 3) * rng.normal(size=(N, 1, D))
        X *= 10 ** rng.uniform(-1, 1, size=(N, 1, 1)) if rng.random() < 0.3 else 1.0
        w = rng.normal(size=(N, D)) * 10 ** rng.uniform(-1, 1)
        y = (np.einsum("kmd,kd->km", X, w) > 0).astype(float)
        real = np.arange(MOST)[None, :] < rng.integers(1, MOST + 1, size=N)[:, None]
        pool = X[real]
        if len(pool) > D and np.linalg.matrix_rank(pool) == D and not separable(pool, y[real]):
            assert all(separable(X[k][real[k]], y[k][real[k]]) for k in range(N))
            return X * real[:, :, None], y, real


def batch(seed: int, N: int, problems: int, rounds: int, full: bool) -> Batch:
    rng = np.random.default_rng(seed)
    X, y, real = map(np.stack, zip(*[random_problem(rng, N) for _ in range(problems)], strict=True))
    weight = real * (N / real.sum(axis=(1, 2), keepdims=True))
    p = np.ones((problems, 1, N)) if full else rng.uniform(0.1, 0.9, size=(problems, 1, N))
    masks = rng.random((problems, rounds, N)) < p
    rows = Rows(jnp.asarray(X), jnp.asarray(y))
    curvature = jax.vmap(jax.vmap(Logistic().curvature))(rows, jnp.asarray(weight))
    return Batch(rows, jnp.asarray(weight), curvature, masks)


@jax.jit
def run_batch(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per problem and round |x|, F and |grad F|."""
    N = batch.masks.shape[-1]

    def one(rows: Rows, weight: jax.Array, smoothness: jax.Array, masks: jax.Array) -> Any:
        ridge, none = jnp.zeros(D), jnp.zeros(N)
        stack = even_stack(Logistic(), ridge, rows, weight, jnp.ones(N), smoothness, none)
        algorithm = fx.PushNewton(damping=jnp.max(smoothness))
        clients = algorithm.init_client(jnp.zeros(D))
        clients = jax.tree.map(lambda a: jnp.broadcast_to(a[None], (N, *a.shape)), clients)

        def step(state: Any, mask: jax.Array) -> Any:
            state = protocol.one_round(algorithm, stack, state[0], state[1], mask)
            x = algorithm.model(state[0])
            pooled = Rows(rows.X.reshape(-1, D), rows.y.reshape(-1))
            value = Logistic().value(x, pooled, weight.reshape(-1)) / N
            grad = Logistic().grad(x, pooled, weight.reshape(-1)) / N
            return state, (jnp.linalg.norm(x), value, jnp.linalg.norm(grad))

        return jax.lax.scan(step, (algorithm.init_server(jnp.zeros(D), N), clients), masks)[1]

    return jax.vmap(one)(*batch)


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_locally_separable_clients_from_zero(full: bool) -> None:
    """200 random problems: every run converges, no run goes up on the way."""
    for N in (2, 5, 10, 20):
        size, value, grad = (
            np.asarray(a) for a in run_batch(batch(N, N, 50, 150 if full else 500, full))
        )
        assert np.all(np.isfinite(size))
        assert np.all(value.max(axis=1) <= 2.0 * np.log(2.0))
        assert np.all(grad[:, -1] <= 1e-10), (N, grad[:, -1].max())


@pytest.mark.slow
@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli(0.5)])
def test_separation_stays_finite_and_is_not_certified(participation: fx.Participation) -> None:
    rng = np.random.default_rng(10)
    clients = [(X, (X[:, 0] > 0).astype(float)) for X in rng.normal(size=(3, 10, 2))]
    problem = fx.Problem(clients, loss="logistic")
    result = fx.solve(problem, fx.PushNewton(), participation, rounds=200)
    assert result.status != "diverged"
    assert np.all(np.isfinite(result.x))
    assert result.x[0] > 10
    assert result.certificate is not None
    assert result.certificate.verdict != "certified"


@pytest.mark.slow
@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli(0.5)])
def test_dependent_columns_give_one_of_the_minimisers(participation: fx.Participation) -> None:
    rng = np.random.default_rng(11)
    clients = [
        (np.column_stack([X, X[:, 0] + X[:, 1]]), rng.integers(0, 2, 15).astype(float))
        for X in rng.normal(size=(3, 15, 2))
    ]
    problem = fx.Problem(clients, loss="logistic")
    result = fx.solve(problem, fx.PushNewton(), participation, rounds=100)
    value, grad = problem.value_and_grad(result.x)
    assert np.isfinite(value)
    assert np.linalg.norm(grad) < 1e-12
    assert result.certificate is not None
    assert result.certificate.distance_bound is None


# --- the border -----------------------------------------------------------------------------------


def test_what_it_assumes_is_said() -> None:
    setting = setting_of(least_squares(0), fx.Bernoulli([1.0, 1.0, 0.0, 1.0]))
    met = {a.what: a.met for a in fx.PushNewton().assumptions(setting)}
    assert met == {"every f_k is convex": True, "every client keeps coming back": False}


def test_the_invariant_watches_every_sum() -> None:
    problem = logistic(3)
    algorithm = fx.PushNewton().resolve(setting_of(problem, fx.Full()))
    server, clients = initial(algorithm, problem, jnp.zeros(problem.dim))
    for field in ("A", "v", "seen"):
        wrong = server.sums._replace(**{field: getattr(server.sums, field) + 1.0})
        off = algorithm.invariant(server._replace(sums=wrong), clients)
        assert float(jnp.max(jnp.abs(off))) == 1.0


def test_the_default_damping_is_the_smoothness() -> None:
    problem = least_squares(0)
    algorithm = fx.PushNewton().resolve(setting_of(problem, fx.Full()))
    assert algorithm.damping == problem.constants().L
    server, clients = initial(algorithm, problem, jnp.ones(problem.dim))
    assert not np.any(np.asarray(algorithm.invariant(server, clients)))
