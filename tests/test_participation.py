"""Who shows up: replayable in any pieces, with p_k and q_k that are those of the draws."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedexact.errors import InputError
from fedexact.participation import (
    PARTICIPATIONS,
    Bernoulli,
    Categorical,
    Cyclic,
    Full,
    Markov,
    Participation,
    Sine,
    Trace,
    Uniform,
)
from fedexact.participation import independent as independent_patterns
from fedexact.participation.base import uniforms
from fedexact.participation.draws import as_mask, distinct, independent
from fedexact.participation.expectations import sequential_inclusion

N = 6
TABLE = np.array([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0]])

PATTERNS: dict[str, Participation] = {
    "full": Full(),
    "uniform": Uniform(3),
    "uniform by ranks": Uniform(9),
    "bernoulli": Bernoulli([0.9, 0.6, 0.4, 0.2, 0.0, 1.0]),
    "bernoulli rare": Bernoulli(0.1),
    "categorical": Categorical([5.0, 4.0, 0.0, 2.0, 1.0, 0.5], 3),
    "markov": Markov([0.1, 0.3, 0.5, 0.9, 0.2, 1.0], [0.2, 0.6, 0.05, 0.8, 0.0, 1.0]),
    "markov slow": Markov(0.02, 0.03),
    "cyclic": Cyclic(4),
    "cyclic lists": Cyclic([[0, 1], [], [1, 2, 3]]),
    "sine": Sine([0.9, 0.6, 0.4, 0.2, 0.0, 1.0], 1.5, 9, [0, 1, 2, 3, 4, 5]),
    "trace": Trace(TABLE),
}
SIZES = {"uniform by ranks": 10}  # ranks are used where m^2 > 8 N


def size(case: str) -> int:
    return SIZES.get(case, N)


def both(pattern: Participation, n: int, start: int, stop: int, seed: int = 0) -> np.ndarray:
    """The mask, after checking that the cohorts say the same."""
    mask = pattern.mask(n, start, stop, seed)
    cohorts = pattern.cohorts(n, start, stop, seed)
    assert mask.shape == (stop - start, n)
    assert mask.dtype == bool
    assert cohorts.ids.dtype == np.int32
    assert cohorts.offsets.dtype == np.int64
    np.testing.assert_array_equal(cohorts.ids, np.nonzero(mask)[1])
    np.testing.assert_array_equal(cohorts.offsets, np.append(0, np.cumsum(mask.sum(axis=1))))
    return mask


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PATTERNS)
@given(cuts=st.lists(st.integers(0, 90), max_size=4), seed=st.integers(0, 5))
def test_any_pieces_give_the_same_rounds(case: str, cuts: list[int], seed: int):
    pattern, n = PATTERNS[case], size(case)
    whole = both(pattern, n, 0, 90, seed)
    pieces = [
        both(pattern, n, start, stop, seed)
        for start, stop in itertools.pairwise([0, *sorted(cuts), 90])
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("case", PATTERNS)
def test_blocks_of_rounds_do_not_show(case: str, monkeypatch: pytest.MonkeyPatch):
    pattern, n = PATTERNS[case], size(case)
    whole = both(pattern, n, 5, 80)
    monkeypatch.setattr("fedexact.participation.base._BLOCK", 4 * n)
    monkeypatch.setattr("fedexact.participation.markov._LOOK_BACK", 3 * n)
    np.testing.assert_array_equal(both(pattern, n, 5, 80), whole)


def test_seeds_differ_and_large_rounds_are_reached_at_once():
    pattern = Bernoulli(0.5)
    one, two = (pattern.mask(N, 0, 100, seed) for seed in (0, 1))
    assert 200 < (one != two).sum() < 400
    far = 10**12
    np.testing.assert_array_equal(
        pattern.mask(N, far, far + 9, 0)[4:], pattern.mask(N, far + 4, far + 9, 0)
    )


def test_uniforms_are_uniform_and_without_correlation():
    u = uniforms(3, 0, 2000, 5)
    counts = np.histogram(u, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000 * 0.9)
    neighbours = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1])]
    for a, b in neighbours:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


# --- very many clients ----------------------------------------------------------------------------

MANY = 6000  # more than draws.MANY
WEIGHTS = np.tile([0.0, 1.0, 2.0, 5.0], MANY // 4)
DRAWN = {
    "uniform": Uniform(200),
    "uniform one": Uniform(1),
    "uniform most": Uniform(MANY - 500),
    "bernoulli": Bernoulli(0.03),
    "bernoulli rare": Bernoulli(1e-5),
    "bernoulli common": Bernoulli(0.6),
    "categorical": Categorical(WEIGHTS, 200),
    "categorical alike": Categorical(2.0, 150),
    "categorical heavy": Categorical(np.append(1e6, np.ones(MANY - 1)), 200),
    "sine": Sine(0.02, 1.5, 6),
    "cyclic": Cyclic(37),
}


@pytest.mark.parametrize("case", DRAWN)
@given(cuts=st.lists(st.integers(0, 30), max_size=3), seed=st.integers(0, 5))
def test_many_clients_in_any_pieces(case: str, cuts: list[int], seed: int):
    whole = both(DRAWN[case], MANY, 0, 30, seed)
    cohorts = [
        DRAWN[case].cohorts(MANY, start, stop, seed)
        for start, stop in itertools.pairwise([0, *sorted(cuts), 30])
    ]
    np.testing.assert_array_equal(
        np.concatenate([piece.ids for piece in cohorts]), np.nonzero(whole)[1]
    )


@pytest.mark.parametrize("case", DRAWN)
def test_blocks_of_many_clients_do_not_show(case: str, monkeypatch: pytest.MonkeyPatch):
    whole = both(DRAWN[case], MANY, 5, 25)
    monkeypatch.setattr("fedexact.participation.base._BLOCK", 1000)
    np.testing.assert_array_equal(both(DRAWN[case], MANY, 5, 25), whole)


@pytest.mark.parametrize("case", ["uniform", "bernoulli", "categorical", "sine"])
def test_many_clients_come_as_often_as_their_p_says(case: str):
    pattern, rounds, groups = DRAWN[case], 2400, 4
    cohorts = pattern.cohorts(MANY, 0, rounds, 3)
    counts = np.bincount(cohorts.ids, minlength=MANY)
    p = pattern.inclusion(MANY)
    variance = rounds * p * (1.0 - p)  # at least; the chi-square statistic has mean N and sd < 2 %
    here = p > 0.0
    chi_square = np.sum((counts[here] - rounds * p[here]) ** 2 / variance[here])
    assert abs(chi_square / here.sum() - 1.0) < 5 * np.sqrt(2.0 / here.sum())
    assert counts[~here].sum() == 0
    by_group = counts.reshape(-1, groups).sum(axis=0)  # neighbours, and the clients of one weight
    expected = rounds * p.reshape(-1, groups).sum(axis=0)
    assert (np.abs(by_group - expected) <= 5 * np.sqrt(expected)).all()


def test_the_number_of_participants_has_its_law():
    rounds, p = 4000, 0.03
    sizes = np.diff(Bernoulli(p).cohorts(MANY, 0, rounds, 1).offsets)
    edges = stats.binom.ppf(np.linspace(0, 1, 11)[1:-1], MANY, p)
    below = stats.binom.cdf(edges, MANY, p)
    law = np.diff(np.concatenate([[0.0], below, [1.0]]))
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=10)
    assert stats.chisquare(observed, rounds * law).pvalue > 1e-4
    assert abs(np.corrcoef(sizes[1:], sizes[:-1])[0, 1]) < 5 / np.sqrt(rounds)
    assert (np.diff(Uniform(200).cohorts(MANY, 0, 50, 1).offsets) == 200).all()


@pytest.mark.parametrize(
    ("case", "together"),
    [
        ("uniform", 200 * 199 / (MANY * (MANY - 1))),
        ("bernoulli", 0.03**2),
    ],
)
def test_pairs_of_many_clients(case: str, together: float):
    """Clients k and k + lag, over all k."""
    rounds = 300
    mask = DRAWN[case].mask(MANY, 0, rounds, 2)
    for lag in (1, 2, 777):
        pairs = np.count_nonzero(mask & np.roll(mask, lag, axis=1))
        expected = rounds * MANY * together
        assert abs(pairs - expected) < 5 * np.sqrt(expected)
    again = np.count_nonzero(mask[1:] & mask[:-1])
    expected = (rounds - 1) * MANY * DRAWN[case].inclusion(MANY)[0] ** 2
    assert abs(again - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("n", "m", "weights"),
    [
        (5, 2, [1.0, 2.0, 3.0, 0.5, 0.0]),
        (5, 3, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (4, 4, [4.0, 3.0, 2.0, 1.0]),
    ],
)
def test_distinct_draws_have_the_law_of_drawing_one_by_one(
    n: int, m: int, weights: list[float], monkeypatch: pytest.MonkeyPatch
):
    """Small enough to enumerate, with many repetitions and many streams."""
    monkeypatch.setattr("fedexact.participation.draws._LEAST_WIDTH", 1)
    wheel, rounds = np.cumsum(weights), 20_000
    cohorts = distinct(
        lambda u: np.searchsorted(wheel, u * wheel[-1], side="right"), m, n, 0, rounds, 7
    )
    drawn = as_mask(cohorts, n) @ (1 << np.arange(n))
    law = drawn_one_by_one(weights, m)
    for members in subsets(n):
        probability = law.get(members, 0.0)
        count = np.sum(drawn == sum(1 << k for k in members))
        error = np.sqrt(rounds * probability * (1 - probability))
        assert abs(count - rounds * probability) <= 5 * error + 1e-9


def test_independent_draws_by_enumeration(monkeypatch: pytest.MonkeyPatch):
    """With one number per stream, so that a round goes on from stream to stream."""
    monkeypatch.setattr("fedexact.participation.draws._LEAST_WIDTH", -11)
    rounds, n, p = 20_000, 4, np.array([0.25, 0.0, 0.6, 0.9])
    cohorts = independent(lambda start, stop: p[np.arange(start, stop) % 4], 0.9, n, 0, rounds, 7)
    mask = as_mask(cohorts, n).reshape(-1, 4, n)
    for phase, probability in enumerate(p):
        drawn = mask[:, phase] @ (1 << np.arange(n))
        law = independent_law(np.full(n, probability))
        for members, chance in law.items():
            count = np.sum(drawn == sum(1 << k for k in members))
            error = np.sqrt(len(drawn) * chance * (1 - chance))
            assert abs(count - len(drawn) * chance) <= 5 * error


@pytest.mark.parametrize("pattern", [Uniform(1000), Bernoulli(0.001), Cyclic(1000), Sine(0.0005)])
def test_a_round_of_a_million_clients_is_drawn_in_the_memory_of_its_participants(
    pattern: Participation,
):
    n = 1_000_000
    pattern.cohorts(n, 0, 1, 0)  # what is kept for all rounds
    tracemalloc.start()
    cohorts = pattern.cohorts(n, 5, 15, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2000 < len(cohorts.ids) < 12_000
    assert peak < n  # a row of a table of bytes


@pytest.mark.parametrize("p", [1e-5, 0.01, 0.7])
def test_q_of_many_clients_by_the_law_of_their_number(p: float):
    n = 20_000
    probabilities = np.concatenate([[1.0, 0.9, 0.0], np.full(n - 3, p)])
    k = np.arange(n - 2)
    law = stats.binom.pmf(k, n - 3, p)  # of the number among the alike
    q = Bernoulli(probabilities).aggregation(n)
    with_both, with_first = law @ (1.0 / (k + 2)), law @ (1.0 / (k + 1))
    np.testing.assert_allclose(q[0], 0.9 * with_both + 0.1 * with_first, rtol=1e-11)
    np.testing.assert_allclose(q[1], 0.9 * with_both, rtol=1e-11)
    assert q[2] == 0.0
    assert q.sum() == pytest.approx(1.0, rel=1e-12)


def test_a_long_vector_is_printed_short_and_told_apart():
    p = np.random.default_rng(0).random(20_000)
    one, same, other = Bernoulli(p), Bernoulli(p.tolist()), Bernoulli(np.append(p[:-1], 0.5))
    assert len(repr(one)) < 200
    assert repr(one) == repr(same) != repr(other)
    assert one == same != other
    assert hash(one) == hash(same)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    np.testing.assert_array_equal(again.mask(20_000, 0, 2, 0), one.mask(20_000, 0, 2, 0))
    assert repr(Bernoulli([0.25, 0.5])) == "Bernoulli(p=(0.25, 0.5))"


def test_a_chain_that_goes_on_and_one_that_looks_back_agree():
    masks = []
    for pieces in ([(0, 9), (9, 30), (30, 31)], [(30, 31), (9, 30), (0, 9)]):
        pattern = Markov(0.02, 0.03)
        drawn = {piece: pattern.mask(40, *piece, 3) for piece in pieces}
        masks.append(np.concatenate([drawn[piece] for piece in sorted(pieces)]))
    np.testing.assert_array_equal(*masks)
    pattern = Markov(0.02, 0.03)
    pattern.mask(40, 0, 9, 3)
    np.testing.assert_array_equal(pattern.mask(40, 9, 30, 4), Markov(0.02, 0.03).mask(40, 9, 30, 4))


# --- p_k and q_k ----------------------------------------------------------------------------------


def expectations(law: dict[tuple[int, ...], float], n: int) -> tuple[np.ndarray, np.ndarray]:
    """p and q of a law on sets of clients."""
    p, q = np.zeros((2, n))
    for members, probability in law.items():
        p[list(members)] += probability
        q[list(members)] += probability / max(len(members), 1)
    return p, q


def subsets(n: int) -> list[tuple[int, ...]]:
    return [s for m in range(n + 1) for s in itertools.combinations(range(n), m)]


def independent_law(p: np.ndarray) -> dict[tuple[int, ...], float]:
    return {
        s: float(np.prod([p[k] if k in s else 1 - p[k] for k in range(len(p))]))
        for s in subsets(len(p))
    }


def drawn_one_by_one(weights: list[float], m: int) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(weights)), m):
        probability, left = 1.0, sum(weights)
        for k in order:
            probability *= weights[k] / left if left > 0 else 0.0
            left = max(left - weights[k], 0.0)
        members = tuple(sorted(order))
        law[members] = law.get(members, 0.0) + probability
    return law


def check_law(pattern: Participation, law: dict[tuple[int, ...], float], n: int = N) -> None:
    p, q = expectations(law, n)
    np.testing.assert_allclose(pattern.inclusion(n), p, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(pattern.aggregation(n), q, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(pattern.aggregation_error(n), np.zeros(n))


@pytest.mark.parametrize(
    "p", [[0.9, 0.6, 0.4, 0.2, 0.0, 1.0], [1.0] * 6, [1e-9, 0.5, 0.5, 0.5, 0.5, 1.0], [0.0] * 6]
)
def test_bernoulli_by_enumeration(p: list[float]):
    check_law(Bernoulli(p), independent_law(np.array(p)))


def test_bernoulli_with_equal_probabilities():
    for n, p in itertools.product((1, 7, 400, 100_000), (1e-4, 0.3, 0.999)):
        somebody = -np.expm1(n * np.log1p(-p))
        for same in (p, np.full(n, p)):  # the closed form, and the quadrature
            np.testing.assert_allclose(Bernoulli(same).aggregation(n), somebody / n, rtol=1e-12)
    np.testing.assert_array_equal(Bernoulli(1.0).aggregation(4), 0.25)
    np.testing.assert_array_equal(Bernoulli(0.0).aggregation(4), 0.0)


def test_sine_with_equal_probabilities():
    alike, each = Sine(0.6, 1.5, 7, 0.3), Sine([0.6] * N, 1.5, 7, [0.3] * N)
    np.testing.assert_allclose(alike.inclusion(N), each.inclusion(N), rtol=1e-14)
    np.testing.assert_allclose(alike.aggregation(N), each.aggregation(N), rtol=1e-12)
    assert alike.gap(N) == each.gap(N)


def test_bernoulli_against_the_poisson_binomial_of_the_others():
    p = np.random.default_rng(0).random(150)
    q = Bernoulli(p).aggregation(150)
    for k in (0, 70, 149):
        law = np.ones(1)  # of the number of the others present
        for other in np.delete(p, k):
            law = np.convolve(law, [1 - other, other])
        assert q[k] == pytest.approx(p[k] * np.sum(law / np.arange(1, 151)), rel=1e-12)


def test_uniform_by_enumeration():
    triples = list(itertools.combinations(range(N), 3))
    check_law(Uniform(3), dict.fromkeys(triples, 1 / len(triples)))


@pytest.mark.parametrize(
    ("weights", "m"),
    [
        ([5.0, 4.0, 0.0, 2.0, 1.0, 0.5], 3),
        ([1e-4, 1.0, 2.0, 3.0, 1e3, 5.0], 2),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 5),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 6),
        ([1.0, 2.0, 0.0, 4.0, 5.0, 6.0], 1),
        ([2.0, 2.0, 0.0, 2.0, 2.0, 2.0], 4),
    ],
)
def test_categorical_by_enumeration(weights: list[float], m: int):
    check_law(Categorical(weights, m), drawn_one_by_one(weights, m))


def test_categorical_quadrature_of_many_clients():
    weights = 0.01 + np.random.default_rng(0).pareto(1.0, size=300)
    p = sequential_inclusion(weights, 20)
    assert p.sum() == pytest.approx(20, abs=1e-11)
    order = np.argsort(weights)
    assert (np.diff(p[order]) >= 0).all()
    assert p.min() > 0
    assert p.max() < 1


def test_categorical_simulation_agrees_with_the_quadrature(monkeypatch: pytest.MonkeyPatch):
    weights = 0.1 + np.random.default_rng(1).random(40)
    exact = Categorical(weights, 10).aggregation(40)
    monkeypatch.setattr(independent_patterns, "_MOST_WORK", 0.0)
    independent_patterns._categorical.cache_clear()
    pattern = Categorical(weights, 10)
    estimate, error = pattern.aggregation(40), pattern.aggregation_error(40)
    independent_patterns._categorical.cache_clear()
    assert (error > 0).all()
    assert (np.abs(estimate - exact) < 5 * error).all()
    assert (error < 0.01 * exact).all()


def test_markov_is_stationary():
    on, off = np.array([0.1, 0.5, 1.0, 0.3]), np.array([0.2, 0.5, 1.0, 0.0])
    check_law(Markov(on, off), independent_law(on / (on + off)), 4)


def test_sine_is_the_mean_over_its_period():
    p, amplitude, phase = np.array([0.9, 0.3]), np.array([0.8, 2.0]), np.array([0.0, 1.0])
    law: dict[tuple[int, ...], float] = {}
    for r in range(5):
        now = np.clip(p * (1 + amplitude * np.sin(2 * np.pi * r / 5 + phase)), 0, 1)
        for members, probability in independent_law(now).items():
            law[members] = law.get(members, 0.0) + probability / 5
    check_law(Sine(p, amplitude, 5, phase), law, 2)


def test_tables_are_counted():
    law = {(0, 3, 4): 0.25, (): 0.25, (0, 1): 0.25, (0, 1, 2, 4): 0.25}
    check_law(Trace(TABLE), law)
    check_law(Cyclic([[0, 3, 4], [], [1, 0], [4, 2, 1, 0]]), law)
    check_law(Cyclic(3), dict.fromkeys([(0, 1), (2, 3), (4, 5)], 1 / 3))


@pytest.mark.parametrize("case", PATTERNS)
def test_frequencies_are_p_and_q(case: str):
    pattern, n = PATTERNS[case], size(case)
    replicas, rounds = 60, 2520  # a multiple of all periods; replicas are independent, rounds not
    p, q = np.zeros((2, replicas, n))
    for seed in range(replicas):
        mask = pattern.mask(n, 0, rounds, seed)
        p[seed] = mask.mean(axis=0)
        q[seed] = (mask / np.maximum(mask.sum(axis=1), 1)[:, None]).mean(axis=0)
    for drawn, expected in ((p, pattern.inclusion(n)), (q, pattern.aggregation(n))):
        error = drawn.std(axis=0, ddof=1) / np.sqrt(replicas)
        assert (np.abs(drawn.mean(axis=0) - expected) <= 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("pattern", "law"),
    [
        (Uniform(2), dict.fromkeys(itertools.combinations(range(5), 2), 0.1)),
        (Uniform(4), dict.fromkeys(itertools.combinations(range(5), 4), 0.2)),
        (Categorical([1.0, 2.0, 3.0, 0.5, 0.0], 2), drawn_one_by_one([1, 2, 3, 0.5, 0], 2)),
    ],
)
def test_subsets_have_their_probabilities(pattern: Participation, law: dict[Any, float]):
    rounds = 20_000
    drawn = pattern.mask(5, 0, rounds, 0) @ (1 << np.arange(5))
    for members in subsets(5):
        probability = law.get(members, 0.0)
        count = np.sum(drawn == sum(1 << k for k in members))
        error = np.sqrt(rounds * probability * (1 - probability))
        assert abs(count - rounds * probability) <= 5 * error


# --- single patterns ------------------------------------------------------------------------------


def test_markov_is_the_chain_followed_round_by_round():
    pattern = PATTERNS["markov"]
    assert isinstance(pattern, Markov)
    on, off = np.array(pattern.on), np.array(pattern.off)
    u = uniforms(4, 0, 300, N)
    present = u[0] < on / (on + off)
    rounds = [present]
    for r in range(1, 300):
        present = np.where(present, u[r] < 1 - off, u[r] < on)
        rounds.append(present)
    np.testing.assert_array_equal(pattern.mask(N, 0, 300, 4), rounds)
    np.testing.assert_array_equal(pattern.mask(N, 200, 300, 4), rounds[200:])


def test_markov_moves_at_its_rates():
    mask = Markov(0.1, 0.25).mask(200, 0, 1000, 0)
    before, after = mask[:-1], mask[1:]
    for was, rate in ((False, 0.1), (True, 0.25)):
        moved = (after != before)[before == was]
        assert abs(moved.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / moved.size)


def test_a_chain_that_only_flips_alternates():
    mask = Markov(1.0, 1.0).mask(20, 0, 50, 0)
    assert (mask[1:] != mask[:-1]).all()
    assert 0 < mask[0].sum() < 20


def test_cyclic_blocks_are_neighbours_of_equal_size():
    mask = Cyclic(4).mask(10, 0, 9, 0)
    assert mask[:4].sum(axis=1).tolist() == [3, 3, 2, 2]
    assert np.nonzero(mask[1])[0].tolist() == [3, 4, 5]
    assert (mask[:4].sum(axis=0) == 1).all()
    np.testing.assert_array_equal(mask[4:8], mask[:4])
    np.testing.assert_array_equal(mask[8], mask[0])


def test_sine_availability_follows_its_phase():
    pattern = Sine(0.5, 1.0, 8, [0.0, np.pi])
    mask = pattern.mask(2, 0, 8000, 0).reshape(1000, 8, 2).mean(axis=0)
    r = np.arange(8)
    for k, sign in ((0, 1.0), (1, -1.0)):
        p = 0.5 * (1 + sign * np.sin(2 * np.pi * r / 8))
        assert (np.abs(mask[:, k] - p) <= 5 * np.sqrt(p * (1 - p) / 1000) + 1e-12).all()


@pytest.mark.parametrize(
    ("pattern", "gap"),
    [
        (Full(), 1.0),
        (Uniform(1), 1.0),
        (Bernoulli(0.01), 1.0),
        (Categorical([1.0, 9.0, 1.0, 1.0, 1.0, 1.0], 2), 1.0),
        (Markov([0.5, 0.02, 0.1, 0.2, 0.0, 0.01], [0.5, 0.5, 0.5, 0.5, 0.5, 0.0]), 50.0),
        (Markov(1.0, 0.5), 1.0),
        (Cyclic(1), 1.0),
        (Cyclic(4), 4.0),
        (Cyclic([[0], [0], [1], [0], [2, 3]]), 5.0),
        (Cyclic([[0, 1], [1], [0], [1]]), 2.0),
        (Trace(TABLE), 4.0),
        (Trace([[1, 0, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]), 2.0),
        (Sine(0.5, 0.0), 1.0),
        (Sine(0.5, 1.0, 24), 8.0),  # sin < -1/2 in the 7 rounds from 15 to 21
    ],
)
def test_gaps(pattern: Participation, gap: float):
    assert pattern.gap(N) == pytest.approx(gap, rel=1e-12)


# --- traces ---------------------------------------------------------------------------------------


def csv(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_traces_from_files(tmp_path: Path):
    lines = "\n".join(",".join(map(str, row)) for row in TABLE)
    np.save(tmp_path / "trace.npy", TABLE)
    sources = [
        csv(tmp_path / "plain.csv", lines),
        csv(tmp_path / "named.csv", "a,b,c,d,e,f\n" + lines + "\n"),
        str(tmp_path / "trace.npy"),
        TABLE.astype(bool),
        TABLE.tolist(),
    ]
    traces = [Trace(source) for source in sources]
    for trace in traces:
        trace.check(N, ["a", "b", "c", "d", "e", "f"])
        mask = both(trace, N, 0, 10)
        np.testing.assert_array_equal(mask, TABLE[np.arange(10) % 4] == 1)
    assert len({repr(trace) for trace in traces}) == 1
    assert repr(Trace(1 - TABLE)) != repr(traces[0])


def test_a_trace_keeps_what_it_read():
    table = TABLE.copy()
    trace = Trace(table)
    table[:] = 1
    np.testing.assert_array_equal(trace.mask(N, 0, 4, 0), TABLE == 1)


def test_columns_of_a_trace_in_another_order(tmp_path: Path):
    trace = Trace(csv(tmp_path / "trace.csv", "a,c,b\n1,0,1\n"))
    trace.check(3, ["a", "c", "b"])
    with pytest.raises(InputError, match=r"column 1 of the trace is called 'c'.*'b'"):
        trace.check(3, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("7,8", ["7", "8"]),
        ("1,b", ["1", "b"]),
        ("a", ["a"]),
        ('"Basel, CH", "say ""hi""",c', ["Basel, CH", 'say "hi"', "c"]),
    ],
)
def test_trace_names_that_look_like_cells(tmp_path: Path, line: str, names: list[str]):
    n = len(names)
    rounds = np.tri(2, n)
    lines = "\n".join(",".join(f"{cell:g}" for cell in row) for row in rounds)
    trace = Trace(csv(tmp_path / "trace.csv", f"{line}\n{lines}\n"))
    trace.check(n, names)
    np.testing.assert_array_equal(trace.mask(n, 0, 2, 0), rounds == 1)


