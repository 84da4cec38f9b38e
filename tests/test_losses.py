"""Losses: closed forms, derivatives, constants, the labels and the losses that must be refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from fedexact.errors import InputError
from fedexact.losses import (
    LOSSES,
    CustomLoss,
    Huber,
    Logistic,
    Loss,
    Multinomial,
    Poisson,
    Rows,
    Squared,
    make_loss,
)
from fedexact.losses.spectrum import MARGIN, gram_largest, gram_smallest, largest_eigenvalue
from problems import LOSS_CASES, targets_for

M, P = 13, 3
every_loss = pytest.mark.parametrize("loss", LOSS_CASES.values(), ids=LOSS_CASES.keys())

value = jax.jit(lambda loss, x, rows, weight: loss.value(x, rows, weight))
grad = jax.jit(lambda loss, x, rows, weight: loss.grad(x, rows, weight))
hessian = jax.jit(lambda loss, x, rows, weight: loss.hessian(x, rows, weight))
curvature = jax.jit(lambda loss, rows, weight: loss.curvature(rows, weight))


def problem(loss: Loss, seed: int = 0, m: int = M) -> tuple[np.ndarray, Rows, Array]:
    """x, rows and weights (one of them 0)."""
    rng = np.random.default_rng(seed)
    rows = Rows(jnp.asarray(rng.normal(size=(m, P))), jnp.asarray(targets_for(loss, m, rng)))
    weight = rng.uniform(0.5, 2.0, size=m)
    weight[-1] = 0.0
    return rng.normal(size=loss.dim(P)), rows, jnp.asarray(weight)


# --- values against an independent source ---------------------------------------------------------


def test_values_are_negative_log_likelihoods():
    def check(loss: Loss, expected) -> None:
        x, rows, _ = problem(loss)
        X, y = np.asarray(rows.X), np.asarray(rows.y)
        np.testing.assert_allclose(loss.values(jnp.asarray(x), rows), expected(X, x, y), rtol=1e-12)

    half_log = 0.5 * np.log(2 * np.pi)
    check(Squared(), lambda X, x, y: -scipy.stats.norm.logpdf(y, X @ x) - half_log)
    check(Logistic(), lambda X, x, y: -scipy.stats.bernoulli.logpmf(y, scipy.special.expit(X @ x)))
    check(
        Poisson(),
        lambda X, x, y: (
            -scipy.stats.poisson.logpmf(y, np.exp(X @ x)) - scipy.special.gammaln(y + 1)
        ),
    )
    check(Huber(0.7), lambda X, x, y: scipy.special.huber(0.7, X @ x - y))

    def multinomial(X, x, y):
        eta = np.column_stack([np.zeros(len(y)), X @ x.reshape(P, 3)])
        return -scipy.special.log_softmax(eta, axis=1)[np.arange(len(y)), y.astype(int)]

    check(Multinomial(4), multinomial)


@every_loss
def test_derivatives_equal_automatic_ones(loss):
    def by_values(x, rows, weight):
        return weight @ loss.values(x, rows)

    automatic = jax.jit(
        lambda *args: (by_values(*args), jax.grad(by_values)(*args), jax.hessian(by_values)(*args))
    )
    for seed in range(5):
        args = problem(loss, seed)
        for f, expected in zip((value, grad, hessian), automatic(*args), strict=True):
            np.testing.assert_allclose(f(loss, *args), expected, rtol=1e-11, atol=1e-12)


def test_losses_are_told_apart_by_jit():
    """Tree structures of different classes with equal static fields must differ (jit's cache)."""
    structures = [jax.tree.structure(loss) for loss in LOSS_CASES.values()]
    for i, one in enumerate(structures):
        assert [one == other for other in structures] == [i == j for j in range(len(structures))]


@every_loss
def test_padding_with_the_first_row_at_weight_zero_changes_nothing(loss):
    x, rows, weight = problem(loss)
    padded = Rows(jnp.repeat(rows.X, 2, axis=0)[:20], jnp.repeat(rows.y, 2)[:20])
    padded = Rows(padded.X.at[:M].set(rows.X), padded.y.at[:M].set(rows.y))
    padded = Rows(padded.X.at[M:].set(rows.X[0]), padded.y.at[M:].set(rows.y[0]))
    zeros = np.append(weight, np.zeros(20 - M))
    for f in (value, grad, hessian):
        np.testing.assert_allclose(
            f(loss, x, padded, zeros), f(loss, x, rows, weight), rtol=1e-13, atol=1e-13
        )
    np.testing.assert_allclose(
        curvature(loss, padded, zeros), curvature(loss, rows, weight), rtol=1e-13
    )
    assert loss.self_concordance(padded) == loss.self_concordance(rows)


def test_multinomial_with_two_classes_is_logistic():
    x, rows, weight = problem(Logistic(), 3)
    two = Multinomial(2)
    for f in (value, grad, hessian):
        np.testing.assert_allclose(
            f(two, x, rows, weight), f(Logistic(), x, rows, weight), rtol=1e-13, atol=1e-15
        )
    assert curvature(two, rows, weight) == curvature(Logistic(), rows, weight)
    assert two.self_concordance(rows) == Logistic().self_concordance(rows)


def test_multinomial_coefficients_are_features_by_classes():
    """x[a (K-1) + j - 1] multiplies feature a in class j: only class 2 sees feature 1 here."""
    x = np.zeros(3 * 2)
    x[1 * 2 + 1] = 5.0
    rows = Rows(jnp.asarray([[0.0, 1.0, 0.0]]), jnp.asarray([2.0]))
    expected = np.log(np.exp(0) + np.exp(0) + np.exp(5.0)) - 5.0
    np.testing.assert_allclose(Multinomial(3).values(jnp.asarray(x), rows), [expected], rtol=1e-13)


# --- large linear predictors ----------------------------------------------------------------------


def at_eta(loss: Loss, eta: float, y: float) -> tuple[float, ...]:
    """Value, derivative and second derivative of one row with predictor eta."""
    rows, x = Rows(jnp.ones((1, 1)), jnp.asarray([y])), jnp.asarray([eta])
    one = jnp.ones(1)
    return tuple(float(np.squeeze(f(loss, x, rows, one))) for f in (value, grad, hessian))


@pytest.mark.parametrize("loss", [Logistic(), Multinomial(2)], ids=["logistic", "multinomial"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logistic_far_out(loss, sign):
    right, wrong = (1.0, 0.0) if sign > 0 else (0.0, 1.0)
    assert at_eta(loss, sign * 1e3, right) == (0.0, 0.0, 0.0)
    assert at_eta(loss, sign * 1e3, wrong) == (1e3, sign, 0.0)
    tail = np.exp(-40.0)  # far below the rounding of 1: nothing may cancel
    np.testing.assert_allclose(at_eta(loss, sign * 40, right), (tail, -sign * tail, tail), 1e-13)


def test_multinomial_far_out():
    rows = Rows(jnp.ones((3, 1)), jnp.asarray([0.0, 1.0, 2.0]))
    loss, x = Multinomial(3), jnp.asarray([1e3, -1e3])
    np.testing.assert_array_equal(loss.values(x, rows), [1e3, 0.0, 2e3])
    automatic = jax.jit(jax.grad(lambda x, weight: weight @ loss.values(x, rows)))
    for weight, expected in zip(jnp.eye(3), ([1, 0], [0, 0], [1, -1]), strict=True):
        np.testing.assert_array_equal(grad(loss, x, rows, weight), expected)
        np.testing.assert_array_equal(automatic(x, weight), expected)
        np.testing.assert_array_equal(hessian(loss, x, rows, weight), np.zeros((2, 2)))


def test_poisson_and_huber_far_out():
    assert at_eta(Poisson(), -1e3, 3.0) == (3e3, -3.0, 0.0)
    assert at_eta(Poisson(), 1e3, 3.0) == (np.inf, np.inf, np.inf)  # a genuine overflow, no NaN
    assert at_eta(Huber(2.0), 1e3, 0.0) == (2.0 * (1e3 - 1.0), 2.0, 0.0)
    assert at_eta(Huber(2.0), -1e3, 0.0) == (2.0 * (1e3 - 1.0), -2.0, 0.0)


def test_huber_limits():
    """delta -> inf is squared; delta |r| - delta^2/2 is linear with slope delta."""
    x, rows, weight = problem(Squared())
    for f in (value, grad, hessian):
        np.testing.assert_allclose(
            f(Huber(1e6), x, rows, weight), f(Squared(), x, rows, weight), rtol=1e-13, atol=1e-13
        )


def test_huber_delta_is_a_leaf():
    traces = []

    @jax.jit
    def total(loss, x, rows, weight):
        traces.append(loss)
        return loss.value(x, rows, weight)

    x, rows, weight = problem(Huber())
    deltas = np.array([0.1, 1.0, 10.0])
    one_by_one = [total(Huber(delta), x, rows, weight) for delta in deltas]
    assert len(traces) == 1
    together = jax.vmap(lambda delta: total(Huber(delta), x, rows, weight))(deltas)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-13)


# --- curvature ------------------------------------------------------------------------------------


def top(matrix) -> float:
    return float(np.max(np.abs(np.linalg.eigvalsh(np.asarray(matrix)))))


@pytest.mark.parametrize("name", [name for name, loss in LOSS_CASES.items() if loss.global_smooth])
def test_curvature_bounds_the_hessian_everywhere(name):
    loss = LOSS_CASES[name]
    _, rows, weight = problem(loss, 1)
    bound = float(curvature(loss, rows, weight))
    matrix = loss.curvature_matrix(rows, weight)
    np.testing.assert_allclose(top(matrix), bound, rtol=1e-12)
    rng = np.random.default_rng(0)
    for scale in np.geomspace(1e-3, 1e2, 60):
        H = hessian(loss, scale * rng.normal(size=loss.dim(P)), rows, weight)
        assert top(H) <= bound * (1 + 1e-12)
        assert np.min(np.linalg.eigvalsh(matrix - H)) >= -1e-12 * bound


def test_curvature_is_tight():
    """Attained everywhere by squared, at x = 0 by logistic, at zero residuals by Huber."""
    for name in ("squared", "logistic", "multinomial2", "huber"):
        loss = LOSS_CASES[name]
        _, rows, weight = problem(loss, 2)
        rows = rows._replace(y=0.0 * rows.y)
        attained = top(hessian(loss, np.zeros(P), rows, weight))
        np.testing.assert_allclose(curvature(loss, rows, weight), attained, rtol=1e-12)


def test_multinomial_curvature_is_attained_between_two_classes():
    """P = (0, 1/2, 1/2): the Hessian of one row is 1/2 |X|^2, twice what two classes have."""
    rows = Rows(jnp.asarray([[3.0, 4.0]]), jnp.asarray([1.0]))
    weight = np.ones(1)
    loss = Multinomial(3)
    x = np.repeat(np.array([3.0, 4.0]) * 10, 2)
    np.testing.assert_allclose(curvature(loss, rows, weight), 12.5, rtol=1e-13)
    np.testing.assert_allclose(top(hessian(loss, x, rows, weight)), 12.5, rtol=1e-12)


def test_poisson_curvature_is_that_of_the_reference():
    loss = Poisson()
    _, rows, weight = problem(loss)
    assert not loss.global_smooth
    expected = top(rows.X.T @ ((weight * np.maximum(1.0, rows.y))[:, None] * rows.X))
    np.testing.assert_allclose(curvature(loss, rows, weight), expected, rtol=1e-12)
    beyond = hessian(loss, np.full(P, 3.0), rows, weight)
    assert top(beyond) > expected  # so it is no global bound, and says so


def test_custom_curvature_is_that_of_the_origin_even_if_indefinite():
    def saddle(x, rows):
        eta = rows.X @ x
        return jnp.cos(2.0 * eta) - 0.1 * rows.y * eta

    loss = CustomLoss(saddle)
    _, rows, weight = problem(Squared(), 4)
    H = hessian(loss, np.zeros(P), rows, weight)
    assert np.min(np.linalg.eigvalsh(H)) < -1.0
    np.testing.assert_allclose(curvature(loss, rows, weight), top(H), rtol=1e-10)
    np.testing.assert_allclose(loss.curvature_matrix(rows, weight), H, rtol=1e-12)


@pytest.mark.parametrize("mapper", ["vmap", "map"])
def test_curvature_over_a_stack_of_padded_clients(mapper):
    loss = Squared()
    clients = [problem(loss, seed, m=M) for seed in range(4)]
    stack = Rows(*(jnp.stack([rows[i] for _, rows, _ in clients]) for i in range(2)))
    weights = jnp.asarray([w * (np.arange(M) < 2 + 4 * k) for k, (_, _, w) in enumerate(clients)])

    def constants(client):
        rows, weight = client
        return loss.curvature(rows, weight), loss.strong_curvature(rows, weight)

    run = jax.vmap(constants) if mapper == "vmap" else lambda s: jax.lax.map(constants, s)
    largest, smallest = jax.jit(run)((stack, weights))
    for k, (_, rows, _) in enumerate(clients):
        eigenvalues = np.linalg.eigvalsh(rows.X.T @ (weights[k][:, None] * rows.X))
        np.testing.assert_allclose(largest[k], eigenvalues[-1], rtol=1e-12)
        np.testing.assert_allclose(smallest[k], eigenvalues[0] if k > 0 else 0.0, rtol=1e-9)
    assert smallest[0] == 0.0  # two rows, three features


def test_strong_curvature_is_never_more_than_the_truth():
    rng = np.random.default_rng(0)
    for ratio in (0.5, 1e-2, 1e-4, 1e-6):
        Q, _ = np.linalg.qr(rng.normal(size=(20, 4)))
        V, _ = np.linalg.qr(rng.normal(size=(4, 4)))
        X = Q @ np.diag([1.0, 0.9, 0.8, ratio]) @ V.T
        found = gram_smallest(jnp.asarray(X), jnp.ones(20))
        assert ratio**2 - 1e-14 <= found <= ratio**2
    X = rng.normal(size=(20, 4))
    X[:, 3] = X[:, 0] + X[:, 1]
    assert gram_smallest(jnp.asarray(X), jnp.ones(20)) == 0.0
    assert gram_smallest(jnp.asarray(X[:3]), jnp.ones(3)) == 0.0


@pytest.mark.parametrize("name", [name for name, loss in LOSS_CASES.items() if not loss.quadratic])
def test_only_quadratic_losses_are_strongly_convex(name):
    _, rows, weight = problem(LOSS_CASES[name])
    assert LOSS_CASES[name].strong_curvature(rows, weight) == 0.0


def test_wide_and_large_gram_matrices():
    rng = np.random.default_rng(0)
    for shape, loose in (((4, 700), 0.0), ((700, 4), 0.0), ((505, 510), MARGIN)):
        X, scale = rng.normal(size=shape), rng.uniform(0.0, 1.0, size=shape[0])
        true = np.linalg.norm(np.sqrt(scale)[:, None] * X, 2) ** 2
        found = float(gram_largest(jnp.asarray(X), jnp.asarray(scale)))
        assert true * (1 - 1e-12) <= found <= true * (1 + loose + 1e-12)


@pytest.mark.parametrize(
    "spectrum",
    [
        np.linspace(0.0, 1.0, 2000),
        1.0 - np.geomspace(1e-6, 1.0, 2000),
        np.ones(300),
        np.zeros(300),
        np.append(np.full(500, 0.1), 7.0),
    ],
    ids=["even", "clustered at the top", "identity", "zero", "one outlier"],
)
def test_largest_eigenvalue_is_an_upper_bound_within_one_percent(spectrum):
    diagonal = jnp.asarray(spectrum)
    found = float(largest_eigenvalue(lambda v: diagonal * v, len(spectrum)))
    true = float(np.max(spectrum))
    assert true <= found <= true * (1 + MARGIN) * (1 + 1e-12)


def test_largest_eigenvalue_of_a_small_operator_is_exact_also_if_negative():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(7, 7))
    A = jnp.asarray(A + A.T - 9 * np.eye(7))
    np.testing.assert_allclose(largest_eigenvalue(lambda v: A @ v, 7), top(A), rtol=1e-12)


# --- self-concordance -----------------------------------------------------------------------------

CONCORDANT = {
    "logistic": Logistic(),
    "multinomial2": Multinomial(2),
    "multinomial3": Multinomial(3),
    "multinomial5": Multinomial(5),
    "poisson": Poisson(),
}


@jax.jit
def directional(loss, x, v, rows, weight):
    """Second and third derivative of t -> value(x + t v) at 0."""

    def along(t):
        return loss.value(x + t * v, rows, weight)

    second = jax.grad(jax.grad(along))
    return second(0.0), jax.grad(second)(0.0)


@pytest.mark.parametrize("loss", CONCORDANT.values(), ids=CONCORDANT.keys())
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 10.0))
def test_self_concordance_holds(loss, seed, scale):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(4, P)) * rng.uniform(0.1, 3.0, size=(4, 1))
    rows = Rows(jnp.asarray(X), jnp.asarray(targets_for(loss, 4, rng)))
    weight = rng.exponential(size=4)
    x, v = rng.normal(size=(2, loss.dim(P)))
    x *= scale / np.max(np.abs(X @ x.reshape(P, -1)))
    second, third = directional(loss, x, v, rows, weight)
    R = float(loss.self_concordance(rows))
    assert abs(third) <= R * np.linalg.norm(v) * second * (1 + 1e-9) + 1e-13


