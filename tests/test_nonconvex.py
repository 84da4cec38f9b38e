"""Guarantees beyond convexity: FedDR's bound on stationarity, FOCUS under Polyak-Lojasiewicz."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.core import float64, record
from fedexact.losses.base import LinearLoss
from protocol import oracle_of, rounds

# --- FedDR on robust regression -------------------------------------------------------------------


@record
class GemanMcClure(LinearLoss):
    """r^2 / (2 (1 + r^2)), r = eta - y: bounded, with second derivatives in [-1/4, 1]."""

    name: ClassVar[str] = "geman-mcclure"
    summary: ClassVar[str] = "redescending robust regression"
    newton: ClassVar[bool] = False  # not convex

    def phi(self, eta: jax.Array, y: jax.Array) -> jax.Array:
        return 0.5 * (eta - y) ** 2 / (1 + (eta - y) ** 2)

    def d1(self, eta: jax.Array, y: jax.Array) -> jax.Array:
        return (eta - y) / (1 + (eta - y) ** 2) ** 2

    def d2(self, eta: jax.Array, y: jax.Array) -> jax.Array:
        return (1 - 3 * (eta - y) ** 2) / (1 + (eta - y) ** 2) ** 3

    def d2_bound(self, y: jax.Array) -> jax.Array:
        return jnp.ones_like(y)


P = np.linspace(0.3, 0.9, 6)
START = np.array([3.0, -2.0, 3.0])
SEEDS = range(20)


@pytest.fixture(scope="module")
def robust() -> fx.Problem:
    """Six clients whose coefficients differ, a quarter of their rows outliers."""
    rng = np.random.default_rng(0)
    beta, clients = rng.normal(size=3), []
    for _ in P:
        X = rng.normal(size=(20, 3))
        y = X @ (beta + 0.7 * rng.normal(size=3)) + 0.3 * rng.normal(size=20)
        outlier = rng.random(20) < 0.25
        clients.append((X, y + 8 * outlier * rng.normal(size=20)))
    with float64():
        return fx.Problem(clients, loss=GemanMcClure())


@record
class ExactProx:
    """An oracle whose prox is exact to rounding, for steps below 1/L."""

    oracle: Any

    def client(self, k: Any) -> ExactProx:
        return ExactProx(self.oracle.client(k))

    def prox(self, v: jax.Array, step: Any, start: jax.Array) -> jax.Array:
        def descend(_: Any, u: jax.Array) -> jax.Array:
            slope = self.oracle.grad(u) + (u - v) / step
            return u - slope / (self.oracle.smoothness + 1 / step)

        return jax.lax.fori_loop(0, 80, descend, v)


@pytest.mark.parametrize(("relax", "sL"), [(1.0, 0.45), (1.0, 0.2), (0.5, 0.4), (1.5, 0.1)])
def test_feddr_satisfies_its_bound(robust: fx.Problem, relax: float, sL: float) -> None:
    """sum_{t <= T} E|G_s(xbar_t)|^2 <= C1 (F(x0) - F*), mean over 20 seeds, Bernoulli(p_k), with
    C1 = 2 (1 + s L)^3 / (alpha s min p_k (2 - alpha - 2 s L)) (Tran-Dinh et al. 2021, without the
    server block). Without a regulariser G_s is the gradient of F."""
    c = robust.constants()
    assert not c.convex
    algorithm = fx.FedDR(step=sL / c.L, relax=relax)
    oracle = ExactProx(oracle_of(robust, algorithm))
    squared, ends = [], []
    for seed in SEEDS:
        masks = fx.Bernoulli(P).mask(6, 0, 600, seed)
        x = rounds(robust, algorithm, masks, START, oracle=oracle).x
        gradients = [robust.value_and_grad(z) for z in (START, *x[:99], x[-1])]
        squared.append(sum(float(g @ g) for _, g in gradients[:-1]))
        ends.append(gradients[-1][0])
    lowest = min(ends)  # at least F*, so that the bound is tested a little sharper than it is
    fall = robust.value_and_grad(START)[0] - lowest
    C1 = 2 * (1 + sL) ** 3 / (relax * algorithm.step * P.min() * (2 - relax - 2 * sL))
    assert np.mean(squared) <= C1 * fall


STATIONARY = {
    "FedDR": (fx.FedDR(), SEEDS),
    "FedDR block": (fx.FedDR(server_block=True), SEEDS),
    "FedADMM": (fx.FedADMM(), range(3)),
    "FedPD": (fx.FedPD(), range(3)),
    "FedDyn": (fx.FedDyn(), range(3)),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_a_stationary_point_is_reached(robust: fx.Problem, name: str) -> None:
    """With the library's own inexact prox and default hyperparameters, whatever the seed."""
    algorithm, seeds = STATIONARY[name]
    for seed in seeds:
        result = fx.solve(
            robust, algorithm, fx.Bernoulli(P), rounds=6000, record_every=6000, seed=seed,
            x0=START,
        )  # fmt: skip
        assert result.history["gradient_mapping"][-1].as_py() < 1e-9
        assert result.certificate is not None
        assert result.certificate.verdict != "certified"  # stationary is not the minimiser


