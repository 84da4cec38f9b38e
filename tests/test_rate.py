"""Predicted rates: by hand, against the observed ones, and what they are made of."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.solve import setting_of
from fedexact.theory import cost, rate
from fedexact.theory.rounds import Rounds, law, run
from fedexact.theory.settling import CHUNK, conserved, declared, jacobian, settle, telling
from problems import ALGORITHMS, PARTICIPATIONS, least_squares, logistic

# Anderson's extrapolation has no linear rate; random batches have theirs in a test of its own.
OTHERS = {"Anderson", "Anderson DR", "FedAvg batch", "SGFOCUS 3", "VRFOCUS", "VRFOCUS 3"}
# One of each algorithm is enough.
VARIANTS = {"SCAFFOLD 1", "FedSplit half", "FedDR block", "FOCUS", "FedPD 3"}


def one_dimensional(h: tuple[float, ...]) -> fx.Problem:
    """f_k(x) = h_k x^2 / 2 - ..., one row per client."""
    rows = [(np.array([[math.sqrt(c)]]), np.array([float(k + 1)])) for k, c in enumerate(h)]
    return fx.Problem(rows, loss="squared")


def slow() -> fx.Problem:
    """Four clients, condition number about 40."""
    rng = np.random.default_rng(3)
    clients = []
    for _ in range(4):
        X = rng.normal(size=(20, 3)) * np.array([1.0, 0.4, 0.15])[None, :]
        clients.append((X, X @ rng.normal(size=3) + 0.1 * rng.normal(size=20)))
    return fx.Problem(clients, loss="squared")


SLOW = slow()


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "relax"), [(1.0, 1.0), (0.3, 0.5), (2.5, 0.9)])
def test_fedsplit_on_two_curvatures(step: float, relax: float) -> None:
    """z_1+ = (1 - tau) z_1 + tau c_1 z_2 and the other way round, c_k = (1 - s h_k)/(1 + s h_k):
    eigenvalues 1 - tau +- tau sqrt(c_1 c_2)."""
    h = np.array([0.5, 1.8])
    found = rate(fx.FedSplit(step=step, relax=relax), one_dimensional((0.5, 1.8)))
    root = relax * np.emath.sqrt(np.prod((1 - step * h) / (1 + step * h)))
    by_hand = max(abs(1 - relax + root), abs(1 - relax - root))
    assert found.per_round == pytest.approx(float(by_hand), rel=1e-9)
    assert (found.error, found.method, found.floor) == (0.0, "spectral radius", 0.0)


def test_what_the_model_does_not_feel_does_not_count() -> None:
    """With equal curvatures the difference of the z_k shrinks by |1 - 2 tau/(1 + s h)| = 1/4 only,
    but x is their mean, which shrinks by |1 - 2 tau s h/(1 + s h)|."""
    found = rate(fx.FedSplit(step=2.0, relax=0.9), one_dimensional((0.7, 0.7)))
    assert found.per_round == pytest.approx(abs(1 - 1.8 * 1.4 / 2.4), rel=1e-9)


@pytest.mark.parametrize("lr", [0.3, 1.1, 2.5])
def test_focus_with_everybody_is_gradient_descent(lr: float) -> None:
    """|1 - lr h|, h the mean curvature; more than 1 where it diverges, and then no rounds do."""
    found = rate(fx.FOCUS(lr=lr), one_dimensional((0.5, 1.5)))
    assert found.per_round == pytest.approx(abs(1 - lr), rel=1e-9)
    assert math.isinf(found.rounds(1e-8)) == (lr > 2)


def test_one_client_that_comes_and_goes() -> None:
    """(1 - lr h)^p typically, sqrt(1 - p + p (1 - lr h)^2) in mean square."""
    p, lr = 0.3, 0.6
    found = rate(fx.FOCUS(lr=lr), one_dimensional((1.0,)), fx.Bernoulli(p))
    assert found.method == "Lyapunov"
    assert found.mean_square == pytest.approx(math.sqrt(1 - p + p * (1 - lr) ** 2), rel=1e-9)
    assert 0 < found.error < 0.02
    assert abs(found.per_round - (1 - lr) ** p) < 4 * found.error


def test_one_of_two_clients_at_a_time() -> None:
    """FedAvg multiplies the error by A_k = (1 - lr h_k)^R of whoever comes."""
    lr, R, h = 0.4, 2, np.array([0.5, 2.0])
    problem, algorithm = one_dimensional((0.5, 2.0)), fx.FedAvg(lr=lr, local_steps=R)
    A = (1 - lr * h) ** R
    in_turn = rate(algorithm, problem, fx.Cyclic(2))
    assert in_turn.method == "cycle"
    assert in_turn.per_round == pytest.approx(math.sqrt(A[0] * A[1]), rel=1e-9)
    at_random = rate(algorithm, problem, fx.Uniform(1))
    assert at_random.mean_square == pytest.approx(math.sqrt(np.mean(A**2)), rel=1e-9)
    assert abs(at_random.per_round - math.sqrt(A[0] * A[1])) < 4 * at_random.error
    assert at_random.floor is None


def test_rounds_to_a_tolerance() -> None:
    found = rate(fx.FOCUS(lr=0.5), one_dimensional((1.0, 1.0)))
    assert found.rounds(0.5**7 * 1.001) == 7
    assert found.rounds(0.5**7 * 0.999) == 8
    for tol in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(fx.InputError, match="tol"):
            found.rounds(tol)


def test_a_client_that_never_comes_is_named() -> None:
    with pytest.raises(fx.InputError, match="client '1' never takes part"):
        rate(fx.FOCUS(), SLOW, fx.Bernoulli([0.5, 0.0, 0.5, 0.5]))


@pytest.mark.parametrize("pattern", [fx.Full(), fx.Uniform(2), fx.Cyclic(2)], ids=str)
def test_steps_far_too_long_have_the_rate_infinity(pattern: fx.Participation) -> None:
    """No overflow, no eigenvalues of what is not finite."""
    for algorithm in (fx.FedAvg(lr=1e40, local_steps=3), fx.FOCUS(lr=1e308)):
        found = rate(algorithm, SLOW, pattern)
        assert found.per_round == math.inf
        assert found.rounds(1e-8) == math.inf


@pytest.mark.slow
def test_superlinear_waits_until_everybody_has_been_seen() -> None:
    p = np.array([0.3, 0.5, 0.2])
    problem = least_squares(4, (8, 8, 8))
    found = rate(fx.PushNewton(), problem, fx.Bernoulli(p))
    t = np.arange(1, 50)
    seen = np.prod(1 - (1 - p[None, :]) ** t[:, None], axis=1)
    median = int(t[np.argmax(seen >= 0.5)])
    assert found.per_round == 0.0
    assert abs(found.first - median) <= 1
    assert found.rounds(1e-8) == found.first + 1
    assert rate(fx.PushNewton(), problem, fx.Cyclic(3)).rounds(1e-8) == 3 + 1


def test_row_gradients_of_a_coin_are_their_mean() -> None:
    """ProxSkip takes a geometric number of steps, 1/p on average; 64 draws."""
    algorithm = fx.ProxSkip().resolve(setting_of(SLOW, fx.Full()))
    p, rows = algorithm.probability, 80
    error = rows * math.sqrt(1 - p) / p / 8
    assert abs(cost(algorithm, SLOW).gradients - rows / p) < 3 * error


# --- what is conserved ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SCAFFOLD 2", "FedSplit", "FedDR", "FOCUS", "MIFA", "FedADMM"])
def test_unit_eigenvalues_are_the_invariant_and_the_constants(name: str) -> None:
    task = Rounds(SLOW, ALGORITHMS[name]())
    place = settle(task, 1000)
    J = np.asarray(
        jacobian(task.program, place.state, jnp.ones((1, 4), bool), jnp.asarray(place.round))[1]
    )
    constants = int(np.sum(place.moved == 0.0))
    assert constants >= 1
    eigenvalues = np.linalg.eigvals(J)
    assert np.sum(np.abs(eigenvalues - 1) < 1e-7) == SLOW.dim + constants
    W, V = conserved(J[None]), declared(task, place)
    assert W.shape == V.shape == (len(J), SLOW.dim + constants)
    np.testing.assert_allclose(W @ W.T, V @ V.T, atol=1e-8)


def test_a_few_cohorts_tell_what_all_conserve() -> None:
    """All clients are among them, and meet if they ever do."""
    pairs = np.array([np.isin(np.arange(6), p) for p in itertools.combinations(range(6), 2)])
    few = telling(pairs)
    assert len(few) < len(pairs)
    meet = np.linalg.matrix_power(few.T.astype(float) @ few, 6)
    assert np.all(meet > 0)
    blocks = np.array([[True, True, False, False], [False, False, True, True]])
    assert len(telling(blocks)) == 2


def small(n_rows: tuple[int, ...], d: int, **kwargs: Any) -> fx.Problem:
    rng = np.random.default_rng(1)
    clients = []
    for n in n_rows:
        X = rng.normal(size=(n, d)) * (0.5 + rng.random())
        clients.append((X, X @ rng.normal(size=d) + 0.1 * rng.normal(size=n) + 1.0))
    return fx.Problem(clients, weights="clients", **kwargs)


RIDGE = small((3, 10, 4, 6), 2, fit_intercept=True, l2=0.1)


@pytest.mark.parametrize(
    ("algorithm", "problem", "pattern"),
    [
        (fx.ProxSkip(), RIDGE, fx.Cyclic(2)),
        (fx.ProxSkip(), RIDGE, fx.Uniform(2)),
        (fx.FedAWE(lr=0.03), small((3, 10, 4), 1), fx.Uniform(1)),
    ],
    ids=["blocks that never meet", "everybody together never comes", "seen in some rounds only"],
)
def test_what_drawn_cohorts_conserve_and_show(
    algorithm: fx.Algorithm, problem: fx.Problem, pattern: fx.Participation
) -> None:
    """The slope of the envelope of the distance of two runs."""
    found = rate(algorithm, problem, pattern)
    distances = [apart(Rounds(problem, algorithm, pattern, seed)) for seed in range(6)]
    envelopes = [np.maximum.accumulate(distance[::-1])[::-1] for distance in distances]
    observed = np.array([slope(envelope, 1e-2) for envelope in envelopes])
    error = math.hypot(found.error, float(observed.std(ddof=1)) / math.sqrt(6))
    assert abs(found.per_round - observed.mean()) < 4 * error
    assert error < 0.02
    assert 0.5 < found.per_round < 0.995


@pytest.mark.slow
def test_large_states_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arnoldi and the declared invariants against eigenvalues and the conserved functionals."""
    algorithm, patterns = fx.SCAFFOLD(local_steps=3), (fx.Full(), fx.Cyclic(2), fx.Uniform(2))
    dense = [rate(algorithm, SLOW, pattern) for pattern in patterns]
    for module in ("fedexact.theory.settling", "fedexact.theory.rate"):
        monkeypatch.setattr(sys.modules[module], "DENSE", 4)
    large = [rate(algorithm, SLOW, pattern) for pattern in patterns]
    for a, b in zip(dense, large, strict=True):
        assert a.method == b.method
        assert b.per_round == pytest.approx(a.per_round, rel=1e-6)