def test_self_concordance_constants_are_sharp():
    """One row along which the bound is attained in the limit; 1 in place of sqrt 2 would fail."""
    a = np.array([1.0, -2.0, 2.0])  # norm 3
    rows = Rows(jnp.asarray(a)[None, :], jnp.zeros(1))
    one = np.ones(1)

    def ratio(loss, x, v):
        second, third = directional(loss, x, v, rows, one)
        return abs(third) / (np.linalg.norm(v) * second)

    assert Logistic().self_concordance(rows) == pytest.approx(3.0, rel=1e-14)
    assert ratio(Logistic(), a, a) == pytest.approx(3.0, rel=1e-3)
    assert ratio(Poisson(), a, a) == pytest.approx(3.0, rel=1e-12)
    assert Poisson().self_concordance(rows) == pytest.approx(3.0, rel=1e-14)
    x = np.stack([3.0 * a, 2.0 * a], axis=1).ravel()  # classes 1 and 2 far above the reference
    v = np.stack([a, -a], axis=1).ravel()
    assert Multinomial(3).self_concordance(rows) == pytest.approx(3.0 * np.sqrt(2), rel=1e-14)
    assert ratio(Multinomial(3), x, v) == pytest.approx(3.0 * np.sqrt(2), rel=1e-3)


