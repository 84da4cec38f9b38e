"""The target: weights, reduction, intercept, layout; and errors at the border."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedexact as fx
from fedexact.layout import Layout

RNG = np.random.default_rng(0)
SIZES = (3, 50, 7, 1)
CLIENTS = [(RNG.normal(size=(n, 2)), RNG.normal(size=n)) for n in SIZES]
X = np.concatenate([X for X, _ in CLIENTS])
Y = np.concatenate([y for _, y in CLIENTS])
OWNER = np.repeat(np.arange(4), SIZES)
AT = np.array([0.3, -0.7])
ROW_LOSS = 0.5 * (X @ AT - Y) ** 2


def client_means() -> np.ndarray:
    return np.array([ROW_LOSS[k == OWNER].mean() for k in range(4)])


@pytest.mark.parametrize(
    ("weights", "reduction", "value"),
    [
        ("rows", "mean", ROW_LOSS.mean()),
        ("rows", "sum", ROW_LOSS.sum()),
        ("clients", "mean", client_means().mean()),
        ("clients", "sum", ROW_LOSS.sum() / 4),
        ([1.0, 2.0, 3.0, 4.0], "mean", client_means() @ [1.0, 2.0, 3.0, 4.0]),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_counts_alike(weights: object, reduction: str, value: float, shards: int) -> None:
    problem = fx.Problem(CLIENTS, weights=weights, reduction=reduction, l2=0.3, shards=shards)  # type: ignore[arg-type]
    assert problem.value(AT) == pytest.approx(value + 0.15 * AT @ AT, rel=1e-14)
    rows, weight = problem.pooled()
    assert weight @ ROW_LOSS + 0.15 * AT @ AT == pytest.approx(problem.value(AT), rel=1e-14)
    assert np.array_equal(rows.X, X)


def test_derivatives_are_those_of_the_pooled_rows() -> None:
    problem = fx.Problem(CLIENTS, l2=0.3)
    ridge = 0.3 * np.eye(2)
    H = X.T @ X / len(Y) + ridge
    np.testing.assert_allclose(problem.hessian(AT), H, rtol=1e-13)
    np.testing.assert_allclose(problem.grad(AT), H @ AT - X.T @ Y / len(Y), rtol=1e-12)
    np.testing.assert_allclose(problem.information(AT), X.T @ X, rtol=1e-13)
    assert problem.loss_sum(AT) == pytest.approx(ROW_LOSS.sum(), rel=1e-14)


def test_constants_of_least_squares_in_closed_form() -> None:
    problem = fx.Problem(CLIENTS, l2=0.3, weights="clients")
    spectra = [np.linalg.eigvalsh(A.T @ A / len(A) + 0.3 * np.eye(2)) for A, _ in CLIENTS]
    c = problem.constants()
    np.testing.assert_allclose(c.L_k, [s[-1] for s in spectra], rtol=1e-12)
    np.testing.assert_allclose(c.l_k, [max(s[0], 0.3) for s in spectra], rtol=1e-12)
    pooled = np.mean([A.T @ A / len(A) for A, _ in CLIENTS], axis=0) + 0.3 * np.eye(2)
    np.testing.assert_allclose([c.l_F, c.L_F], np.linalg.eigvalsh(pooled), rtol=1e-12)
    assert c.kappa == pytest.approx(c.L / c.l)


def test_constants_see_that_data_and_ridge_together_are_definite() -> None:
    """Although the ridge leaves the intercept out and some clients have fewer rows than columns."""
    problem = fx.Problem(CLIENTS, l2=0.3, fit_intercept=True)
    scale = 4 * np.array(SIZES) / sum(SIZES)
    for k, (A, _) in enumerate(CLIENTS):
        Z = np.column_stack([np.ones(len(A)), A])
        H = scale[k] * Z.T @ Z / len(A) + np.diag([0.0, 0.3, 0.3])
        spectrum = np.linalg.eigvalsh(H)
        assert problem.constants().l_k[k] == pytest.approx(spectrum[0], rel=1e-9)
        assert problem.constants().L_k[k] == pytest.approx(spectrum[-1], rel=1e-9)


def test_logistic_constants_bound_every_hessian() -> None:
    y = [(v > 0).astype(float) for _, v in CLIENTS]
    problem = fx.Problem(
        [(A, b) for (A, _), b in zip(CLIENTS, y, strict=True)], loss="logistic", l2=0.1
    )
    c = problem.constants()
    for scale in (0.0, 1.0, 10.0):
        top = np.linalg.eigvalsh(problem.hessian(scale * RNG.normal(size=2)))[-1]
        assert top <= c.L_F * (1 + 1e-12)
    assert np.linalg.eigvalsh(problem.hessian(np.zeros(2)))[-1] == pytest.approx(c.L_F, rel=1e-12)


def test_the_intercept_comes_first_and_is_free() -> None:
    problem = fx.Problem(CLIENTS, fit_intercept=True, l2=2.0, regularizer=fx.L1(0.5))
    assert problem.feature_names == ["intercept", "x0", "x1"]
    x = np.array([5.0, *AT])
    expected = 0.5 * np.mean((5.0 + X @ AT - Y) ** 2) + AT @ AT + 0.5 * np.abs(AT).sum()
    assert problem.objective(x) == pytest.approx(expected, rel=1e-14)


def test_the_target_says_what_is_minimised() -> None:
    words = fx.Problem(CLIENTS, l2=0.3, regularizer=fx.L1(0.5), fit_intercept=True).target()
    for part in ("squared", "mean over 61 rows", "4 clients", "every row alike", "0.5", "0.3"):
        assert part in words


def test_minus_one_and_one_are_labels_too() -> None:
    signs = [np.sign(y) for _, y in CLIENTS]
    problems = [
        fx.Problem([(A, f(s)) for (A, _), s in zip(CLIENTS, signs, strict=True)], loss="logistic")
        for f in (lambda s: s, lambda s: (s > 0).astype(int))
    ]
    assert problems[0].value(AT) == problems[1].value(AT)


def test_multinomial_finds_its_classes() -> None:
    y = [RNG.integers(0, 3, size=n) for n in SIZES]
    problem = fx.Problem(
        [(A, b) for (A, _), b in zip(CLIENTS, y, strict=True)],
        loss="multinomial",
        fit_intercept=True,
    )
    assert problem.dim == 6
    assert problem.feature_names == [
        f"{name}[{c}]" for name in ("intercept", "x0", "x1") for c in (1, 2)
    ]
    assert problem.value(np.zeros(6)) == pytest.approx(np.log(3), rel=1e-14)
    assert np.array_equal(problem.ridge, np.zeros(6))


def test_a_custom_loss_in_ten_lines() -> None:
    def cauchy(x, rows):
        import jax.numpy as jnp

        return jnp.log1p((rows.X @ x - rows.y) ** 2)

    problem = fx.Problem(CLIENTS, loss=cauchy)
    assert problem.value(AT) == pytest.approx(np.log1p(2 * ROW_LOSS).mean(), rel=1e-14)


def test_sizes_from_2_to_20000_rows_in_one_problem() -> None:
    sizes = np.array([2, 3, 20_000, 150, 2, 900, 5_000])
    clients = [(RNG.normal(size=(n, 8)), RNG.normal(size=n)) for n in sizes]
    problem = fx.Problem(clients)
    padded = np.array([size.rows for size in problem.layout.sizes])[problem.layout.bucket_of]
    assert np.all(padded >= sizes)
    assert padded.sum() <= 1.25 * sizes.sum()
    rows = np.concatenate([A for A, _ in clients])
    target = np.concatenate([b for _, b in clients])
    x = np.linspace(-1.0, 1.0, 8)
    assert problem.value(x) == pytest.approx(0.5 * np.mean((rows @ x - target) ** 2), rel=1e-12)


def test_every_client_has_one_slot() -> None:
    sizes = RNG.integers(1, 200, size=37)
    for shards in (1, 2):
        layout = Layout(sizes, 3 * sizes, shards)
        assert sorted(layout.slots[layout.slots >= 0].tolist()) == list(range(37))
        values = np.arange(37.0)
        assert np.array_equal(layout.in_client_order(layout.in_slots(values)), values)
        for s in range(shards):
            mine = layout.slots[s * layout.width : (s + 1) * layout.width]
            for b in range(len(layout.sizes)):
                clients = mine[layout.first[s, b] : layout.first[s, b + 1]]
                assert np.all(layout.shard_of[clients] == s)
                assert np.all(layout.bucket_of[clients] == b)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 2))
def test_windows_hold_their_clients_and_have_one_length(sizes: list[int], shards: int) -> None:
    n_rows = np.array(sizes)
    layout = Layout(n_rows, n_rows, shards)
    starts, length = layout.windows(n_rows, sum(sizes))
    begins = np.cumsum(n_rows) - n_rows
    assert np.all(starts >= 0)
    assert np.all(starts + length <= n_rows.sum())
    assert length >= n_rows.max()
    mine = starts[layout.shard_of]
    assert np.all(mine <= begins)
    assert np.all(begins + n_rows <= mine + length)


def broken(k: int, X: object = None, y: object = None) -> list:
    clients = [(A.copy(), b.copy()) for A, b in CLIENTS]
    clients[k] = (CLIENTS[k][0] if X is None else X, CLIENTS[k][1] if y is None else y)  # type: ignore[assignment]
    return clients


def binary(wrong: float) -> list:
    """Labels 0 and 1, but for one of Hungary's."""
    clients = [(A, (b > 0).astype(float)) for A, b in CLIENTS]
    clients[1][1][9] = wrong
    return clients