# --- the rounds -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg batch", "FedProx", "FedAWE", "FOCUS 3"])
def test_rounds_are_those_of_the_engines(name: str) -> None:
    """Clients of different buckets, random cohorts, the engines' keys, `receive`."""
    problem = logistic(2, (20, 11, 200, 35))
    assert len(problem.layout.sizes) > 1
    algorithm, pattern = ALGORITHMS[name](), fx.Bernoulli(0.5)
    task = Rounds(problem, algorithm, pattern, seed=3)
    _, models = task.run(task.initial(np.full(3, 0.5)), 0, 25)
    result = fx.solve(problem, algorithm, pattern, rounds=25, seed=3, x0=np.full(3, 0.5))
    np.testing.assert_allclose(models[-1], result.x, rtol=1e-9, atol=1e-11)


def test_the_prox_has_its_derivative() -> None:
    """Implicit derivative of the iterative prox of a logistic client, against differences."""
    task = Rounds(logistic(4), fx.FedSplit())
    oracle, v = task.oracle.client(1), jnp.array([0.3, -1.0, 0.5])

    @jax.jit
    def prox(v: jax.Array, step: float, start: jax.Array) -> jax.Array:
        return oracle.prox(v, step, start)

    J, ds, dstart = jax.jit(jax.jacfwd(prox, argnums=(0, 1, 2)))(v, 0.7, v)
    t = 1e-5
    columns = [(prox(v + t * e, 0.7, v) - prox(v - t * e, 0.7, v)) / (2 * t) for e in np.eye(3)]
    np.testing.assert_allclose(J, np.array(columns).T, atol=1e-8)
    np.testing.assert_allclose(ds, (prox(v, 0.7 + t, v) - prox(v, 0.7 - t, v)) / (2 * t), atol=1e-8)
    assert float(jnp.max(jnp.abs(dstart))) == 0.0