def test_a_trace_line_that_is_a_round_or_the_names(tmp_path: Path):
    trace = Trace(csv(tmp_path / "trace.csv", "0,1\n1,1\n1,0\n"))
    with pytest.raises(InputError, match=r"first line of the trace, 0,1, may be .*\.npy.*rename"):
        trace.check(2, ["0", "1"])
    trace.check(2, ["a", "b"])
    assert len(trace.table(2)) == 3
    np.save(tmp_path / "trace.npy", trace.table(2))
    Trace(tmp_path / "trace.npy").check(2, ["0", "1"])


@pytest.mark.parametrize("names", [["a", "b"], None])
def test_a_trace_line_that_is_a_broken_round(tmp_path: Path, names: list[str] | None):
    trace = Trace(csv(tmp_path / "trace.csv", "1,x\n1,0\n"))
    with pytest.raises(InputError, match=r"cell 1 .* of the first line is 'x'; every cell"):
        trace.check(2, names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rounds x clients"),
        ("a,b\n", "rounds x clients"),
        ("1,0\n1\n", "lines of 1 and of 2 cells"),
        ("1,0\n1,2\n", "round 1, client 1 .* is 2"),
        ("1,0\n1,\n", "must be a table of 0 and 1"),
        ("1,0\n1,yes\n", "must be a table of 0 and 1.*yes"),
        ("1,,1\n1,0,1\n", "cell 1 .* of the first line is ''; every cell"),
        (",a,b\n0,0,1\n", "cell 0 .* of the first line is ''.*without index column"),
        ("1,x,1\n1,0,1\n", "cell 1 .* of the first line is 'x'; every cell"),
        ("1,0,2,0\n1,0,1,1\n", "cell 2 .* of the first line is '2'; every cell"),
        ('"a,b\n1,0\n', "neither CSV text"),
        ("0,0\n0,0\n", "nobody ever takes part"),
    ],
)
def test_bad_trace_files(tmp_path: Path, text: str, message: str):
    path = csv(tmp_path / "bad.csv", text)
    with pytest.raises(InputError, match=message) as caught:
        Trace(path)
    assert "bad.csv" in str(caught.value)