def with_nan() -> np.ndarray:
    A = CLIENTS[1][0].copy()
    A[4, 1] = np.nan
    return A


NAMES = ["Cleveland", "Hungary", "Switzerland", "VA"]


@pytest.mark.parametrize(
    ("clients", "kwargs", "words"),
    [
        (
            broken(1, X=with_nan()),
            {"feature_names": ["age", "chol"]},
            ["Hungary", "chol", "row 4", "nan"],
        ),
        (broken(2, X=np.ones((7, 3))), {}, ["Switzerland", "3 columns", "Cleveland", "has 2"]),
        (broken(3, y=np.array([np.inf])), {}, ["VA", "row 0", "inf"]),
        (broken(0, X=np.zeros((0, 2)), y=np.zeros(0)), {}, ["Cleveland", "zero rows"]),
        (broken(0, y=np.zeros(2)), {}, ["Cleveland", "(3, 2)", "(2,)"]),
        (broken(0, X=[["a", "b"]] * 3), {}, ["Cleveland", "real numbers"]),
        (binary(2.0), {"loss": "logistic"}, ["Hungary", "2.0", "0/1"]),
        (binary(-2.0), {"loss": "poisson"}, ["Hungary", "-2.0"]),
        (CLIENTS, {"loss": "logistik"}, ["logistik", "logistic", "poisson"]),
        (CLIENTS, {"regularizer": "l3"}, ["l3", "l1"]),
        (CLIENTS, {"weights": "patients"}, ["weights", "patients", "rows", "clients"]),
        (CLIENTS, {"weights": [1.0, 2.0]}, ["4 numbers", "(2,)"]),
        (CLIENTS, {"weights": [1.0, 2.0, -1.0, 1.0]}, ["Switzerland", "-1.0"]),
        (CLIENTS, {"reduction": "median"}, ["reduction", "median", "mean", "sum"]),
        (CLIENTS, {"l2": -1.0}, ["l2", "-1.0"]),
        (CLIENTS, {"names": ["a", "b", "a", "c"]}, ["'a'"]),
        (CLIENTS, {"names": ["a"]}, ["1 entries for 4 clients"]),
        (CLIENTS, {"shards": 99}, ["shards"]),
        (broken(2, y=np.full(7, 1e200)), {}, ["Switzerland", "target", "1e+200", "rescale"]),
        (broken(2, X=np.full((7, 2), 1e150)), {}, ["Switzerland", "column", "1e+150", "rescale"]),
        (broken(2, X=np.full((7, 2), 1j)), {}, ["Switzerland", "real numbers"]),
        (CLIENTS, {"l2": "a"}, ["l2", "'a'"]),
        (CLIENTS, {"names": "abcd"}, ["names", "abcd"]),
        (None, {}, ["sequence of (X, y)"]),
        ([], {}, ["empty"]),
        ([1, 2], {}, ["pair (X, y)"]),
    ],
)
def test_bad_input_is_named(clients: list, kwargs: dict, words: list[str]) -> None:
    if "names" not in kwargs and clients and len(clients) == 4:
        kwargs = {"names": NAMES, **kwargs}
    with pytest.raises(fx.InputError) as error:
        fx.Problem(clients, **kwargs)
    for word in words:
        assert re.search(re.escape(word), str(error.value), re.IGNORECASE), (word, str(error.value))
