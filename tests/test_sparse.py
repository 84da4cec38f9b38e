"""Sparse rows give what dense rows give and are never made dense; spectra of many clients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from fedexact.errors import CapabilityError
from fedexact.losses import (
    CustomLoss,
    Logistic,
    Loss,
    Multinomial,
    Poisson,
    Rows,
    Sparse,
    Squared,
    curvatures,
)
from fedexact.losses.design import (
    combine,
    gram,
    n_features,
    outer_gram,
    predictor,
    row_squares,
)
from fedexact.losses.spectrum import (
    BLOCK,
    DENSE,
    MARGIN,
    extreme_eigenvalues,
    extremes_of_each,
    gram_largest,
    gram_smallest,
)
from problems import LOSS_CASES, targets_for

every_loss = pytest.mark.parametrize("loss", LOSS_CASES.values(), ids=LOSS_CASES.keys())


def close(found, expected, rtol: float = 1e-13) -> None:
    """Equal up to rtol of the largest entry."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * np.max(np.abs(expected)))


def sparse_of(X: np.ndarray, pad: int = 0, seed: int = 0) -> Sparse:
    """X as Sparse, the entries in random order among `pad` that are none, of rows and columns
    inside, one and ten beyond the matrix."""
    m, p = X.shape
    rng = np.random.default_rng(seed)
    row, column = np.nonzero(X)
    values = np.concatenate([X[row, column], np.zeros(pad)])
    row = np.concatenate([row, np.resize([m, 0, m + 10], pad)])
    column = np.concatenate([column, np.resize([p, p + 10, 0], pad)])
    order = rng.permutation(len(values))
    return Sparse(
        jnp.asarray(values[order]),
        jnp.asarray(column[order], jnp.int32),
        jnp.asarray(row[order], jnp.int32),
        (m, p),
    )


def random_matrix(m: int, p: int, seed: int = 0, share: float = 0.4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, p)) * (rng.uniform(size=(m, p)) < share)


def with_gaps() -> np.ndarray:
    """(9, 6) with empty rows (the last too) and empty columns (the first too)."""
    X = random_matrix(9, 6, 3, share=0.7)
    X[[2, 8]] = 0.0
    X[:, [0, 4]] = 0.0
    return X


MATRICES = {
    "tall": random_matrix(11, 5),
    "wide": random_matrix(5, 11, 1),
    "empty rows and columns": with_gaps(),
    "one row": np.array([[0.0, 2.0, 0.0, -3.0, 0.5]]),
    "one column": random_matrix(7, 1, 2, share=0.8),
    "one entry": np.diag([0.0, 3.0, 0.0]),
    "full": random_matrix(6, 4, 4, share=1.0),
    "nothing": np.zeros((4, 3)),
}
every_matrix = pytest.mark.parametrize("X", MATRICES.values(), ids=MATRICES.keys())
both_kinds = pytest.mark.parametrize(
    "kind", [jnp.asarray, lambda X: sparse_of(X, pad=7)], ids=["dense", "sparse"]
)


# --- the products against NumPy -------------------------------------------------------------------


@both_kinds
@every_matrix
def test_products_equal_those_of_numpy(X, kind):
    m, p = X.shape
    rng = np.random.default_rng(1)
    design = kind(X)
    assert n_features(design) == p
    for tail in ((), (3,), (1,)):
        x, v = rng.normal(size=(p, *tail)), rng.normal(size=(m, *tail))
        close(jax.jit(predictor)(design, x), X @ x)
        close(jax.jit(combine)(v, design), X.T @ v)
    rows, columns = rng.uniform(0.0, 2.0, size=m), rng.normal(size=p)
    rows[-1] = 0.0
    close(jax.jit(gram)(design, rows), X.T @ np.diag(rows) @ X)
    close(jax.jit(outer_gram)(design, columns), X @ np.diag(columns) @ X.T)
    close(jax.jit(row_squares)(design), np.sum(X**2, axis=1))


def test_predictor_and_combine_are_adjoint_also_to_jax():
    """<v, X x> = <X'v, x>, and each is the other's derivative."""
    X = sparse_of(MATRICES["wide"], pad=4)
    m, p = X.shape
    rng = np.random.default_rng(2)
    x, v = jnp.asarray(rng.normal(size=p)), jnp.asarray(rng.normal(size=m))
    close(v @ predictor(X, x), combine(v, X) @ x)
    close(jax.grad(lambda x: v @ predictor(X, x))(x), combine(v, X))
    close(jax.grad(lambda v: combine(v, X) @ x)(v), predictor(X, x))
    close(jax.jvp(lambda x: predictor(X, x), (x,), (x,))[1], predictor(X, x))


