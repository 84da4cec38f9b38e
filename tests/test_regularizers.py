"""Regularisers: every prox against a slow twin, its identities, and the inputs to refuse."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedexact.errors import InputError
from fedexact.regularizers import (
    L1,
    REGULARIZERS,
    Box,
    ElasticNet,
    GroupLasso,
    L2Ball,
    NonNegative,
    OnCoordinates,
    Regularizer,
    SquaredL2,
    Zero,
    make_regularizer,
)

D = 5
GROUPS = ((0, 3), (1,), (2, 4))
LOWER, UPPER = np.array([-1.0, 0.0, -np.inf, 0.2, -2.0]), np.array([1.0, np.inf, 0.5, 0.3, -1.0])
CASES: dict[str, Regularizer] = {
    "none": Zero(),
    "l1": L1(0.4),
    "elastic net": ElasticNet(0.7, 0.3),
    "squared l2": SquaredL2(0.9),
    "box": Box(LOWER, UPPER),
    "scalar box": Box(-0.5, np.inf),
    "nonnegative": NonNegative(),
    "group lasso": GroupLasso(0.5, GROUPS),
    "l2 ball": L2Ball(0.8),
    "on coordinates": OnCoordinates(L1(0.4), (1, 4)),
    "groups on coordinates": OnCoordinates(GroupLasso(0.5, ((0, 1), (2,))), (4, 0, 3)),
}
every_regularizer = pytest.mark.parametrize("g", CASES.values(), ids=CASES.keys())

value = jax.jit(lambda g, x: g.value(x))
prox = jax.jit(lambda g, v, step: g.prox(v, step))

entries = st.floats(-4, 4).map(lambda entry: round(entry, 6))  # no denormals
vectors = arrays(float, D, elements=entries)
steps = st.floats(0.05, 5.0)


# --- values in closed form ------------------------------------------------------------------------


def test_values():
    x = np.array([3.0, -1.0, 0.0, 4.0, 0.5])
    for g, expected in (
        (Zero(), 0.0),
        (L1(0.4), 0.4 * 8.5),
        (ElasticNet(0.7, 0.3), 0.7 * (0.3 * 8.5 + 0.35 * 26.25)),
        (SquaredL2(0.9), 0.45 * 26.25),
        (GroupLasso(0.5, GROUPS), 0.5 * (np.sqrt(2) * 5.0 + 1.0 + np.sqrt(2) * 0.5)),
        (OnCoordinates(L1(0.4), (1, 4)), 0.4 * 1.5),
        (OnCoordinates(NonNegative(), (0, 3)), 0.0),
        (NonNegative(), np.inf),
        (L2Ball(5.2), 0.0),
        (L2Ball(5.1), np.inf),
        (Box(-1.0, 4.0), 0.0),
        (Box(-0.999, np.inf), np.inf),
        (Box(-np.inf, [3.0, -1.0, 0.0, 3.9, 0.5]), np.inf),
    ):
        np.testing.assert_allclose(value(g, x), expected, rtol=1e-14)


def test_a_rounding_error_outside_a_set_counts_as_inside():
    x = np.full(D, 1000.0)
    assert value(Box(0.0, 1000.0), np.nextafter(x, np.inf)) == 0.0
    assert value(Box(0.0, 1000.0), x * (1 + 1e-9)) == np.inf
    assert value(NonNegative(), np.full(D, -1e-15)) == 0.0
    assert value(NonNegative(), np.full(D, -1e-9)) == np.inf
    unit = np.full(D, 1 / np.sqrt(D))
    assert value(L2Ball(1.0), unit * (1 + 1e-15)) == 0.0
    assert value(L2Ball(1.0), unit * (1 + 1e-9)) == np.inf


# --- every prox against a slow twin ---------------------------------------------------------------


def split_twin(l1: float, l2: float) -> Callable:
    """l1 |u|_1 + l2/2 |u|^2 over u = a - b with a, b >= 0: smooth with bounds."""

    def twin(v, step):
        def objective(ab):
            u = ab[: v.size] - ab[v.size :]
            slope = l2 * u + (u - v) / step
            smooth = 0.5 * l2 * (u @ u) + (u - v) @ (u - v) / (2 * step)
            return l1 * np.sum(ab) + smooth, np.concatenate([l1 + slope, l1 - slope])

        ab = bounded_minimum(objective, np.zeros(2 * v.size), [(0, None)] * (2 * v.size))
        return ab[: v.size] - ab[v.size :]

    return twin


def box_twin(lower, upper) -> Callable:
    def twin(v, step):
        def objective(u):
            return (u - v) @ (u - v) / (2 * step), (u - v) / step

        bounds = list(zip(np.broadcast_to(lower, D), np.broadcast_to(upper, D), strict=True))
        return bounded_minimum(objective, np.clip(np.zeros(D), lower, upper), bounds)

    return twin


def bounded_minimum(objective, start, bounds) -> np.ndarray:
    options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000}
    result = scipy.optimize.minimize(
        objective, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options
    )
    return result.x


def nearest_in_balls(v: np.ndarray, groups, radii) -> np.ndarray:
    """The nearest point to v with |u_G| <= radius_G, by sequential quadratic programming."""
    balls = [
        {"type": "ineq", "fun": lambda u, G=list(G), r=r: r**2 - u[G] @ u[G]}
        for G, r in zip(groups, radii, strict=True)
    ]
    result = scipy.optimize.minimize(
        lambda u: (0.5 * (u - v) @ (u - v), u - v),
        0.1 * v,
        jac=True,
        constraints=balls,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return result.x


def group_twin(strength: float, groups) -> Callable:
    """By the dual: u = v - step z, z the nearest point to v/step with |z_G| <= strength |G|^1/2."""

    def twin(v, step):
        radii = [strength * np.sqrt(len(group)) for group in groups]
        return v - step * nearest_in_balls(v / step, groups, radii)

    return twin


TWINS: dict[str, Callable] = {
    "none": lambda v, step: v,
    "l1": split_twin(0.4, 0.0),
    "elastic net": split_twin(0.7 * 0.3, 0.7 * 0.7),
    "squared l2": split_twin(0.0, 0.9),
    "box": box_twin(LOWER, UPPER),
    "scalar box": box_twin(-0.5, np.inf),
    "nonnegative": box_twin(0.0, np.inf),
    "group lasso": group_twin(0.5, GROUPS),
    "l2 ball": lambda v, step: nearest_in_balls(v, [range(D)], [0.8]),
}


@pytest.mark.parametrize("name", TWINS)
def test_prox_equals_its_slow_twin(name):
    rng = np.random.default_rng(0)
    for step in (0.1, 1.0, 3.0):
        for scale in (0.3, 3.0):
            v = scale * rng.normal(size=D)
            np.testing.assert_allclose(
                prox(CASES[name], v, step), TWINS[name](v, step), rtol=1e-5, atol=1e-6
            )


# --- what makes a point the prox ------------------------------------------------------------------


@every_regularizer
@given(v=vectors, u=vectors, step=steps)
def test_prox_minimises(g, v, u, step):
    """p = prox(v, step) iff h(u) >= h(p) + |u - p|^2 (1/step + mu)/2 for all u, h the objective."""
    p = np.asarray(prox(g, v, step))

    def h(x):
        return float(value(g, x)) + np.sum((x - v) ** 2) / (2 * step)

    assert np.isfinite(h(p))
    strong = 1 / step + float(g.strong_convexity)
    for other in (u, np.asarray(prox(g, u, step)), p + 1e-3 * (u - p), v, 0.0 * v):
        gap = 0.5 * strong * np.sum((other - p) ** 2)
        assert h(other) >= h(p) + gap - 1e-11 * (1 + abs(h(p)) + gap)


@every_regularizer
@given(v=vectors, w=vectors, step=steps)
def test_prox_is_firmly_nonexpansive(g, v, w, step):
    """(1 + step mu) |p - q|^2 <= <p - q, v - w>."""
    difference = np.asarray(prox(g, v, step)) - np.asarray(prox(g, w, step))
    left = (1 + step * float(g.strong_convexity)) * (difference @ difference)
    assert left <= difference @ (v - w) + 1e-12 * (1 + v @ v + w @ w)


CONJUGATES: dict[str, tuple[Regularizer, Callable[[float], Regularizer]]] = {
    # g, and the conjugate of step * g as a regulariser: v = prox_{step g}(v) + prox_{(step g)*}(v)
    "none": (Zero(), lambda step: Box(0.0, 0.0)),
    "l1": (L1(0.4), lambda step: Box(-0.4 * step, 0.4 * step)),
    "squared l2": (SquaredL2(0.9), lambda step: SquaredL2(1 / (0.9 * step))),
    "nonnegative": (NonNegative(), lambda step: Box(-np.inf, 0.0)),
    "l2 ball": (L2Ball(0.8), lambda step: GroupLasso(0.8 / np.sqrt(D), (tuple(range(D)),))),
    "group lasso": (
        GroupLasso(0.5, ["all"] * D),
        lambda step: L2Ball(0.5 * np.sqrt(D) * step),
    ),
}


@pytest.mark.parametrize("name", CONJUGATES)
@given(v=vectors, step=steps)
def test_moreau_identity(name, v, step):
    g, conjugate = CONJUGATES[name]
    total = prox(g, v, step) + prox(conjugate(step), v, 1.0)
    np.testing.assert_allclose(total, v, rtol=1e-13, atol=1e-13)


@given(v=vectors, step=steps)
def test_limits_coincide(v, step):
    for one, other in (
        (ElasticNet(0.6, 1.0), L1(0.6)),
        (ElasticNet(0.6, 0.0), SquaredL2(0.6)),
        (GroupLasso(0.6, list(range(D))), L1(0.6)),
        (Box(0.0, np.inf), NonNegative()),
        (Box(-np.inf, np.inf), Zero()),
        (L1(0.0), Zero()),
        (SquaredL2(0.0), Zero()),
        (L2Ball(1e9), Zero()),
        (OnCoordinates(L1(0.6), range(D)), L1(0.6)),
        (OnCoordinates(L1(0.6), ()), Zero()),
    ):
        np.testing.assert_allclose(prox(one, v, step), prox(other, v, step), rtol=1e-14)
        np.testing.assert_allclose(value(one, v), value(other, v), rtol=1e-13)


@every_regularizer
def test_strong_convexity_is_right_and_the_largest(g):
    """g - mu/2 |x|^2 is midpoint convex; with a larger mu it is not, where g is finite."""
    rng = np.random.default_rng(0)
    points = np.asarray([prox(g, 3 * rng.normal(size=D), 1.0) for _ in range(40)])

    def excess(x, y, mu):
        def h(z):
            return float(value(g, z)) - 0.5 * mu * (z @ z)

        return 0.5 * (h(x) + h(y)) - h(0.5 * (x + y))

    mu = float(g.strong_convexity)
    pairs = list(zip(points[::2], points[1::2], strict=True))
    # and a pair on one ray, along which norms are linear (step 0 projects into the domain)
    pairs.append((points[0], np.asarray(prox(g, 0.5 * points[0], 0.0))))
    assert min(excess(x, y, mu) for x, y in pairs) >= -1e-12
    assert min(excess(x, y, mu + 0.01) for x, y in pairs) < -1e-6


def test_strong_convexity_values():
    assert CASES["squared l2"].strong_convexity == 0.9
    assert CASES["elastic net"].strong_convexity == pytest.approx(0.49)
    assert OnCoordinates(SquaredL2(0.9), (0,)).strong_convexity == 0.0


# --- some coordinates only ------------------------------------------------------------------------


@given(v=vectors, step=steps)
def test_on_coordinates_leaves_the_others_free(v, step):
    g = ElasticNet(0.7, 0.3)
    restricted = OnCoordinates(g, (3, 1))
    p = np.asarray(prox(restricted, v, step))
    np.testing.assert_array_equal(p[[0, 2, 4]], v[[0, 2, 4]])
    np.testing.assert_allclose(p[[3, 1]], prox(g, v[[3, 1]], step), rtol=1e-14)
    np.testing.assert_allclose(value(restricted, v), value(g, v[[3, 1]]), rtol=1e-14)


# --- as a part of a compiled program --------------------------------------------------------------


def test_parameters_are_leaves():
    traces = []

    @jax.jit
    def traced(g, v):
        traces.append(g)
        return g.prox(v, 1.0)

    v, strengths = np.linspace(-2, 2, D), np.array([0.1, 0.5, 1.0])
    for make in (
        L1,
        SquaredL2,
        L2Ball,
        lambda s: ElasticNet(s, 0.5),
        lambda s: Box(-s, s),
        lambda s: GroupLasso(s, GROUPS),
        lambda s: OnCoordinates(L1(s), (1, 2)),
    ):
        traces.clear()
        one_by_one = [traced(make(strength), v) for strength in strengths]
        assert len(traces) == 1
        together = jax.vmap(lambda strength, make=make: traced(make(strength), v))(strengths)
        np.testing.assert_allclose(together, one_by_one, rtol=1e-14)


def test_regularizers_are_told_apart_by_jit():
    """Tree structures of different classes with equal static fields must differ (jit's cache)."""
    kinds = [Zero(), NonNegative(), L1(1.0), SquaredL2(1.0), L2Ball(1.0), GroupLasso(1.0, GROUPS)]
    structures = [jax.tree.structure(g) for g in kinds]
    for i, one in enumerate(structures):
        assert [one == other for other in structures] == [i == j for j in range(len(structures))]


@every_regularizer
def test_derivatives_at_zero_are_finite(g):
    assert np.all(np.isfinite(jax.jit(jax.jacfwd(lambda v: g.prox(v, 0.5)))(jnp.zeros(D))))
    assert np.all(np.isfinite(jax.jit(jax.grad(g.value))(jnp.zeros(D))))


# --- border ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L1(-0.1), r"L1: strength must be a finite number >= 0, got -0.1"),
        (lambda: L1(np.inf), r"L1: strength must be a finite number"),
        (lambda: SquaredL2(-1), r"SquaredL2: strength .* got -1"),
        (lambda: ElasticNet(-1.0), r"ElasticNet: strength .* got -1.0"),
        (lambda: ElasticNet(1.0, 1.5), r"l1_ratio must lie in \[0, 1\], got 1.5"),
        (lambda: ElasticNet(1.0, np.nan), r"l1_ratio must lie in \[0, 1\], got nan"),
        (lambda: L2Ball(0.0), r"L2Ball: radius must be a positive finite number, got 0.0"),
        (lambda: Box(1.0, 0.0), r"lower <= upper fails in coordinate 0: 1.0 and 0.0"),
        (lambda: Box([0, 2], [1, 1]), r"fails in coordinate 1: 2.0 and 1.0"),
        (lambda: Box(0.0, [1.0, np.nan]), r"fails in coordinate 1: 0.0 and nan"),
        (lambda: Box([0, 0], [1, 1, 1]), r"same length, got shapes \(2,\) and \(3,\)"),
        (lambda: Box(np.zeros((1, 1)), 1.0), r"numbers or vectors .* got shapes \(1, 1\)"),
        (lambda: GroupLasso(-1.0, GROUPS), r"GroupLasso: strength"),
        (lambda: GroupLasso(1.0, []), r"groups is empty"),
        (lambda: GroupLasso(1.0, [[0, 1], 2]), r"mixes lists of coordinates and labels"),
        (lambda: GroupLasso(1.0, [[0, 1.5]]), r"must be an integer, got 1.5"),
        (lambda: OnCoordinates(Zero(), (1.5,)), r"must be an integer, got 1.5"),  # pyright: ignore
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (
            Box([0, 0], 1.0),
            r"lower must be a number or .* each of the 5 coordinates, got .* \(2,\)",
        ),
        (Box(0.0, np.ones(6)), r"upper must be a number or .* got shape \(6,\)"),
        (GroupLasso(1.0, ((0, 1), (2, 3))), r"coordinate 4 is in 0"),
        (GroupLasso(1.0, ((0, 1, 2), (2, 3, 4))), r"coordinate 2 is in 2"),
        (GroupLasso(1.0, ((0, 1, 2, 3, 4), (7,))), r"coordinate 7 in group \(7,\), d is 5"),
        (GroupLasso(1.0, ((0, 1, 2, 3, -1),)), r"coordinate -1"),
        (OnCoordinates(L1(1.0), (0, 5)), r"coordinate 5 in index, d is 5"),
        (OnCoordinates(L1(1.0), (-1,)), r"coordinate -1 in index"),
        (OnCoordinates(L1(1.0), (2, 2)), r"twice: \(2, 2\)"),
        (
            OnCoordinates(Box([0, 0], 1.0), (1, 2, 3)),
            r"each of the 3 coordinates, got shape \(2,\)",
        ),
    ],
)
def test_check_refuses(g, message):
    with pytest.raises(InputError, match=message):
        g.check(D)