def test_self_concordance_of_the_others():
    _, rows, weight = problem(Squared())
    assert Squared().self_concordance(rows) == 0.0
    _, third = directional(Squared(), np.ones(P), np.arange(1.0, P + 1), rows, weight)
    assert third == 0.0
    assert Huber().self_concordance(rows) is None
    assert CustomLoss(lambda x, rows: rows.X @ x).self_concordance(rows) is None


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "y", "expected"),
    [
        (Squared(), [1, 2, -3], [1.0, 2.0, -3.0]),
        (Logistic(), [0, 1, 1], [0.0, 1.0, 1.0]),
        (Logistic(), [-1, 1, -1], [0.0, 1.0, 0.0]),
        (Logistic(), [True, False], [1.0, 0.0]),
        (Logistic(), [-1, -1], [0.0, 0.0]),
        (Logistic(), [1, 1], [1.0, 1.0]),
        (Multinomial(3), [2, 0, 2], [2.0, 0.0, 2.0]),
        (Poisson(), [0, 7, 2.5], [0.0, 7.0, 2.5]),
        (Huber(), [-1.5], [-1.5]),
        (CustomLoss(lambda x, rows: rows.y), ["1", "2"], [1.0, 2.0]),
    ],
)
def test_good_targets(loss, y, expected):
    out = loss.check_targets(np.asarray(y), "client 'A'")
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (Squared(), [1.0, np.nan], r"target nan in row 1 .* is not a finite number"),
        (Squared(), [np.inf, 1.0], r"target inf in row 0 .* is not a finite number"),
        (Squared(), [[1.0], [2.0]], r"one column, got an array of shape \(2, 1\)"),
        (Squared(), ["1", "high"], r"must be numbers, got 'high'"),
        (
            Logistic(),
            [0, 1, 2],
            r"target 2 in row 2 \(of this client, from 0\) is no binary label; use 0/1 or -1/1",
        ),
        (Logistic(), [0.0, 0.5], r"target 0.5 in row 1 .* is no binary label"),
        (Logistic(), [-1, 0, 1], r"labels mix -1 and 0"),
        (Multinomial(3), [0, 3], r"target 3 in row 1 .* is no label of 0..2"),
        (Multinomial(3), [0.5], r"target 0.5 in row 0 .* is no label of 0..2"),
        (Poisson(), [1, -2], r"target -2 in row 1 .* is negative"),
    ],
)
def test_bad_targets_name_client_value_and_row(loss, y, message):
    with pytest.raises(InputError, match="^client 'Cleveland': .*" + message):
        loss.check_targets(np.asarray(y), "client 'Cleveland'")