@pytest.mark.parametrize(
    "pattern",
    [fx.Full(), fx.Uniform(2), fx.Bernoulli([0.9, 0.6, 1.0, 0.0]), PARTICIPATIONS["categorical"]],
    ids=str,
)
def test_the_law_of_a_round(pattern: fx.Participation) -> None:
    found = law(pattern, 4)
    assert found is not None
    masks, probability = found
    assert len(np.unique(masks, axis=0)) == len(masks)
    assert np.sum(probability) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(probability @ masks, pattern.inclusion(4), atol=1e-12)
    share = masks / np.maximum(masks.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(probability @ share, pattern.aggregation(4), atol=1e-12)


def test_rounds_that_depend_on_each_other_have_no_law() -> None:
    for name in ("markov", "cyclic", "sine"):
        assert law(PARTICIPATIONS[name], 4) is None
    assert law(fx.Bernoulli(0.5), 30) is None
    assert law(fx.Uniform(15), 30) is None


# --- predicted and observed -----------------------------------------------------------------------


def slope(distance: np.ndarray, begin: float = 1e-3, end: float = 1e-10) -> float:
    """Factor per round between these parts of the first distance."""
    early, late = (int(np.argmax(distance < level * distance[0])) for level in (begin, end))
    assert 0 < early < late
    t = np.arange(early, late)
    return float(np.exp(np.polyfit(t, np.log(distance[early:late]), 1)[0]))


def apart(task: Rounds) -> np.ndarray:
    """(T,) distance of two runs with the same cohorts, until it is at rounding; in the pieces in
    which `settle` runs, whose program is compiled already."""
    states, pieces = [task.initial(np.full(task.problem.dim, x)) for x in (0.0, 3.0)], []
    for start in range(0, 10 * CHUNK, CHUNK):
        found = [task.run(state, start, start + CHUNK) for state in states]
        states = [state for state, _ in found]
        pieces.append(np.linalg.norm(found[0][1] - found[1][1], axis=1))
        if np.max(pieces[-1]) < 1e-14 * pieces[0][0]:
            break
    return np.concatenate(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - OTHERS - VARIANTS))