def test_a_missing_trace_file(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"trace file '.*nowhere\.csv' cannot be read: No such file"
    ):
        Trace(tmp_path / "nowhere.csv")


def test_a_file_that_is_no_table(tmp_path: Path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "bytes.npy").write_bytes(b"1,0,1")
    for name in ("bytes.csv", "bytes.npy"):
        with pytest.raises(InputError, match=f"{name}' is neither CSV text nor an .npy array"):
            Trace(tmp_path / name)


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(1.2), r"p must be a probability within \[0, 1\], got 1.2"),
        (lambda: Bernoulli([0.5, -0.1]), r"p\[1\] \(client 1.*\) must be a probability.*got -0.1"),
        (lambda: Bernoulli([0.5, float("nan")]), r"p\[1\].*got nan"),
        (lambda: Bernoulli([[0.5]]), "p must be one number .* or a vector"),  # type: ignore[list-item]
        (lambda: Bernoulli("high"), "p must be one number .*'high'"),  # type: ignore[arg-type]
        (lambda: Bernoulli([]), "p must be one number for all clients or a vector"),
        (lambda: Uniform(0), "m must be an integer >= 1, got 0"),
        (lambda: Uniform(2.5), "m must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (
            lambda: Categorical([1.0, -2.0], 1),
            r"weights\[1\].*must be a finite number >= 0, got -2.0",
        ),
        (lambda: Categorical([1.0, 0.0, 0.0], 2), "m = 2 but there are only 1 clients of positive"),
        (lambda: Categorical(0.0, 1), "weights must not be 0 for all clients"),
        (lambda: Markov(1.5, 0.5), "on must be a probability.*got 1.5"),
        (lambda: Markov(0.5, [0.1, 2.0]), r"off\[1\].*got 2.0"),
        (lambda: Markov([0.5, 0.0], 0.0), r"on and off are both 0 \(entry 1"),
        (lambda: Markov([0.5, 0.1], [0.1] * 3), "on has 2 entries and off has 3"),
        (lambda: Cyclic(0), "blocks must be an integer >= 1, got 0"),
        (lambda: Cyclic([[0, -1]]), r"blocks\[0\].*got -1"),
        (lambda: Cyclic([0, 1]), "list of lists of clients"),  # type: ignore[list-item]
        (lambda: Cyclic([[], []]), "at least one client"),
        (lambda: Sine(0.5, -1.0), "amplitude must be a finite number >= 0, got -1.0"),
        (lambda: Sine(0.5, 1.0, 1), "period must be an integer >= 2, got 1"),
        (lambda: Sine(0.5, 1.0, 9, float("inf")), "phase must be a finite number, got inf"),
        (lambda: Trace([1, 0, 1]), "rounds x clients"),  # type: ignore[list-item]
        (lambda: Trace([[1, 0], [0.5, 1]]), "^round 1, client 0 .* of the trace is 0.5"),  # type: ignore[list-item]
    ],
)
def test_bad_arguments(make: Callable[[], Participation], message: str):
    with pytest.raises(InputError, match=message):
        make()