# --- losses: sparse equals dense ------------------------------------------------------------------


def everything(loss: Loss, x: jax.Array, rows: Rows, weight: jax.Array) -> dict[str, jax.Array]:
    found = {name: getattr(loss, name)(x, rows, weight) for name in ("value", "grad", "hessian")}
    found["values"] = loss.values(x, rows)
    for name in ("curvature", "row_curvature", "curvature_matrix", "strong_curvature"):
        found[name] = getattr(loss, name)(rows, weight)
    radius = loss.self_concordance(rows)
    if radius is not None:
        found["self_concordance"] = jnp.asarray(radius)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param("wide", marks=pytest.mark.slow), "empty rows and columns"]
)
@every_loss
def test_every_operation_of_a_loss_equals_the_dense_one(loss, name):
    """Also with entries that are none and with empty rows of weight 0 as padding."""
    X = MATRICES[name]
    m, p = X.shape
    rng = np.random.default_rng(5)
    y, x = targets_for(loss, m, rng), jnp.asarray(0.3 * rng.normal(size=loss.dim(p)))
    weight = rng.uniform(0.5, 2.0, size=m)
    longer = sparse_of(np.vstack([X, np.zeros((4, p))]), pad=5)
    run = jax.jit(everything)
    dense = run(loss, x, Rows(jnp.asarray(X), jnp.asarray(y)), weight)
    zeros = np.zeros(4)
    sparse = run(loss, x, Rows(longer, jnp.asarray(np.append(y, zeros))), np.append(weight, zeros))
    sparse["values"] = sparse["values"][:m]
    assert sparse.keys() == dense.keys()
    for operation, found in sparse.items():
        expected = np.asarray(dense[operation])
        unit = dense["curvature"] if operation == "strong_curvature" else np.max(np.abs(expected))
        np.testing.assert_allclose(
            found, expected, rtol=1e-13, atol=1e-13 * float(unit), err_msg=operation
        )


@pytest.mark.parametrize("loss", [Logistic(), Multinomial(4)], ids=lambda loss: loss.name)
def test_clients_mapped_and_automatic_gradients(loss):
    """jit of vmap and of map over a stack of sparse clients; JAX's own gradient of the value."""
    m, p, N = 7, 5, 4
    rng = np.random.default_rng(7)
    X = np.stack([random_matrix(m, p, seed) for seed in range(N)])
    y = jnp.asarray(np.stack([targets_for(loss, m, rng) for _ in range(N)]))
    weight = jnp.asarray(rng.uniform(size=(N, m)))
    most = max(int(np.count_nonzero(part)) for part in X)
    clients = [sparse_of(part, pad=most - int(np.count_nonzero(part))) for part in X]
    stack = Rows(jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients), y)
    x = jnp.asarray(0.3 * rng.normal(size=loss.dim(p)))

    def one(client):
        rows, weight = client
        return loss.grad(x, rows, weight), jax.grad(loss.value)(x, rows, weight)

    expected, _ = jax.jit(jax.vmap(one))((Rows(jnp.asarray(X), y), weight))
    for over in (jax.vmap(one), lambda clients: jax.lax.map(one, clients)):
        ours, automatic = jax.jit(over)((stack, weight))
        close(ours, expected)
        close(automatic, expected)


@every_loss
def test_the_largest_row_is_that_of_numpy(loss):
    X = MATRICES["empty rows and columns"]
    rows = Rows(sparse_of(X, pad=3), jnp.zeros(len(X)))
    longest = np.max(np.linalg.norm(X, axis=1))
    factor = {"multinomial4": np.sqrt(2.0), "squared": 0.0, "huber": None}.get(
        next(name for name, one in LOSS_CASES.items() if one is loss), 1.0
    )
    found = loss.self_concordance(rows)
    assert found is None if factor is None else found == pytest.approx(factor * longest, rel=1e-14)