@every_regularizer
def test_check_accepts(g):
    g.check(D)


def test_groups_as_labels():
    expected = ((0, 3), (1,), (2, 4))
    for groups in (["a", "b", "c", "a", "c"], np.array([7, 1, 2, 7, 2]), [[0, 3], (1,), [2, 4]]):
        assert GroupLasso(1.0, groups).groups == expected


def test_descriptions_give_the_parameters():
    for name, expected in {
        "none": "no regulariser",
        "l1": "L1 penalty, strength 0.4",
        "elastic net": "elastic net penalty, strength 0.7, L1 ratio 0.3",
        "squared l2": "squared L2 penalty, strength 0.9",
        "box": "box, 5 bounds <= x <= 5 bounds",
        "scalar box": "box, -0.5 <= x <= inf",
        "nonnegative": "x >= 0",
        "group lasso": "group lasso penalty, strength 0.5, 3 groups",
        "l2 ball": "|x|_2 <= 0.8",
        "on coordinates": "L1 penalty, strength 0.4, on 2 coordinates",
    }.items():
        assert CASES[name].describe() == expected


def test_registry_and_make_regularizer():
    assert {name: g.name for name, g in REGULARIZERS.items()} == {n: n for n in REGULARIZERS}
    assert make_regularizer(None) == Zero()
    assert make_regularizer("none") == Zero()
    assert make_regularizer("nonnegative") == NonNegative()
    assert make_regularizer(L1(0.2)) == L1(0.2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("l1", r"regularizer 'l1' needs parameters: pass L1\(strength=...\)"),
        ("group_lasso", r"pass GroupLasso\(strength=..., groups=...\)"),
        ("lasso", r"unknown value 'lasso'.* Choices: none, l1, elastic_net"),
        (0.1, r"must be None or a Regularizer such as L1\(strength=0.1\), got 0.1"),
        (L1, r"must be None or a Regularizer"),
    ],
)
def test_make_regularizer_refuses(spec, message):
    with pytest.raises(InputError, match=message):
        make_regularizer(spec)