def test_predicted_is_observed_with_everybody(name: str) -> None:
    """Rate and log of the rate within 2 % of the slope of the distance of two runs."""
    algorithm = ALGORITHMS[name]()
    found = rate(algorithm, SLOW)
    distance = apart(Rounds(SLOW, algorithm))
    if found.per_round == 0.0:
        assert (algorithm.name, found.rounds(1e-8)) == ("PushNewton", 1)
        assert distance[3] <= 1e-10 * math.sqrt(3 * 3.0**2)  # of the distance of the starts
        return
    late = (1e-8, 1e-13) if name == "FedSplit per client" else ()  # directions of similar rates
    observed = slope(distance, *late)
    noise = 4 * found.error  # of the coins of ProxSkip and the delays of AsyncFedDR
    assert found.per_round == pytest.approx(observed, rel=0.02, abs=noise)
    assert math.log(found.per_round) == pytest.approx(
        math.log(observed), rel=0.02, abs=noise / observed
    )


TYPICAL = ["FedAvg", "SCAFFOLD 2", "FedSplit", "FedDR", "FOCUS", "MIFA"]
PATTERNS = ["uniform", "bernoulli", "cyclic", "markov"]
RUNS, ROUNDS = 40, 160


@jax.jit
def many_runs(program: Any, states: Any, masks: jax.Array) -> jax.Array:
    """(2, RUNS, ROUNDS, d) models from two starts with the same cohorts."""
    one = jax.vmap(lambda m, s: run(program, s, m, jnp.asarray(0))[1], (0, None))
    return jnp.stack([one(masks, state) for state in states])


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPICAL)
def test_predicted_is_observed_under_random_cohorts(name: str) -> None:
    """The mean over runs of the slope of log |x - x'|, within its standard error."""
    algorithm = ALGORITHMS[name]()
    for pattern in PATTERNS:
        participation = PARTICIPATIONS[pattern]
        found = rate(algorithm, SLOW, participation, rounds=3000)
        task = Rounds(SLOW, algorithm, participation)
        states = [task.initial(np.full(3, x)) for x in (0.0, 3.0)]
        masks = np.stack([participation.mask(4, 0, ROUNDS, seed) for seed in range(RUNS)])
        models = np.asarray(many_runs(task.program, states, jnp.asarray(masks)))
        distance = np.linalg.norm(models[0] - models[1], axis=-1)
        end = min(ROUNDS - 1, int(math.log(1e-9) / math.log(found.per_round)))
        begin = end // 3
        slopes = np.log(distance[:, end] / distance[:, begin]) / (end - begin)
        error = math.hypot(
            float(slopes.std(ddof=1)) / math.sqrt(RUNS), found.error / found.per_round
        )
        gap = abs(float(slopes.mean()) - math.log(found.per_round))
        assert gap < 4 * error + 0.02 * abs(math.log(found.per_round)), pattern
        assert error < 0.1 * abs(math.log(found.per_round)), pattern


