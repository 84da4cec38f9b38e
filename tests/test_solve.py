"""The one entry point: stopping, divergence, resume, interruption, history, errors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedexact as fx
from problems import least_squares, logistic

PROBLEM = least_squares(20)
REFERENCE = fx.reference(PROBLEM)


def test_the_history_counts() -> None:
    result = fx.solve(
        PROBLEM, fx.SCAFFOLD(local_steps=2), fx.Uniform(3), rounds=25, record_every=10,
        reference=REFERENCE, reference_se=np.full(3, 0.5),
    )  # fmt: skip
    table = result.history.to_pydict()
    assert table["round"] == [0, 10, 20, 25]
    assert table["uploads"] == [0, 30, 60, 75]
    assert table["participants"] == [0, 3, 3, 3]
    vectors = 2 * 3 * 8  # two vectors of three float64
    assert table["bytes_up"] == [n * vectors for n in table["uploads"]]
    assert table["bytes_down"] == [n * vectors for n in table["uploads"]]
    distance = np.linalg.norm(result.x - REFERENCE)
    assert table["distance"][-1] == pytest.approx(distance, rel=1e-12)
    assert table["distance_se"][-1] == pytest.approx(
        np.max(np.abs(result.x - REFERENCE)) / 0.5, rel=1e-12
    )
    assert table["objective"][-1] == pytest.approx(PROBLEM.objective(result.x), rel=1e-14)
    grad = np.linalg.norm(PROBLEM.grad(result.x))
    assert table["gradient_mapping"][-1] == pytest.approx(grad, rel=1e-9)


GRADIENTS = {  # rows per visit of a client with 8 rows
    fx.FedAvg(local_steps=3): 3 * 8,
    fx.FedAvg(local_steps=3, batch_size=5): 3 * 5,
    fx.SCAFFOLD(local_steps=3, option=2): 3 * 8,
    fx.SCAFFOLD(local_steps=3, option=1, batch_size=5): 4 * 5,
    fx.FOCUS(local_steps=2): 2 * 8,
    fx.FedSplit(): 8,  # factored
}


@pytest.mark.parametrize("engine", ["compiled", "loop"])
@pytest.mark.parametrize(("algorithm", "per_visit"), GRADIENTS.items(), ids=repr)
def test_row_gradients_are_counted(algorithm: fx.Algorithm, per_visit: int, engine: str) -> None:
    result = fx.solve(PROBLEM, algorithm, fx.Uniform(3), rounds=10, record_every=5, engine=engine)
    assert result.history["gradient_evaluations"].to_pylist() == [0, 15 * per_visit, 30 * per_visit]


def test_the_inner_steps_of_a_prox_are_counted() -> None:
    """A Newton prox from its own solution takes one step, from afar a few; both engines agree."""
    problem = logistic(3)
    rows = int(problem.n_rows.sum())
    counts = []
    for engine in ("compiled", "loop"):
        result = fx.solve(problem, fx.FedSplit(), rounds=200, record_every=1, engine=engine)
        counts.append(np.diff(result.history["gradient_evaluations"].to_numpy()))
        assert 2 * rows <= counts[-1][0] <= 8 * rows
        assert counts[-1][-1] == rows
    assert np.array_equal(*counts)


def test_diagnostics_are_those_of_the_clients_models() -> None:
    """Recorded on the way, they are the differences of the states of two runs."""
    for algorithm, field in ((fx.FedDR(), "x"), (fx.FedSplit(), "u")):
        runs = [
            fx.solve(PROBLEM, algorithm, fx.Uniform(2), rounds=r, record_every=7, diagnostics=True)
            for r in (13, 14)
        ]
        before, now = (run.clients[field] for run in runs)
        last = runs[1].history.to_pylist()[-1]
        apart = np.sqrt(np.mean(np.sum((now - runs[1].x) ** 2, axis=1)))
        moved = np.sqrt(np.mean(np.sum((now - before) ** 2, axis=1)))
        assert last["local_distance"] == pytest.approx(apart, rel=1e-12)
        assert last["local_change"] == pytest.approx(moved, rel=1e-12)
        plain = fx.solve(PROBLEM, algorithm, fx.Uniform(2), rounds=14, record_every=7)
        assert np.array_equal(plain.x, runs[1].x)
        assert plain.history["local_change"].null_count == len(plain.history)


def test_without_a_reference_there_is_no_distance() -> None:
    history = fx.solve(PROBLEM, fx.FOCUS(), rounds=3).history
    assert history["distance"].null_count == len(history)


def test_tol_is_the_gradient_mapping_and_not_a_small_step() -> None:
    result = fx.solve(PROBLEM, fx.FOCUS(), rounds=5000, tol=1e-7, record_every=5)
    assert result.status == "tolerance"
    assert result.rounds < 5000
    assert np.linalg.norm(PROBLEM.grad(result.x)) <= 1e-7
    crawl = fx.solve(PROBLEM, fx.FOCUS(lr=1e-9), rounds=50, tol=1e-7)
    assert crawl.status == "finished"
    assert crawl.certificate is not None
    assert crawl.certificate.verdict == "not certified"


@pytest.mark.parametrize("engine", ["compiled", "loop"])
@pytest.mark.parametrize(
    ("algorithm", "word"),
    [(fx.FedAvg(lr=50.0), "lr"), (fx.FOCUS(lr=30.0), "lr"), (fx.FedDR(relax=2.6), "relax")],
)
def test_divergence_is_stopped_and_explained(
    algorithm: fx.Algorithm, word: str, engine: str
) -> None:
    with pytest.warns(fx.DivergenceWarning, match=f"lower {word}"):
        result = fx.solve(
            PROBLEM, algorithm, rounds=400, engine=engine, record_every=5, reference=REFERENCE
        )
    assert result.status == "diverged"
    assert f"lower {word}" in result.message
    assert np.all(np.isfinite(result.x))
    best = min(result.history["gradient_mapping"].to_pylist())
    assert np.linalg.norm(PROBLEM.grad(result.x)) == pytest.approx(best, rel=1e-9)
    assert result.history["round"].to_pylist()[-1] < 400
    assert result.certificate is not None
    assert result.certificate.verdict == "not certified"


def test_chosen_values_are_reported_and_given_ones_are_not() -> None:
    result = fx.solve(PROBLEM, fx.FedDR(step=0.7), rounds=1)
    assert result.hyperparameters["step"] == 0.7
    assert set(result.chosen) == {"relax"}


def test_the_same_seed_replays_and_another_does_not() -> None:
    def run(seed: int) -> np.ndarray:
        return fx.solve(PROBLEM, fx.FedAvg(batch_size=2), fx.Uniform(2), rounds=9, seed=seed).x

    assert np.array_equal(run(4), run(4))
    assert not np.array_equal(run(4), run(5))


def test_x0_is_where_it_starts() -> None:
    result = fx.solve(PROBLEM, fx.FedSplit(), rounds=2, x0=REFERENCE, record_every=1)
    assert result.history["objective"].to_pylist()[0] == PROBLEM.objective(REFERENCE)


def test_ctrl_c_keeps_what_was_done_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    def at_round_20(progress: fx.Progress) -> None:
        if progress.round == 20:
            raise KeyboardInterrupt

    def run(**kwargs) -> fx.Result:
        return fx.solve(
            PROBLEM, fx.FedDR(), fx.Bernoulli(0.5), rounds=50, record_every=10, **kwargs
        )

    with pytest.raises(fx.Interrupted) as stopped:
        run(callback=at_round_20)
    part = stopped.value.result
    assert part.status == "interrupted"
    assert part.rounds == 20
    assert part.certificate is None
    part.save(tmp_path / "part.npz")
    again, whole = run(resume=fx.Result.load(tmp_path / "part.npz")), run()
    assert np.array_equal(again.x, whole.x)
    assert again.history.equals(whole.history)


def test_progress_offers_a_checkpoint() -> None:
    seen = []

    def keep(progress: fx.Progress) -> None:
        seen.append((progress.round, progress.result()))

    whole = fx.solve(PROBLEM, fx.FOCUS(), rounds=30, record_every=10, callback=keep)
    assert [round for round, _ in seen] == [0, 10, 20, 30]
    for round, result in seen:
        assert result.rounds == round
        again = fx.solve(PROBLEM, fx.FOCUS(), rounds=30, record_every=10, resume=result)
        assert np.array_equal(again.x, whole.x)


def test_resume_from_another_run_is_refused() -> None:
    part = fx.solve(PROBLEM, fx.FOCUS(lr=0.1), fx.Uniform(2), rounds=5, seed=1)
    others = {
        "seed": {"seed": 2},
        "participation": {"participation": fx.Uniform(3)},
        "lr": {"algorithm": fx.FOCUS(lr=0.2)},
        "algorithm": {"algorithm": fx.FedSplit()},
        "target": {"problem": least_squares(20, l2=0.5)},
        "rows": {"problem": least_squares(21)},
        "rounds": {"rounds": 3},
    }
    same = {
        "problem": PROBLEM, "algorithm": fx.FOCUS(lr=0.1), "participation": fx.Uniform(2),
        "rounds": 9, "seed": 1,
    }  # fmt: skip
    for word, change in others.items():
        with pytest.raises(fx.InputError, match=word):
            fx.solve(**{**same, **change}, resume=part)
    assert fx.solve(**same, resume=part).rounds == 9


def test_a_saved_result_comes_back_whole(tmp_path: Path) -> None:
    result = fx.solve(PROBLEM, fx.FedSplit(per_client=True), fx.Bernoulli([1, 1, 0, 1]), rounds=5)
    result.save(tmp_path / "result.npz")
    again = fx.Result.load(tmp_path / "result.npz")
    assert str(again) == str(result)
    assert again.history.equals(result.history)
    for field in ("hyperparameters", "chosen", "exactness", "never_present", "invariant", "run"):
        assert getattr(again, field) == getattr(result, field), field
    assert [p.name for p in tmp_path.iterdir()] == ["result.npz"]


def test_a_broken_saved_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fx.InputError, match="no saved result"):
        fx.Result.load(tmp_path / "none.npz")
    path = tmp_path / "torn.npz"
    fx.solve(PROBLEM, fx.FOCUS(), rounds=1).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(fx.InputError, match="not a saved result"):
        fx.Result.load(path)


def test_a_regulariser_needs_an_algorithm_with_a_prox_for_it() -> None:
    lasso = least_squares(20, regularizer=fx.L1(0.1))
    for name, cls in fx.ALGORITHMS.items():
        if not cls.composite:
            with pytest.raises(fx.CapabilityError, match=rf"{name}.*FedDR"):
                fx.solve(lasso, cls(), rounds=1)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"rounds": 0}, "rounds.*0"),
        ({"rounds": 2.5}, "rounds.*2.5"),
        ({"seed": -1}, "seed.*-1"),
        ({"engine": "fast"}, "engine.*fast.*compiled"),
        ({"record_every": 0}, "record_every.*0"),
        ({"tol": -1.0}, "tol.*-1"),
        ({"x0": np.zeros(2)}, r"\(3,\).*\(2,\)"),
        ({"reference": [0.0, np.nan, 0.0]}, "non-finite.*index 1"),
        ({"reference_se": np.ones(3)}, "reference_se"),
        ({"participation": fx.Bernoulli([0.5, 0.5])}, "2"),
        ({"participation": fx.Uniform(9)}, "9"),
        ({"algorithm": "FOCUS"}, "FOCUS"),
        ({"participation": 0.5}, "participation.*Participation.*0.5"),
        ({"participation": fx.Full}, "participation.*Participation"),
        ({"problem": [1]}, r"problem.*Problem.*\[1\]"),
        ({"resume": "x"}, "resume.*Result.*'x'"),
        ({"tol": "a"}, "tol.*'a'"),
        ({"seed": 2**70}, "seed.*2"),
        ({"x0": "ab"}, "3 numbers.*'ab'"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict, words: str) -> None:
    with pytest.raises(fx.InputError, match=words):
        fx.solve(**{"problem": PROBLEM, "algorithm": fx.FOCUS(), **kwargs})


def test_a_start_where_the_loss_overflows_is_refused() -> None:
    problem = fx.Problem([(np.ones((3, 1)), np.arange(3))], loss="poisson")
    with pytest.raises(fx.InputError, match=r"x0.*overflows"):
        fx.solve(problem, fx.FedDR(), x0=[800.0])


def test_a_nonconvex_loss_reaches_a_stationary_point() -> None:
    """Phase retrieval, (row'x)^2 = y: no convexity, curvature of either sign at 0."""

    def intensity(x, rows):
        return ((rows.X @ x) ** 2 - rows.y) ** 2 / 4

    rng = np.random.default_rng(3)
    X = rng.normal(size=(4, 30, 3))
    clients = [(A, (A @ [1.0, -2.0, 0.5]) ** 2) for A in X]
    problem = fx.Problem(clients, loss=intensity)
    assert problem.constants().L_F > 0
    result = fx.solve(problem, fx.FedDR(), rounds=3000, x0=[0.3, -0.2, 0.1], tol=1e-9)
    assert result.status == "tolerance"
    assert result.rounds > 0
    assert np.linalg.norm(problem.grad(result.x)) <= 1e-9
    assert result.certificate is not None
    assert result.certificate.verdict == "cannot certify"


def test_a_flat_objective_is_solved_at_once() -> None:
    problem = fx.Problem([(np.zeros((4, 2)), np.ones(4))])
    for algorithm in (fx.FOCUS(), fx.SCAFFOLD(), fx.FedAvg(), fx.FedDR()):
        assert np.array_equal(fx.solve(problem, algorithm, rounds=3).x, np.zeros(2))


def test_float64_inside_although_the_caller_uses_float32() -> None:
    code = (
        "import numpy as np, jax, fedexact as fx\n"
        "rng = np.random.default_rng(0)\n"
        "clients = [(rng.normal(size=(9, 2)), rng.normal(size=9)) for _ in range(3)]\n"
        "problem = fx.Problem(clients)\n"
        "result = fx.solve(problem, fx.FOCUS(), fx.Bernoulli(0.5), rounds=2000)\n"
        "assert result.x.dtype == np.float64\n"
        "assert np.linalg.norm(result.x - fx.reference(problem)) < 1e-13\n"
        "assert jax.numpy.ones(1).dtype == np.float32\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("name", ["FOCUS", "FedSplit", "FedDR", "SCAFFOLD"])
def test_logistic_regression_to_the_pooled_answer(name: str) -> None:
    problem = logistic(22)
    result = fx.solve(
        problem, fx.ALGORITHMS[name](), fx.Bernoulli([0.9, 0.6, 0.4, 0.2]), rounds=4000
    )
    assert np.linalg.norm(result.x - fx.reference(problem)) < 1e-11
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"


# --- several recordings at a look -----------------------------------------------------------------


def looks(monkeypatch: pytest.MonkeyPatch, seconds: float, **kwargs: Any) -> fx.Result:
    """A run that looks at its recordings after about so many seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fedexact.solve"], "AHEAD", seconds)
        return fx.solve(PROBLEM, participation=fx.Bernoulli(0.6), **kwargs)


@pytest.mark.parametrize("every", [1, 7, 300])
@pytest.mark.parametrize("extra", [{}, {"tol": 1e-9}, {"algorithm": fx.FedAvg(lr=3.0)}], ids=repr)
def test_looking_ahead_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, every: int, extra: dict[str, Any]
) -> None:
    run = {"algorithm": fx.FOCUS(), "rounds": 700, "record_every": every, **extra}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fx.DivergenceWarning)
        one, many = looks(monkeypatch, 0.0, **run), looks(monkeypatch, 1e9, **run)
        told: list[fx.Progress] = []
        watched = looks(monkeypatch, 1e9, **run, callback=told.append)
    assert [p.round for p in told] == one.history["round"].to_pylist()
    for other in (many, watched):
        assert (other.status, other.message, other.rounds) == (one.status, one.message, one.rounds)
        assert repr(other.history.to_pylist()) == repr(one.history.to_pylist())  # NaN and all
        np.testing.assert_array_equal(other.x, one.x)
        for name, array in one.clients.items():
            np.testing.assert_array_equal(other.clients[name], array)
    assert one.status == {"tol": "tolerance", "algorithm": "diverged"}.get(
        next(iter(extra), ""), "finished"
    )


def test_a_callback_stops_the_run_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of recordings that were made together."""
    run = {"algorithm": fx.FOCUS(), "record_every": 2}
    results = []

    def stop(progress: fx.Progress) -> None:
        if progress.round in (10, 46):
            results.append(progress.result())
        if progress.round == 46:
            raise KeyboardInterrupt

    with pytest.raises(fx.Interrupted) as stopped:
        looks(monkeypatch, 1e9, rounds=100, callback=stop, **run)
    for result in (*results, stopped.value.result):
        whole = looks(monkeypatch, 0.0, rounds=result.rounds, **run)
        np.testing.assert_array_equal(result.x, whole.x)
        assert result.history.equals(whole.history)
    assert stopped.value.result.rounds == 46
    again = looks(monkeypatch, 0.0, rounds=100, resume=results[0], **run)
    np.testing.assert_array_equal(again.x, looks(monkeypatch, 0.0, rounds=100, **run).x)


def test_the_state_kept_of_a_diverged_run_is_that_of_its_least_gradient_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = {"algorithm": fx.SCAFFOLD(lr=0.4, local_steps=1), "record_every": 3}
    with pytest.warns(fx.DivergenceWarning, match="diverged"):
        diverged = looks(monkeypatch, 1e9, rounds=3000, **run)
    least = min(diverged.history.to_pylist(), key=lambda row: row["gradient_mapping"])
    assert diverged.rounds == least["round"] > 0
    kept = looks(monkeypatch, 0.0, rounds=diverged.rounds, **run)
    np.testing.assert_array_equal(diverged.x, kept.x)


def test_large_cohorts_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"algorithm": fx.SCAFFOLD(), "rounds": 50, "record_every": 20}
    whole = looks(monkeypatch, 0.0, **run)
    monkeypatch.setattr(sys.modules["fedexact.solve"], "DRAWN", 7)
    monkeypatch.setattr(sys.modules["fedexact.engines.compiled"], "VISITS", 5)
    blocks = looks(monkeypatch, 0.0, **run)
    assert blocks.history.equals(whole.history)
    np.testing.assert_array_equal(blocks.x, whole.x)
