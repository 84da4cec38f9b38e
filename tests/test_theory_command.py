"""Predictions beside runs, and the command that prints them."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from rich.console import Console, RenderableType
from typer.testing import CliRunner
from typer.testing import Result as Done

import fedexact as fx
from fedexact import cli, config, report
from fedexact.data import bundled_experiment
from fedexact.theory.observe import Observation, crossing, observe, slope
from fedexact.theory.summary import Prediction, predict
from problems import THREE_SITES, least_squares

PROBLEM = least_squares(2)
TWO_CLIENTS = fx.Problem(
    [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])],
    loss="squared", weights="clients", reduction="sum",
)  # fmt: skip
TABLE = "site,age,dose,y\n" + "".join(
    f"{'ABC'[i % 3]},{40 + (7 * i) % 31},{(5 * i) % 8},{int((i * i) % 5 > 1)}\n" for i in range(36)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "three.toml").write_text("rounds = 300\n" + THREE_SITES)
    return tmp_path


def theory(*arguments: object) -> Done:
    return CliRunner().invoke(cli.app, ["theory", *map(str, arguments)])


def succeeded(done: Done) -> str:
    assert done.exit_code == 0, done.output
    return done.stdout


# --- predictions, by closed forms -----------------------------------------------------------------


@pytest.mark.slow
def test_gradient_descent_on_one_coefficient() -> None:
    """F'' = 9/2: the error shrinks by |1 - 4.5 lr|; one vector of one number each way."""
    said = predict(fx.FOCUS(lr=0.1), TWO_CLIENTS)
    assert said.exactness.exact
    assert said.limit is not None
    assert said.limit.x == pytest.approx([4 / 9])
    assert said.rate is not None
    assert said.rate.per_round == pytest.approx(0.55)
    rounds = math.ceil(math.log(1e-8) / math.log(0.55))
    assert said.rounds == rounds
    assert said.total(said.cost.bytes_up) == rounds * 2 * 8
    assert said.total(said.cost.gradients) == rounds * 4
    assert said.violated == ()
    assert said.unknown == ()


def test_a_biased_one_is_where_its_fixed_point_is() -> None:
    lr, R = 0.1, 10
    said = predict(fx.FedAvg(lr=lr, local_steps=R), TWO_CLIENTS)
    M = [sum((1 - lr * h) ** i for i in range(R)) for h in (1, 8)]
    assert not said.exactness.exact
    assert said.limit is not None
    assert said.limit.distance == pytest.approx((2 * M[0] + 2 * M[1]) / (M[0] + 8 * M[1]) - 4 / 9)
    assert said.settles
    shrinks = 1 - lr * (M[0] + 8 * M[1]) / 2  # x += -lr mean_k M_k (h_k x - b_k)
    assert said.rate is not None
    assert said.rate.per_round == pytest.approx(abs(shrinks))


def test_a_model_that_keeps_moving_never_gets_there() -> None:
    said = predict(fx.FedAvg(lr=0.01, local_steps=1), TWO_CLIENTS, fx.Bernoulli([0.9, 0.3]))
    assert not said.settles
    assert said.rounds == math.inf
    assert said.total(said.cost.bytes_up) == math.inf
    assert said.violated == ("a mean over the participants weighs all clients alike",)


def test_what_cannot_be_said_is_said() -> None:
    said = predict(fx.FOCUS(lr=0.1), TWO_CLIENTS, fx.Bernoulli([0.9, 0.0]))
    assert said.rate is None
    assert said.rounds is None
    assert said.total(3.0) is None
    assert "every client keeps coming back" in said.violated
    assert any("rate unknown" in words for words in said.unknown)


def test_refusals() -> None:
    with pytest.raises(fx.InputError, match="tol"):
        predict(fx.FOCUS(), PROBLEM, tol=-1.0)
    with pytest.raises(fx.CapabilityError, match="no prox step"):
        predict(fx.FOCUS(), least_squares(2, regularizer=fx.L1(0.1)))


# --- measuring a run ------------------------------------------------------------------------------


def test_the_slope_of_a_geometric_fall_is_its_factor() -> None:
    t = np.arange(400.0)
    fall = 3.0 * 0.9**t
    assert slope(t, np.maximum(fall, 1e-15)) == pytest.approx(0.9, rel=1e-9)
    two_speeds = fall + 10.0 * 0.5**t
    assert slope(t, np.maximum(two_speeds, 1e-15)) == pytest.approx(0.9, rel=1e-6)
    rng = np.random.default_rng(0)
    noise_ball = fall + 1e-4 * (0.5 + rng.random(400))
    assert slope(t, noise_ball) == pytest.approx(0.9, abs=5e-3)
    assert slope(t, np.full(400, 2.0)) is None
    assert slope(t[:2], fall[:2]) is None


def test_where_a_geometric_fall_crosses_a_tolerance() -> None:
    fall = 3.0 * 0.9 ** np.arange(400.0)
    assert crossing(fall, 1e-8) == pytest.approx(math.log(1e-8) / math.log(0.9))
    assert crossing(fall, 1e-30) is None
    assert crossing(np.array([1.0, 0.0]), 1e-3) is not None
    assert crossing(np.array([0.0, 0.0]), 1e-3) is None


def test_rounds_are_whole_and_what_they_cost_is_counted_to_their_end() -> None:
    """The error shrinks by 0.1 in the first round, so that it is below one half after it."""
    said = predict(fx.FOCUS(lr=0.2), TWO_CLIENTS, tol=0.5)
    seen = observe(said, TWO_CLIENTS, rounds=5)
    assert seen.rounds == said.rounds == 1
    assert seen.gradients == said.total(said.cost.gradients) == 4
    assert seen.bytes == said.total(said.cost.bytes_up + said.cost.bytes_down)


CASES: dict[str, tuple[fx.Algorithm, fx.Participation]] = {
    "FOCUS": (fx.FOCUS(local_steps=3), fx.Full()),
    "FedAvg": (fx.FedAvg(local_steps=3), fx.Full()),
    "FedSplit": (fx.FedSplit(), fx.Full()),
    "SCAFFOLD in turns": (fx.SCAFFOLD(local_steps=2), fx.Cyclic(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_observed_is_what_was_predicted(case: str) -> None:
    """Deterministic rounds: the rate to 2 %, the limit to 1e-10, rounds and cost near."""
    algorithm, pattern = CASES[case]
    said = predict(algorithm, PROBLEM, pattern)
    pooled = fx.reference(PROBLEM)
    seen = observe(said, PROBLEM, pattern, rounds=600, pooled=pooled)
    assert said.rate is not None
    assert said.limit is not None
    assert seen.per_round == pytest.approx(said.rate.per_round, rel=0.02)
    assert seen.distance == pytest.approx(said.limit.distance, abs=1e-10)
    assert said.rounds is not None
    assert seen.rounds == pytest.approx(said.rounds, rel=0.4)  # but for the first rounds
    per_round = said.cost.bytes_up + said.cost.bytes_down
    assert seen.bytes == pytest.approx(per_round * (seen.rounds or 0), rel=0.05)


@pytest.mark.slow
def test_several_seeds_give_a_median_and_an_error() -> None:
    pattern = fx.Bernoulli([0.9, 0.6, 0.6, 0.5])
    said = predict(fx.FOCUS(), PROBLEM, pattern)
    seen = observe(said, PROBLEM, pattern, rounds=400, seeds=range(8))
    assert seen.distance is None  # no pooled solution was given
    assert len(seen.statuses) == 8
    assert said.rate is not None
    assert seen.error is not None
    assert seen.per_round is not None
    assert abs(seen.per_round - said.rate.per_round) < 4 * (seen.error + said.rate.error)


@pytest.mark.slow
def test_a_moving_model_stays_as_far_from_its_limit_as_predicted() -> None:
    pattern = fx.Bernoulli(0.5)
    said = predict(fx.FedAvg(lr=0.02, local_steps=2), PROBLEM, pattern)
    seen = observe(said, PROBLEM, pattern, rounds=20_000)
    assert said.limit is not None
    assert seen.level == pytest.approx(said.limit.spread, rel=0.15)
    assert seen.rounds is None


# --- the command ----------------------------------------------------------------------------------


def test_the_command_predicts_and_writes(folder: Path) -> None:
    printed = succeeded(theory(folder / "three.toml", "--out", folder / "out"))
    assert re.search(r"FedAvg +biased ", printed)
    assert re.search(r"FOCUS +exact +0 +0 +0 +0\.\d{4} +\d+ ", printed)
    assert "FedAvg is biased: client drift: local_steps = 5 > 1" in printed
    words = re.sub(r"\s+", " ", printed)
    assert (
        "FedAvg violates an assumption of its guarantee: a mean over the participants weighs all "
        "clients alike"
    ) in words
    assert "observed" not in printed

    prepared = config.prepare(config.load(folder / "three.toml"))
    written = json.loads((folder / "out" / "theory.json").read_text())
    for entry, (label, algorithm) in zip(
        written["algorithms"], prepared.algorithms.items(), strict=True
    ):
        said = predict(algorithm, prepared.problem, prepared.participation)
        assert entry["label"] == label
        assert said.limit is not None
        assert entry["limit"] == said.limit.x.tolist()
        assert entry["distance_se"] == said.limit.distance_se
        assert said.rate is not None
        assert entry["per_round"] == said.rate.per_round
        assert entry["rounds"] == (said.rounds if math.isfinite(said.rounds or 0) else None)
        assert entry["observed"] is None
    table = parquet.read_table(folder / "out" / "theory.parquet")
    assert table["label"].to_pylist() == ["FedAvg", "FOCUS"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        "theory.json",
        "theory.parquet",
    ]


def test_with_run_the_observed_values_stand_beside(folder: Path) -> None:
    printed = succeeded(
        theory(folder / "three.toml", "--run", "--seed", 3, "--out", folder / "out")
    )
    written = json.loads((folder / "out" / "theory.json").read_text())
    focus = next(e for e in written["algorithms"] if e["label"] == "FOCUS")
    prepared = config.prepare(config.load(folder / "three.toml"))
    result = fx.solve(prepared.problem, fx.FOCUS(), prepared.participation, rounds=300, seed=3)
    assert prepared.reference is not None
    assert focus["observed"]["distance"] == pytest.approx(
        np.linalg.norm(result.x - prepared.reference), abs=1e-15
    )
    assert focus["observed"]["per_round"] == pytest.approx(focus["per_round"], abs=0.03)
    assert focus["observed"]["rounds"] == pytest.approx(focus["rounds"], rel=0.3)
    assert f"{focus['observed']['per_round']:.4f}" in printed
    assert "observed" in printed


@pytest.mark.slow
def test_a_bundled_experiment_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`heart`, with FOCUS alone for the sake of time."""
    asked = config.load(bundled_experiment("heart"))
    focus = [table for table in asked.algorithms if table["name"] == "FOCUS"]
    fewer = asked.model_copy(update={"algorithms": focus})
    monkeypatch.setattr(config, "load", lambda path: fewer)
    monkeypatch.chdir(tmp_path)
    printed = succeeded(theory("heart"))
    assert "Cleveland" in printed
    assert re.search(r"FOCUS +exact +0 ", printed)
    assert "the assumptions of all guarantees are met" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["hart"], "hart"),
        (["three.toml", "--tol", "2"], "--tol must be between 0 and 1, got 2"),
    ],
)
def test_errors_are_one_message_and_code_2(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = theory(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_a_problem_that_an_algorithm_cannot_handle(folder: Path) -> None:
    text = (folder / "three.toml").read_text()
    (folder / "three.toml").write_text(
        text.replace(
            'loss = "logistic"', 'loss = "logistic"\nregularizer = {name="l1", strength=0.1}'
        )
    )
    done = theory(folder / "three.toml")
    assert done.exit_code == 2
    assert "FedAvg has no prox step" in done.stderr


def test_an_interruption_is_one_message_and_code_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "predict", interrupted)
    done = theory(folder / "three.toml", "--out", folder / "out")
    assert done.exit_code == 130
    assert done.stderr == "interrupted; nothing was written\n"
    assert not (folder / "out").exists()


def test_an_interruption_does_not_wait_for_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(BaseException): ...

    def app() -> None:
        raise SystemExit(130)

    def leave(code: int) -> None:
        assert code == 130
        raise Left

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli.os, "_exit", leave)
    with pytest.raises(Left):
        cli.main()


