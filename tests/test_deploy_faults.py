"""Exact whatever goes wrong: messages lost, doubled and late, sites and servers that die."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

import fedexact as fx
from federation import EVERYTHING, NONE, Carrier, Faults, Federation, Watched
from fedexact.deploy import store
from fedexact.deploy.store import Counted, Store, Version
from problems import fast_only

ALGORITHMS = {
    "FOCUS": {"name": "FOCUS"},
    "FedSplit": {"name": "FedSplit"},
    "FedDR": {"name": "FedDR"},
    "SCAFFOLD": {"name": "SCAFFOLD"},
    "MIFA": {"name": "MIFA", "local_steps": 1},
    "PushNewton": {"name": "PushNewton"},
}
ROUNDS = 300


def rows(loss: str, sizes: tuple[int, ...] = (60, 35, 90, 48)) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(7)
    found = []
    for k, n in enumerate(sizes):
        X = rng.normal(size=(n, 3)) + 0.3 * k
        eta = 0.5 + X @ [0.8, -0.5, 0.3]
        y = (
            eta + rng.normal(size=n)
            if loss == "squared"
            else rng.random(n) < 1 / (1 + np.exp(-eta))
        )
        found.append((X, np.asarray(y, float)))
    return found


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.of(rows("squared"), "squared", tmp_path)


# --- without faults -------------------------------------------------------------------------------

EXACTLY: dict[str, dict[str, Any]] = {
    **ALGORITHMS,
    "FedAWE": {"name": "FedAWE", "local_steps": 2},
    "SGFOCUS": {"name": "SGFOCUS", "batch_size": 5, "local_steps": 2},
}


@pytest.mark.parametrize("loss", ["squared", pytest.param("logistic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fast_only(EXACTLY, ("FOCUS", "FedSplit", "SCAFFOLD")))
def test_server_states_are_those_of_the_loop_engine(name: str, loss: str, tmp_path: Path) -> None:
    algorithm, federation = EXACTLY[name], Federation.of(rows(loss), loss, tmp_path)
    pattern = {"name": "bernoulli", "p": [0.9, 0.6, 0.4, 0.7]}
    asked = federation.experiment(algorithm, 25, participation=pattern)
    deployed = federation.run(asked, Carrier(federation.configs()))
    given = asked.deployed().build_algorithms()[algorithm["name"]]
    chosen = {key: value for key, value in deployed.chosen.items() if hasattr(given, key)}
    there = fx.solve(
        federation.problem(), dataclasses.replace(given, **chosen),
        fx.Bernoulli(pattern["p"]), rounds=25, engine="loop",
    )  # fmt: skip
    assert deployed.server.keys() == there.server.keys()
    for name, array in there.server.items():
        assert array.tobytes() == deployed.server[name].tobytes(), name


# --- with faults ----------------------------------------------------------------------------------


def with_kills(faults: Faults, seed: int) -> Faults:
    rng = np.random.default_rng(seed)
    moments = rng.choice(np.arange(5, ROUNDS), 10, replace=False).tolist()
    return dataclasses.replace(
        faults,
        killed_before_send=frozenset(moments[:5]),
        killed_after_replies=frozenset(moments[5:]),
    )


@pytest.mark.parametrize("name", fast_only(ALGORITHMS, ("FOCUS", "FedSplit")))
def test_the_ledger_keeps_every_algorithm_exact(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = Carrier(federation.configs(), with_kills(EVERYTHING, 3), seed=11)
    watched = Watched(monkeypatch, federation.configs())
    said: list[str] = []
    result = federation.run(federation.experiment(ALGORITHMS[name], ROUNDS), carrier, said)
    assert watched.worst < 1e-12
    assert np.abs(result.x - fx.reference(federation.problem())).max() < 1e-9
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"
    assert result.rounds == ROUNDS
    failed = {failure.code for r in watched.reports for failure in r.failed.values()}
    assert failed >= {"late", "8", "disk"}
    assert sum(report.duplicates + report.late for report in watched.reports) > 0
    assert sum("goes on from round" in line for line in said) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FOCUS", "FedDR"])
def test_a_torn_store_restarts_the_sums_and_is_told(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = dataclasses.replace(EVERYTHING, torn={40: "site 1", 41: "site 3"}, crash_after=0.0)
    carrier = Carrier(federation.configs(), faults, seed=2)
    watched = Watched(monkeypatch, federation.configs())
    result = federation.run(federation.experiment(ALGORITHMS[name], ROUNDS), carrier)
    notes = [report.note for report in watched.reports if "restarted" in report.note]
    assert any("'site 1'" in note and "damaged" in note for note in notes)
    assert watched.worst < 1e-12
    assert np.abs(result.x - fx.reference(federation.problem())).max() < 1e-9


class Forgetful(Store):
    """Without the ledger: a site goes on from whatever it did last."""

    def open(self, epoch: int, round: int, counted: Counted, initial: Any) -> Version:
        found = store.read_record(self._path("pending"))
        return Version(epoch, round, found[1]) if found else Version(epoch, store.NEVER, initial())


@pytest.mark.parametrize("name", fast_only(ALGORITHMS, ("FOCUS",)))
def test_without_the_ledger_the_same_faults_break_it(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedexact.deploy.site.Store", Forgetful)
    carrier = Carrier(federation.configs(), EVERYTHING, seed=11)
    result = federation.run(federation.experiment(ALGORITHMS[name], ROUNDS), carrier)
    assert np.abs(result.x - fx.reference(federation.problem())).max() > 1e-6


# --- secure sums ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_secure_sums_give_what_plain_ones_give(tmp_path: Path) -> None:
    found = []
    for secure in (False, True):
        federation = Federation.of(rows("logistic"), "logistic", tmp_path / str(secure))
        asked = federation.experiment(ALGORITHMS["FOCUS"], 60, secure=secure)
        found.append(federation.run(asked, Carrier(federation.configs())))
    plain, secure = found
    assert np.abs(plain.x - secure.x).max() <= 1e-12 * np.abs(plain.x).max()
    assert secure.certificate is not None
    assert plain.certificate is not None
    assert secure.certificate.gradient_mapping == pytest.approx(
        plain.certificate.gradient_mapping, abs=1e-12
    )


@pytest.mark.slow
def test_who_drops_out_of_a_masked_round_loses_nothing(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = dataclasses.replace(
        NONE, lost_request=0.1, lost_reply=0.1, crash_before=0.05, crash_after=0.05
    )
    carrier = Carrier(federation.configs(), faults, seed=5)
    watched = Watched(monkeypatch, federation.configs())
    asked = federation.experiment(ALGORITHMS["FOCUS"], ROUNDS, secure=True)
    result = federation.run(asked, carrier)
    assert watched.worst < 1e-12
    assert np.abs(result.x - fx.reference(federation.problem())).max() < 1e-9
    left = [r for r in watched.reports if r.failed and r.counted]
    assert len(left) > 50
    names = {name for _, content in carrier.requests for name in content.arrays}
    assert "masked" not in names


def test_the_server_sees_nothing_but_masked_uploads(federation: Federation) -> None:
    carrier = Carrier(federation.configs())
    seen: list[set[str]] = []

    def look(name: str, content: Any) -> Any:
        if content.kind == "train":
            seen.append(set(content.arrays))
        return content

    carrier.alter = look
    federation.run(federation.experiment(ALGORITHMS["FOCUS"], 3, secure=True), carrier)
    assert seen == [{"masked"}] * 12
