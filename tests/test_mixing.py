"""One round as matrices: their shape, their means, and two algorithms written with them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Annotation

import fedexact as fx
from fedexact.engines.matrix import carried
from fedexact.theory import mixing
from problems import PARTICIPATIONS, least_squares, logistic

MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
KINDS = {"pull": "row", "average": "row", "push": "column", "mixing": "double"}


def matrix(kind: str, mask: object) -> np.ndarray:
    return getattr(mixing, f"{kind}_matrix")(mask)


# --- the matrices ---------------------------------------------------------------------------------


def test_the_matrices_of_clients_1_and_3_of_three() -> None:
    mask = [1, 0, 1]
    assert matrix("pull", mask).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert matrix("push", mask).tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert matrix("average", mask).tolist() == [
        [0, 0.5, 0, 0.5],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert 3 * matrix("mixing", mask) == pytest.approx(
        np.array([[1, 1, 0, 1], [1, 2, 0, 0], [0, 0, 3, 0], [1, 0, 0, 2]]), abs=1e-15
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_the_identity(kind: str) -> None:
    assert np.array_equal(matrix(kind, np.zeros(4, bool)), np.eye(5))


@given(mask=MASKS)
def test_stochastic_as_promised_and_no_more(mask: list[bool]) -> None:
    for kind, promised in KINDS.items():
        M = matrix(kind, mask)
        mixing.check_stochastic(M, promised)
        if any(mask) and promised != "double":
            other = "column" if promised == "row" else "row"
            # one client alone that averages or is averaged is no exception
            for unkept in (other, "double"):
                with pytest.raises(fx.InputError, match=f"{other} .* of the matrix sums to"):
                    mixing.check_stochastic(M, unkept)
    assert np.array_equal(matrix("pull", mask).T, matrix("push", mask))


@given(mask=MASKS.filter(any))
def test_what_they_do_to_a_stack(mask: list[bool]) -> None:
    present = np.array(mask)
    X = np.random.default_rng(len(mask)).normal(size=(len(mask) + 1, 2))
    pulled, pushed = matrix("pull", mask) @ X, matrix("push", mask) @ X
    assert np.array_equal(pulled[1:], np.where(present[:, None], X[:1], X[1:]))
    assert pushed[0] == pytest.approx(X[0] + X[1:][present].sum(axis=0), abs=1e-14)
    assert np.array_equal(pushed[1:], np.where(present[:, None], 0.0, X[1:]))
    assert (matrix("average", mask) @ X)[0] == pytest.approx(X[1:][present].mean(axis=0), abs=1e-14)
    limit = np.linalg.matrix_power(matrix("mixing", mask), 2**12) @ X
    together = np.concatenate([[True], present])
    assert limit[together] == pytest.approx(
        np.broadcast_to(X[together].mean(axis=0), limit[together].shape), abs=1e-9
    )
    assert limit[~together] == pytest.approx(X[~together], abs=0)


@pytest.mark.parametrize(
    ("M", "kind", "message"),
    [
        ([[0.5, 0.4], [0.0, 1.0]], "row", "row 0 of the matrix sums to 0.9, not to 1"),
        ([[1.5, -0.5], [0.0, 1.0]], "row", r"entry \(0, 1\) of the matrix is -0.5"),
        ([[1.0, 0.0]], "row", r"square, got shape \(1, 2\)"),
        ([[np.nan, 0.0], [0.0, 1.0]], "row", "entry"),
        (np.eye(2), "rows", "did you mean 'row'"),
    ],
)
def test_what_is_not_stochastic_is_named(M: object, kind: str, message: str) -> None:
    with pytest.raises(fx.InputError, match=message):
        mixing.check_stochastic(M, kind)


@pytest.mark.parametrize("mask", [[0, 2], [[1, 0]], []])
def test_participants_are_a_mask(mask: object) -> None:
    with pytest.raises(fx.InputError, match="a vector with 0 or 1 for each client"):
        mixing.pull_matrix(mask)


# --- expectations ---------------------------------------------------------------------------------


def laws() -> dict[str, tuple[fx.Participation, list[tuple[float, tuple[int, ...]]]]]:
    """Participations of 4 clients with all their cohorts written out."""
    p = np.array([0.9, 0.6, 0.4, 0.2])
    masks = list(itertools.product((0, 1), repeat=4))
    weights = [4.0, 3.0, 2.0, 1.0]
    pairs = [
        (
            weights[i] / 10 * weights[j] / (10 - weights[i]),
            tuple(int(k in (i, j)) for k in range(4)),
        )
        for i, w in enumerate(weights)
        for j in range(4)
        if j != i
    ]
    table = [(1, 1, 0, 0), (0, 0, 0, 0), (1, 0, 1, 1)]
    return {
        "full": (fx.Full(), [(1.0, (1, 1, 1, 1))]),
        "uniform": (fx.Uniform(2), [(1 / 6, m) for m in masks if sum(m) == 2]),
        "bernoulli": (
            fx.Bernoulli(p),
            [(float(np.prod(np.where(m, p, 1 - p))), m) for m in masks],
        ),
        "markov": (fx.Markov(0.3, 0.2), [(0.6 ** sum(m) * 0.4 ** (4 - sum(m)), m) for m in masks]),
        "categorical": (fx.Categorical(weights, 2), pairs),
        "trace": (fx.Trace(table), [(1 / 3, m) for m in table]),
    }


@pytest.mark.parametrize("name", laws())
def test_means_over_all_cohorts(name: str) -> None:
    participation, law = laws()[name]
    means = mixing.mean_matrices(participation, 4)
    for kind in ("pull", "average", "push"):
        expected = sum(weight * matrix(kind, mask) for weight, mask in law)
        assert getattr(means, kind) == pytest.approx(expected, abs=1e-13)
        mixing.check_stochastic(getattr(means, kind), KINDS[kind])
    assert means.empty == pytest.approx(sum(w for w, mask in law if not any(mask)), abs=1e-13)
    assert np.all(means.p_error == 0.0)
    assert np.all(means.q_error == 0.0)


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_simulated_means_agree_within_their_errors(name: str) -> None:
    exact = mixing.mean_matrices(PARTICIPATIONS[name], 4)
    simulated = mixing.simulated_matrices(PARTICIPATIONS[name], 4, rounds=14_000, seed=3)
    for what in ("p", "q"):
        error, off = getattr(simulated, f"{what}_error"), getattr(simulated, what)
        off = np.abs(off - getattr(exact, what))
        assert np.all(off <= 4.5 * error + 1e-12)
        assert np.all(error <= 0.02)
    mixing.check_stochastic(simulated.average, "row")


def test_batches_see_correlated_rounds() -> None:
    """The error of a sticky chain is that of its mean: p (1 - p) (1 + r)/(1 - r)/T, r = 1 - 2a."""
    a, T = 0.02, 50_000
    simulated = mixing.simulated_matrices(fx.Markov(a, a), 40, rounds=T)
    expected = np.sqrt(0.25 * (2 - 2 * a) / (2 * a) / T)
    assert np.sqrt(np.mean(simulated.p_error**2)) == pytest.approx(expected, rel=0.1)


def test_an_estimate_keeps_its_standard_error() -> None:
    """Of more than a thousand clients and tens a round, q_k is simulated by the pattern."""
    participation = fx.Categorical(1.0 + np.arange(2000) % 7, 300)
    means = mixing.mean_matrices(participation, 2000)
    assert np.all(means.q_error > 0.0)
    assert means.p_error == pytest.approx(300 * means.q_error, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixing.mean_matrices(fx.Bernoulli([0.5, 0.5]), 3), "p has 2 entries"),
        (lambda: mixing.mean_matrices(fx.Full(), 2001), "at most 2000 clients, got 2001"),
        (lambda: mixing.simulated_matrices(fx.Full(), 3, rounds=10), "rounds must be"),
    ],
)
def test_expectations_refuse(call, message: str) -> None:
    with pytest.raises(fx.InputError, match=message):
        call()


# --- algorithms in matrices -----------------------------------------------------------------------

CASES = [
    (least_squares(3, n_rows=(8, 40, 5, 9)), 1),
    (least_squares(3, n_rows=(8, 40, 5, 9)), 3),
    pytest.param(logistic(4, n_rows=(20, 9, 33, 20)), 3, marks=pytest.mark.slow),
]
RARE = fx.Bernoulli([0.6, 0.4, 0.3, 0.15])


@pytest.mark.parametrize(("problem", "local_steps"), CASES, ids=["1", "3", "logistic 3"])
def test_fedavg_and_focus_are_nothing_but_matrices(problem: fx.Problem, local_steps: int) -> None:
    """They have the models of the algorithm files, whoever takes part, also if nobody does."""
    T = 120
    masks, lr = RARE.mask(4, 0, T, seed=5), 0.5 / problem.constants().L
    assert not np.all(np.any(masks, axis=1))
    x0 = np.arange(3.0)
    written = {
        fx.FedAvg: mixing.fedavg(problem, masks, lr, local_steps, x0),
        fx.FOCUS: mixing.focus(problem, masks, lr, local_steps, x0),
    }
    for kind, models in written.items():
        algorithm = kind(lr=lr, local_steps=local_steps)
        for rounds in (1, 2, 7, T):
            run = fx.solve(problem, algorithm, RARE, rounds=rounds, seed=5, x0=x0)
            assert models[rounds - 1] == pytest.approx(run.x, abs=1e-11)
    assert np.max(np.abs(written[fx.FedAvg][-1] - written[fx.FOCUS][-1])) > 1e-3


def test_matrix_algorithms_refuse() -> None:
    problem = least_squares(3)
    with pytest.raises(fx.InputError, match="lr must be"):
        mixing.fedavg(problem, np.ones((2, 4)), -1.0, 1)
    with pytest.raises(fx.InputError, match="local_steps must be"):
        mixing.focus(problem, np.ones((2, 4)), 0.1, 0)


# --- the engine -----------------------------------------------------------------------------------


def test_a_message_travels_whole() -> None:
    """Integers beside floats, in any shape, from the server and back."""
    message = {"round": np.int32(7), "x": np.array([[1.5, -2.0]]), "n": np.float64(1e300)}
    there = carried(mixing.pull_matrix([0, 1]), {0: message})(2)
    assert there["round"].dtype == np.int32
    assert {k: np.asarray(v).tolist() for k, v in there.items()} == {
        k: v.tolist() for k, v in message.items()
    }
    total = carried(mixing.push_matrix([1, 1]), {1: message, 2: message})(0)
    assert int(total["round"]) == 14


def test_a_diverging_run_is_the_same_run() -> None:
    problem = least_squares(5)
    runs = []
    for engine in ("loop", "matrix"):
        with pytest.warns(fx.DivergenceWarning):
            runs.append(fx.solve(problem, fx.FedAvg(lr=1e9), engine=engine, rounds=60))
    assert runs[0].status == runs[1].status == "diverged"
    assert runs[0].history.equals(runs[1].history)


def test_the_engine_refuses_thousands_of_clients() -> None:
    problem = fx.Problem([([[1.0]], [1.0])] * 2001)
    with pytest.raises(fx.InputError, match=r"at most 2000 clients, got 2001.*compiled"):
        fx.solve(problem, fx.FOCUS(), engine="matrix", rounds=1)


# --- the drawing ----------------------------------------------------------------------------------


def test_a_drawing_has_an_arrow_for_every_message() -> None:
    mask, names = [1, 0, 1, 1, 0], ["Basel", "Bern $x$", "Chur", "Geneva", "Zug"]
    axes = mixing.draw_round(mask, names).axes[0]
    arrows = [child for child in axes.get_children() if isinstance(child, Annotation)]
    ends = sorted((round(a.xyann[0]), a.xyann[1], round(a.xy[0]), a.xy[1]) for a in arrows)
    pulls = [(2, 1.0, k, 0.0) for k in (0, 2, 3)]
    pushes = [(k, 0.0, 2, 1.0) for k in (0, 2, 3)]
    assert ends == sorted(pulls + pushes)
    colors = {text.get_text(): text.get_color() for text in axes.texts if text.get_text()}
    assert set(colors) == {"server", *names}
    absent = {name for name, color in colors.items() if color == mixing.ABSENT}
    assert absent == {"Bern $x$", "Zug"}
    for receives in (False, True):
        legend = mixing.draw_round(mask, receives=receives).axes[0].get_legend()
        assert legend is not None
        assert ("new model" in legend.get_texts()[0].get_text()) == receives


def test_a_drawing_refuses() -> None:
    with pytest.raises(fx.InputError, match="at most 40 clients, got 41"):
        mixing.draw_round(np.ones(41))
    with pytest.raises(fx.InputError, match="2 names for 3 clients"):
        mixing.draw_round([1, 0, 1], ["a", "b"])


def test_the_theory_does_not_load_matplotlib() -> None:
    code = "import sys, fedexact.theory; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