def printed_at(width: int, *parts: RenderableType) -> str:
    console = Console(width=width, record=True, highlight=False, file=io.StringIO())
    console.print(*parts)
    return console.export_text()


LONG = "FOCUS, a label in six words"


@pytest.fixture(scope="module")
def said() -> dict[str, Prediction]:
    """FOCUS with everybody and FedAvg with random cohorts."""
    return {
        "FedAvg": predict(fx.FedAvg(lr=0.01), TWO_CLIENTS, fx.Bernoulli(0.5)),
        LONG: predict(fx.FOCUS(lr=1 / 45), TWO_CLIENTS),
    }


def observations(labels: Iterable[str]) -> dict[str, Observation]:
    seen = Observation(1.5e-12, 2.5e-11, 0.123, 0.9876, 0.0123, 12345.0, 4.5e6, 1e6, ("done",))
    return dict.fromkeys(labels, seen)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_label_and_no_value_is_cut(said: dict[str, Prediction], width: int) -> None:
    """And a rate, here 1 - 4.5 lr, stands in the line of its algorithm."""
    predicted = printed_at(width, report.prediction_table(said, width))
    assert re.search(r"^ ?FOCUS, .* exact .* 0\.9000", predicted, re.MULTILINE)
    seen = observations(said)
    compared = printed_at(width, report.observation_table(said, seen, width))
    for text in (predicted, compared):
        assert "…" not in text
        assert all(len(line) <= width for line in text.splitlines())
        assert all(re.search(rf"(^|\s){word}\s", text) for word in LONG.split())
    assert re.search(
        r"observed +2\.5e-11 +0\.123 +0\.9876 +0\.0123 +12345 +4\.5e\+06 *\n", compared
    )
    assert len(re.findall(r"predicted +\d", compared)) == 2


def test_what_holds_of_several_is_said_once_with_their_names() -> None:
    pattern = fx.Bernoulli([0.9, 0.0])
    said = {label: predict(fx.FOCUS(lr=0.1), TWO_CLIENTS, pattern) for label in ("one", "two")}
    words = re.sub(r"\s+", " ", printed_at(80, report.prediction_notes(said)))
    assert words.count("never takes part") == words.count("one, two: rate unknown: client") == 1
    assert words.count("one, two are biased: ") == words.count("biased: ") == 1
    assert words.count("one, two violate an assumption of their guarantee: ") == 1