FOUR = ["Cleveland", "Hungary", "Switzerland", "VA"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Bernoulli([0.5, 0.5]), r"p has 2 entries but there are 4 clients \(Cleveland, .*, VA\)"),
        (Categorical([1.0] * 5, 2), "weights has 5 entries but there are 4 clients"),
        (Categorical(1.0, 5), "m = 5 but there are only 4 clients; lower m"),
        (Uniform(5), "m = 5 but there are only 4 clients; lower m"),
        (Markov([0.5] * 3, 0.5), "on has 3 entries but there are 4 clients"),
        (Markov(0.5, [0.5] * 3), "off has 3 entries but there are 4 clients"),
        (Sine(0.5, [1.0] * 3), "amplitude has 3 entries but there are 4 clients"),
        (Sine(0.5, 1.0, 9, [0.0] * 3), "phase has 3 entries but there are 4 clients"),
        (Cyclic(5), "blocks = 5 but there are only 4 clients; lower blocks"),
        (Cyclic([[0], [4]]), r"blocks\[1\] names client 4 but there are only 4 clients"),
        (Trace(TABLE), "the trace has 6 columns but there are 4 clients"),
    ],
)
def test_patterns_that_do_not_fit_the_clients(pattern: Participation, message: str):
    with pytest.raises(InputError, match=message):
        pattern.check(4, FOUR)
    with pytest.raises(InputError):
        pattern.mask(4, 0, 3, 0)


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_that_fit_pass_their_check(case: str):
    PATTERNS[case].check(size(case), [f"site {k}" for k in range(size(case))])


def test_a_negative_seed():
    with pytest.raises(InputError, match="seed must be an integer >= 0, got -1"):
        Bernoulli(0.5).mask(4, 0, 3, -1)


def test_the_registry_names_every_pattern():
    assert set(PARTICIPATIONS.values()) == {type(pattern) for pattern in PATTERNS.values()}
    for name, cls in PARTICIPATIONS.items():
        assert cls.name == name == cls.__name__.lower()
        assert cls.summary