# --- the user's own loss --------------------------------------------------------------------------


def pseudo_huber(x, rows):
    return jnp.sqrt(1.0 + (rows.X @ x - rows.y) ** 2) - 1.0


@jax.custom_jvp
def wrong_square(r):
    return r**2


@wrong_square.defjvp
def _(primals, tangents):
    return primals[0] ** 2, primals[0] * tangents[0]  # 2 is missing


@jax.custom_vjp
def wrong_square_back(r):
    return r**2


wrong_square_back.defvjp(lambda r: (r**2, r), lambda r, g: (1.001 * 2 * r * g,))


def numpy_rows(m: int = M) -> Rows:
    _, rows, _ = problem(Squared(), m=m)
    return Rows(np.asarray(rows.X), np.asarray(rows.y))


@pytest.mark.parametrize("m", [1, 2, M, 100])
def test_custom_check_accepts_good_losses(m):
    rows = numpy_rows(m)
    CustomLoss(pseudo_huber).check(rows, "client 'A'")
    large = rows._replace(X=1e4 * rows.X, y=1e6 * rows.y)
    CustomLoss(lambda x, rows: 0.5 * (rows.X @ x - rows.y) ** 2).check(large, "client 'A'")
    constant = CustomLoss(lambda x, rows: rows.y**2)
    constant.check(rows, "client 'A'")
    curve = CustomLoss(lambda x, rows: (x[0] * jnp.exp(x[1] * rows.X[:, 0]) - rows.y) ** 2, size=2)
    assert curve.dim(P) == 2
    curve.check(rows, "client 'A'")


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, rows: jnp.mean(pseudo_huber(x, rows)), r"shape \(13,\), got shape \(\)"),
        (lambda x, rows: pseudo_huber(x, rows)[:, None], r"shape \(13,\), got shape \(13, 1\)"),
        (lambda x, rows: jnp.log(rows.X @ x - 1e3), r"is nan in row 0 at the random point"),
        (lambda x, rows: rows.X @ jnp.ones(9), r"fails on 13 rows with 3 features: TypeError"),
        (lambda x, rows: pseudo_huber(x, rows) / rows.y.shape[0], r"couples rows: row 0 has loss"),
        (lambda x, rows: rows.X @ x - jnp.mean(rows.y), r"couples rows"),
        (lambda x, rows: jnp.arange(rows.y.shape[0]) * (rows.X @ x), r"couples rows: row 2"),
        (lambda x, rows: wrong_square(rows.X @ x), r"has a wrong gradient in row 0"),
        (lambda x, rows: wrong_square_back(rows.X @ x), r"has a wrong gradient in row 0"),
        (
            lambda x, rows: jax.lax.stop_gradient(pseudo_huber(x, rows)),
            r"has a wrong gradient in row 0: 0 along a random direction by JAX",
        ),
    ],
    ids=[
        "mean",
        "column",
        "nan",
        "fails",
        "divides by m",
        "centres",
        "counts rows",
        "custom_jvp",
        "custom_vjp",
        "stop_gradient",
    ],
)
def test_custom_check_refuses(fn, message):
    with pytest.raises(InputError, match="^client 'A': .*" + message):
        CustomLoss(fn).check(numpy_rows(), "client 'A'")