def test_a_sparse_matrix_is_never_made_dense():
    """Working memory of the compiled programs stays far below that of the (m, p) array."""
    m, p, each = 200, 20_000, 5
    rng = np.random.default_rng(8)
    X = Sparse(
        jnp.asarray(rng.normal(size=m * each)),
        jnp.asarray(rng.integers(p, size=m * each), jnp.int32),
        jnp.repeat(jnp.arange(m, dtype=jnp.int32), each),
        (m, p),
    )
    weight = jnp.ones(m)
    for loss in (Logistic(), Multinomial(3)):
        rows, x = Rows(X, jnp.zeros(m)), jnp.zeros(loss.dim(p))
        programs = [
            jax.jit(lambda x, rows, loss=loss: loss.value(x, rows, weight)),
            jax.jit(lambda x, rows, loss=loss: loss.grad(x, rows, weight)),
            jax.jit(lambda x, rows, loss=loss: loss.curvature(rows, weight)),
            jax.jit(lambda x, rows, loss=loss: loss.row_curvature(rows, weight)),
            jax.jit(lambda x, rows, loss=loss: outer_gram(rows.X, x[:p])),
        ]
        for program in programs:
            needed = program.lower(x, rows).compile().memory_analysis()
            assert needed is not None
            assert needed.temp_size_in_bytes < 0.1 * m * p * 8


# --- a function of the user's own takes dense rows ------------------------------------------------


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.coo_matrix, sparse_of])
def test_a_custom_loss_refuses_sparse_rows(kind):
    loss = CustomLoss(lambda x, rows: (rows.X @ x - rows.y) ** 2)
    rows = Rows(kind(MATRICES["tall"]), np.zeros(11))
    with pytest.raises(CapabilityError, match=r"client 'a'.*dense rows.*logistic.*toarray"):
        loss.check(rows, "client 'a'")


# --- spectra --------------------------------------------------------------------------------------