def test_the_problem_is_not_convex_on_the_way(robust: fx.Problem) -> None:
    """So the bound above is not one of convex optimisation."""
    result = fx.solve(robust, fx.FedDR(), fx.Bernoulli(P), rounds=200, record_every=200, x0=START)
    along = np.linspace(0.0, 1.0, 50)
    curvature = [
        np.linalg.eigvalsh(robust.hessian(START + t * (result.x - START)))[0] for t in along
    ]
    assert min(curvature) < -0.01


# --- FOCUS where Polyak-Lojasiewicz holds ---------------------------------------------------------


def objective(x: np.ndarray) -> np.ndarray:
    """(...,) F of (..., 2) models; its minimum is 0."""
    return np.sum(x**2 + 3 * np.sin(x) ** 2, axis=-1)


def wavy(x: jax.Array, rows: fx.Rows) -> jax.Array:
    """sum_j x_j^2 + 3 sin^2 x_j, tilted by the row; curvature in [-4, 8]."""
    return jnp.sum(x**2 + 3 * jnp.sin(x) ** 2) + rows.X @ x


@pytest.fixture(scope="module")
def tilted() -> fx.Problem:
    """Five clients whose tilts cancel, not in pairs: F = sum x^2 + 3 sin^2 x, minimum 0 at 0, and
    each client alone has its minimum elsewhere."""
    rng = np.random.default_rng(1)
    tilts = np.array([[4.0, -3.0], [-1.0, 2.0], [-1.0, 2.0], [-1.0, 2.0], [-1.0, -3.0]])
    noise = rng.normal(size=(5, 4, 2))
    noise -= noise.mean(axis=1, keepdims=True)
    clients = [(tilt[None] + rows, np.zeros(4)) for tilt, rows in zip(tilts, noise, strict=True)]
    with float64():
        return fx.Problem(clients, loss=fx.CustomLoss(wavy))


FAR = np.array([3.0, -4.0])


def test_the_inequality_holds_and_convexity_does_not(tilted: fx.Problem) -> None:
    """|grad F|^2 >= 2 mu (F - F*) with mu = 1/32 (Karimi, Nutini & Schmidt 2016), on a grid."""
    grid = np.linspace(-8.0, 8.0, 81)
    for x in np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)[::7]:
        value, gradient = tilted.value_and_grad(x)
        assert value == pytest.approx(objective(x), abs=1e-10)
        assert gradient @ gradient >= 2 / 32 * value - 1e-10
    assert np.linalg.eigvalsh(tilted.hessian(np.array([np.pi / 2, 0.0])))[0] == pytest.approx(-4)
    assert pytest.approx(8) == tilted.constants().L  # of x = 0, and here of everywhere
    assert not tilted.constants().convex


RANDOM = {"bernoulli": fx.Bernoulli([0.9, 0.7, 0.5, 0.3, 0.2]), "markov": fx.Markov(0.2, 0.3)}


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("name", RANDOM)
def test_focus_converges_linearly(tilted: fx.Problem, name: str, local_steps: int) -> None:
    """In the objective gap, to 1e-10 and as many rounds from 1e-6 to 1e-10 as from 1e-2 to 1e-6,
    up to a quarter, when 10 seeds are added up."""
    rounds_between = np.zeros(2)
    algorithm = fx.FOCUS(lr=0.02, local_steps=local_steps)
    for seed in range(10):
        masks = RANDOM[name].mask(5, 0, 800, seed)
        gap = objective(rounds(tilted, algorithm, masks, FAR).x)
        assert gap[-1] <= 1e-10
        below = [int(np.flatnonzero(gap > level)[-1]) + 1 for level in (1e-2, 1e-6, 1e-10)]
        rounds_between += np.diff(below)
    assert rounds_between[1] / rounds_between[0] == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("name", RANDOM)
def test_focus_reaches_the_minimum_with_its_default_step(tilted: fx.Problem, name: str) -> None:
    for seed in range(20):
        result = fx.solve(
            tilted, fx.FOCUS(), RANDOM[name], rounds=600, record_every=600, x0=FAR, seed=seed
        )
        assert result.history["objective"][-1].as_py() <= 1e-10


@pytest.mark.parametrize("participation", [fx.Full(), *RANDOM.values()], ids=lambda p: p.name)
def test_fedavg_stalls(tilted: fx.Problem, participation: fx.Participation) -> None:
    masks = participation.mask(5, 0, 2000, 0)
    gap = objective(rounds(tilted, fx.FedAvg(), masks, FAR, participation).x)
    assert np.median(gap[-500:]) > 1e-3
    assert np.median(gap[-500:]) == pytest.approx(np.median(gap[-1000:-500]), rel=0.5)
