"""The programs that the benchmarks compare compute the same; the report says what was found."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import c_loop, numpy_batched, numpy_loop, ours, report
from benchmarks.c_loop import NoCompilerError
from benchmarks.compare import FailedError, Program, Worker, compare
from benchmarks.data import Data, load, save
from benchmarks.peers.environments import PACKAGES
from benchmarks.powerlaw import LARGEST, SMALLEST, power_law
from benchmarks.result import Result, Table, Target, number, read
from benchmarks.workloads import digits, logistic, objective

import fedexact as fx

ROUNDS = 20
TINY = {
    "W1": partial(logistic, "W1", n_clients=6, n_rows=13, d=5, per_round=6),
    "W2": partial(logistic, "W2", n_clients=9, n_rows=8, d=5, per_round=3),
}


@pytest.fixture(params=TINY)
def data(request: pytest.FixtureRequest) -> Data:
    return TINY[request.param]()


@pytest.fixture
def compiler() -> None:
    try:
        c_loop.compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))


# --- the same model and the same losses -----------------------------------------------------------


@pytest.mark.parametrize("module", [numpy_loop, numpy_batched])
def test_numpy_computes_what_fedexact_computes(module: Any, data: Data) -> None:
    expected = ours.make(data, {})(ROUNDS).x
    assert np.linalg.norm(expected) > 0.1
    x = module.make(data, {"dtype": "float64"})(ROUNDS).x
    np.testing.assert_allclose(x, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-4)])
def test_c_computes_and_records_what_fedexact_does(
    dtype: str, tolerance: float, threads: int, blocked: bool, data: Data
) -> None:
    expected = ours.make(data, {})(ROUNDS)
    options = {"dtype": dtype, "threads": threads, "blocked": blocked}
    found = c_loop.make(data, options)(ROUNDS)
    np.testing.assert_allclose(found.x, expected.x, rtol=tolerance, atol=tolerance / 100)
    assert len(expected.objective) == ROUNDS // c_loop.RECORD_EVERY + 1
    np.testing.assert_allclose(found.objective, expected.objective, rtol=tolerance)
    assert abs(found.objective[-1] - found.objective[0]) > 0.01


def test_objective_is_what_fedexact_records(data: Data) -> None:
    ran = ours.make(data, {})(ROUNDS)
    assert objective(data, ran.x) == pytest.approx(ran.objective[-1], rel=1e-12)
    assert objective(data, data.x0) == pytest.approx(np.log(2), rel=1e-12)


def test_objective_of_the_mlp_is_the_loss_that_fedexact_gets() -> None:
    data = digits()
    x, *rows = map(jnp.asarray, (data.x0, data.X, data.y))
    losses = np.asarray(ours.cross_entropy(x, fx.Rows(*rows)))
    means = [np.mean(losses[a:b]) for a, b in zip(data.first[:-1], data.first[1:], strict=True)]
    assert objective(data, data.x0) == pytest.approx(np.mean(means), rel=1e-12)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompilerError, match="no C compiler"):
        c_loop.compiler()


# --- data -----------------------------------------------------------------------------------------


def test_data_survives_the_file(tmp_path: Path, data: Data) -> None:
    again = load(save(tmp_path / "data.npz", data))
    assert again.info == data.info
    for ours_, theirs in zip(again[:-1], data[:-1], strict=True):
        np.testing.assert_array_equal(ours_, theirs)


def test_every_client_of_the_digits_has_rows_and_labels_are_skewed() -> None:
    data = digits()
    sizes = np.diff(data.first)
    assert len(sizes) == 50
    assert sizes.min() >= 1
    assert sizes.sum() == len(data.y) == 1797
    largest = [np.bincount(y.astype(int)).max() / len(y) for _, y in data.clients()]
    assert np.mean(largest) > 0.3


def test_power_law_has_both_ends_and_falls() -> None:
    sizes = power_law(500)
    assert (sizes.min(), sizes.max()) == (SMALLEST, LARGEST)
    # the density falls as size^-1.5: three of four clients have less than 16 times the least
    assert np.mean(sizes < 16 * SMALLEST) == pytest.approx(0.75, abs=0.02)


# --- workers --------------------------------------------------------------------------------------


def test_programs_are_compared_with_the_first_and_failures_say_why(
    tmp_path: Path, data: Data
) -> None:
    path = save(tmp_path / "data.npz", data)
    good = {"dtype": "float64"}
    programs = [
        Program("loop", "benchmarks.numpy_loop", good, rounds=3, repeats=2),
        Program("batched", "benchmarks.numpy_batched", good, rounds=3, repeats=1),
        Program("single", "benchmarks.numpy_loop", {"dtype": "float32"}),
        Program("broken", "benchmarks.numpy_loop"),
    ]
    called = []
    found = compare(path, programs, partial(objective, data), [lambda: called.append(1)])
    loop, batched, single, broken = found
    assert not loop.missing
    assert not batched.missing
    assert (len(loop.seconds), len(batched.seconds)) == (2, 1)
    assert len(called) == 9
    assert batched.off is not None
    assert batched.off < 1e-9
    assert batched.objective == pytest.approx(loop.objective)
    assert loop.peak > 10
    assert "another model" in single.missing
    assert broken.missing == "KeyError: 'dtype'"


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"No module named benchmarks\.nothing"):
        Worker(Program("nothing", "benchmarks.nothing"), tmp_path / "log")


def test_environments_pin_every_package() -> None:
    requirements = [r for steps in PACKAGES.values() for step in steps for r in step.split()]
    assert requirements
    assert all("==" in requirement for requirement in requirements)


# --- report ---------------------------------------------------------------------------------------


def test_results_survive_the_file_and_show_in_the_page(tmp_path: Path) -> None:
    result = Result(
        "start",
        "Start",
        ["A note."],
        [Table(("what", "s"), [("import", "1.5")])],
        [Target("seconds", 2.5, 3.0), Target("faster", 4.0, 10.0, at_least=True)],
    )
    again = read(result.save(tmp_path))
    assert os.listdir(tmp_path) == ["start.json"]
    assert again.targets == result.targets
    page = report.page([again])
    assert "| import | 1.5 |" in page
    assert "| seconds | at most 3 | 2.5 | yes |" in page
    assert "| faster | at least 10 | 4 | **no** |" in page
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in page


def test_a_target_not_measured_is_neither_met_nor_missed() -> None:
    assert Target("x", None, 1.0).met is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (1.2345, "1.23"), (1234.5, "1,230"), (1.2e-7, "1.20e-07")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