def test_custom_check_sees_coupling_in_a_single_row():
    loss = CustomLoss(lambda x, rows: pseudo_huber(x, rows) / rows.y.shape[0])
    with pytest.raises(InputError, match="couples rows: row 0"):
        loss.check(numpy_rows(1), "client 'A'")


def test_custom_copy_of_logistic_has_its_derivatives():
    copy = CustomLoss(lambda x, rows: jax.nn.softplus(rows.X @ x) - rows.y * (rows.X @ x))
    x, rows, weight = problem(Logistic())
    for f in (value, grad, hessian):
        np.testing.assert_allclose(
            f(copy, x, rows, weight), f(Logistic(), x, rows, weight), rtol=1e-12, atol=1e-13
        )
    np.testing.assert_allclose(
        curvature(copy, rows, weight), curvature(Logistic(), rows, weight), rtol=1e-11
    )
    assert not copy.newton
    assert not copy.global_smooth


# --- making a loss --------------------------------------------------------------------------------


def test_registry_and_make_loss():
    assert {name: loss.name for name, loss in LOSSES.items()} == {name: name for name in LOSSES}
    assert make_loss("squared") == Squared()
    assert make_loss("huber") == Huber()
    assert make_loss("logistic", n_classes=7) == Logistic()
    assert make_loss("multinomial", n_classes=4) == Multinomial(4)
    assert make_loss(Huber(0.3)) == Huber(0.3)
    assert make_loss(pseudo_huber) == CustomLoss(pseudo_huber)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("logistc", "unknown value 'logistc'; did you mean 'logistic'"),
        ("hinge", "Choices: squared, logistic, multinomial, poisson, huber"),
        ("multinomial", "needs n_classes"),
        (3, "a Loss such as Huber"),
        (Huber, "a Loss such as Huber"),
    ],
)
def test_make_loss_refuses(spec, message):
    with pytest.raises(InputError, match=message):
        make_loss(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Huber(0.0), "delta must be a positive finite number, got 0.0"),
        (lambda: Huber(np.nan), "delta must be a positive finite number"),
        (lambda: Multinomial(1), "n_classes must be an integer >= 2, got 1"),
        (lambda: CustomLoss(pseudo_huber, size=0), "size must be an integer >= 1, got 0"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(InputError, match=message):
        make()