@pytest.mark.parametrize("algorithm", [fx.FOCUS(lr=0.5), fx.FedSplit(step=1.0, relax=0.5)])
def test_mean_square_rate_over_all_paths(algorithm: fx.Algorithm) -> None:
    """One of two clients at a time: all 2^14 paths are equally likely."""
    problem, T = one_dimensional((0.6, 1.4)), 14
    found = rate(algorithm, problem, fx.Uniform(1))
    task = Rounds(problem, algorithm, fx.Uniform(1))
    first = np.array(list(itertools.product([False, True], repeat=T)))
    masks = jnp.asarray(np.stack([first, ~first], axis=-1))
    state = task.initial(np.array([3.0]))
    models = jax.vmap(lambda m: run(task.program, state, m, jnp.asarray(0))[1])(masks)
    errors = np.asarray(models)[..., 0] - fx.reference(problem)[0]
    rms = np.sqrt(np.mean(errors**2, axis=0))
    assert found.mean_square is not None
    assert (rms[-1] / rms[-6]) ** 0.2 == pytest.approx(found.mean_square, rel=0.02)
    assert found.mean_square > found.per_round + 4 * found.error


@pytest.mark.slow
def test_variance_reduction_contracts_and_mini_batches_forget() -> None:
    """With random batches the rate is a Lyapunov exponent: of the error where it dies out."""
    algorithm = ALGORITHMS["VRFOCUS"]()
    found = rate(algorithm, SLOW)
    assert (found.method, found.floor, found.mean_square) == ("Lyapunov", 0.0, None)
    star, slopes = fx.reference(SLOW), []
    for seed in range(8):
        task = Rounds(SLOW, algorithm, seed=seed + 1)
        distance = np.linalg.norm(task.run(task.initial(), 0, 400)[1] - star[None, :], axis=1)
        end = min(399, int(np.argmax(distance < 1e-11 * distance[0])) or 399)
        slopes.append(math.log(distance[end] / distance[end // 3]) / (end - end // 3))
    error = math.hypot(float(np.std(slopes, ddof=1)) / math.sqrt(8), found.error / found.per_round)
    assert abs(np.mean(slopes) - math.log(found.per_round)) < 4 * error