def spectra(n: int) -> np.ndarray:
    """Positive semidefinite matrices (.., n, n) that are hard on a bisection."""
    rng = np.random.default_rng(n)
    Q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    few, many = rng.normal(size=(max(1, n // 3), n)), rng.normal(size=(2 * n, n))
    return np.stack([
        np.zeros((n, n)),
        np.eye(n),
        np.ones((n, n)),
        few.T @ few,
        many.T @ many,
        Q @ np.diag(np.geomspace(1e-12, 1e3, n)) @ Q.T,
        Q @ np.diag(np.where(np.arange(n) < n // 2, 1.0, 2.0)) @ Q.T,
        1e-200 * many.T @ many,
        np.diag(np.arange(n) % 3 * 1e150),
    ])  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 30])
def test_extreme_eigenvalues_equal_those_of_numpy(n):
    A = spectra(n)
    smallest, largest = jax.jit(extreme_eigenvalues)(jnp.asarray(A))
    true = np.linalg.eigvalsh(A)
    tolerance = 4 * n * np.finfo(float).eps * true[:, -1]
    assert np.all(np.abs(largest - true[:, -1]) <= tolerance)
    assert np.all(np.abs(smallest - np.maximum(true[:, 0], 0.0)) <= tolerance)
    assert np.all(np.asarray(smallest) >= 0.0)


@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_blocks_of_clients_leave_none_out(count):
    X = np.random.default_rng(count).normal(size=(count, 5, 3))
    smallest, largest = extremes_of_each(lambda X: gram(X, jnp.ones(5)), jnp.asarray(X))
    true = np.linalg.eigvalsh(np.einsum("kij,kil->kjl", X, X))
    np.testing.assert_allclose(largest, true[:, -1], rtol=1e-13)
    np.testing.assert_allclose(smallest, true[:, 0], rtol=0, atol=1e-13 * float(np.max(true)))


@pytest.mark.slow
@both_kinds
def test_gram_bounds(kind):
    for name in ("wide", "full", "nothing"):
        X = MATRICES[name]
        scale = np.random.default_rng(9).uniform(0.5, 1.0, size=len(X))
        true = np.linalg.eigvalsh(X.T @ np.diag(scale) @ X)
        close(gram_largest(kind(X), jnp.asarray(scale)), true[-1])
        found = float(gram_smallest(kind(X), jnp.asarray(scale)))
        rounding = 1e-14 * true[-1]
        assert max(true[0], 0.0) - 2 * rounding <= found <= max(true[0], 0.0) + rounding


def test_fewer_rows_than_features_are_never_strongly_convex():
    """Padding of weight 0 makes the array tall; rounding must not make the Gram matrix definite."""
    for seed in range(20):
        X = np.random.default_rng(seed).normal(size=(9, 4))
        scale = jnp.asarray(np.where(np.arange(9) < 3, 1.0, 0.0))
        assert gram_smallest(jnp.asarray(X), scale) == 0.0


@pytest.mark.slow
def test_a_large_sparse_gram_is_bounded_from_above():
    """Beyond DENSE on both sides, by Lanczos on the shorter one."""
    for m, p in ((DENSE + 5, DENSE + 40), (DENSE + 40, DENSE + 5)):
        X = random_matrix(m, p, 10, share=0.02)
        scale = np.random.default_rng(10).uniform(size=m)
        true = np.linalg.norm(np.sqrt(scale)[:, None] * X, 2) ** 2
        found = float(jax.jit(gram_largest)(sparse_of(X, pad=9), jnp.asarray(scale)))
        assert true <= found <= (1.0 + MARGIN) * true * (1.0 + 1e-12)


# --- constants of all clients ---------------------------------------------------------------------


def clients_of(
    loss: Loss, m: int, p: int, sparse: bool
) -> tuple[tuple[Rows, jax.Array], np.ndarray, np.ndarray]:
    """Seven clients of 1 to m rows as a stack, and their X (7, m, p) and weight (7, m)."""
    rng = np.random.default_rng(11)
    X = np.stack([random_matrix(m, p, seed, share=0.7) for seed in range(7)])
    X[:, :, 0] = 1.0
    weight = rng.uniform(0.5, 2.0, size=(7, m)) * (np.arange(m) <= np.arange(7)[:, None] * m // 6)
    y = jnp.asarray(np.stack([targets_for(loss, m, rng) for _ in range(7)]))
    if not sparse:
        return (Rows(jnp.asarray(X), y), jnp.asarray(weight)), X, weight
    X[weight == 0.0] = 0.0
    most = max(int(np.count_nonzero(part)) for part in X)
    each = [sparse_of(part, pad=most - int(np.count_nonzero(part))) for part in X]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return (Rows(stack, y), jnp.asarray(weight)), X, weight


def itself(client: tuple[Rows, jax.Array]) -> tuple[Rows, jax.Array]:
    return client


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((12, 4), id="tall"),
        pytest.param((4, 12), id="wide", marks=pytest.mark.slow),
        pytest.param((3, DENSE + 1), id="large"),
    ],
)
@pytest.mark.parametrize("loss", [Squared(), Multinomial(4), Poisson()], ids=lambda loss: loss.name)
def test_curvatures_of_all_clients(loss, shape, sparse):
    """Against NumPy's eigenvalues; the ridge leaves the first coefficient out."""
    (m, p), d = shape, loss.dim(shape[1])
    stack, X, weight = clients_of(loss, m, p, sparse)
    ridge = np.where(np.arange(d) < d // p, 0.0, 0.1)
    found_L, found_l = jax.jit(lambda stack: curvatures(loss, stack, itself, jnp.asarray(ridge)))(
        stack
    )
    for k in range(7):
        y = stack[0].y[k]
        bounds = {"squared": np.ones(m), "multinomial": np.full(m, 0.5), "poisson": np.fmax(1.0, y)}
        root = np.sqrt(weight[k] * bounds[loss.name])[:, None] * X[k]
        outer = np.linalg.eigvalsh(root @ root.T)[-1]
        if not loss.quadratic or p > DENSE:
            np.testing.assert_allclose(found_L[k], outer + 0.1, rtol=1e-13)
            assert found_l[k] == 0.0
            continue
        true = np.linalg.eigvalsh(root.T @ root + np.diag(ridge))
        np.testing.assert_allclose(found_L[k], true[-1], rtol=1e-13)
        np.testing.assert_allclose(found_l[k], true[0], rtol=1e-11)
        assert found_l[k] <= true[0] * (1.0 + 1e-13)


def test_curvatures_without_a_ridge_know_a_null_space():
    stack, X, weight = clients_of(Squared(), 12, 4, sparse=False)
    L, l = curvatures(Squared(), stack, itself, jnp.zeros(4))  # noqa: E741 - the papers' symbol
    for k in range(7):
        true = np.linalg.eigvalsh(X[k].T @ np.diag(weight[k]) @ X[k])
        assert L[k] == pytest.approx(true[-1], rel=1e-13)
        assert l[k] == (pytest.approx(true[0], rel=1e-9) if np.sum(weight[k] > 0) >= 4 else 0.0)


def test_curvatures_of_a_custom_loss_are_its_own():
    def fn(x, rows):
        eta = rows.X @ x
        return jnp.log(jnp.cosh(eta)) - 0.1 * rows.y * eta

    loss = CustomLoss(fn)
    stack, X, weight = clients_of(Squared(), 6, 4, sparse=False)
    L, l = curvatures(loss, stack, itself, jnp.full(4, 0.3))  # noqa: E741 - the papers' symbol
    for k in range(7):
        true = np.linalg.eigvalsh(X[k].T @ np.diag(weight[k]) @ X[k])[-1] + 0.3
        assert L[k] == pytest.approx(true, rel=1e-12)
    np.testing.assert_allclose(l, 0.3, rtol=1e-15)
