"""Running an experiment: every algorithm with every seed, kept as it goes.

Checkpoints lie in the folder `runs` of the output folder: the experiment as asked for, and one
saved Result per algorithm and seed, replaced every few seconds. A killed run loses no more.
"""

from __future__ import annotations

import dataclasses
import re
import time
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedexact.certificate import certify
from fedexact.config.models import Experiment
from fedexact.core import Algorithm
from fedexact.data import Federation
from fedexact.errors import DivergenceWarning, FedexactError, InputError
from fedexact.files import remove_parts, write_atomic
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.reference import reference
from fedexact.result import Result
from fedexact.solve import Interrupted, Progress, check_fit, setting_of, solve

SAVE_EVERY = 2.0  # seconds between two checkpoints of a run
START_AGAIN = "leave --resume out to start again"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An experiment with everything checked and nothing written."""

    experiment: Experiment
    federation: Federation | None  # None where the rows are elsewhere
    problem: Problem
    participation: Participation
    algorithms: Mapping[str, Algorithm]  # by label, as given
    reference: np.ndarray | None  # (d,) pooled solution
    reference_se: np.ndarray | None  # (d,) its standard errors
    notes: tuple[str, ...]  # on the pooled solution

    @property
    def data(self) -> Federation:
        """The rows, which are here."""
        assert self.federation is not None
        return self.federation


@dataclasses.dataclass(frozen=True)
class Run:
    """One algorithm with one seed."""

    label: str
    seed: int
    result: Result


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished experiment."""

    prepared: Prepared
    runs: tuple[Run, ...]

    def of(self, label: str) -> list[Run]:
        """The runs of one algorithm, one per seed."""
        return [run for run in self.runs if run.label == label]


class Observer(Protocol):
    """Whoever wants to see the runs go by."""

    def begin(self, label: str, seed: int, rounds: int) -> None: ...
    def advance(self, progress: Progress) -> None: ...
    def end(self, run: Run) -> None: ...


def prepare(experiment: Experiment) -> Prepared:
    """Reads the data and checks everything that can be checked before the first round.

    Raises InputError and CapabilityError.
    """
    federation = experiment.data.federation()
    problem = experiment.problem.build(federation)
    participation = experiment.build_participation(problem)
    algorithms = experiment.build_algorithms()
    setting = setting_of(problem, participation)
    for algorithm in algorithms.values():
        check_fit(problem, algorithm)
        algorithm.resolve(setting)
    x, se, notes = _pooled_solution(problem)
    return Prepared(
        experiment, federation, problem, participation, algorithms, x, se, notes
    )  # fmt: skip


def run(prepared: Prepared, store: Store, observer: Observer) -> Outcome:
    """All runs, those finished in the store taken from there.

    Raises InputError, before the first round, when a saved run is damaged or of other rows, and
    Interrupted on Ctrl-C, after the run it hit has been kept.
    """
    kept = {
        (label, seed): store.load(label, seed, prepared.problem)
        for label in prepared.algorithms
        for seed in prepared.experiment.seeds
    }
    runs = []
    for label, algorithm in prepared.algorithms.items():
        for seed in prepared.experiment.seeds:
            saved = kept[label, seed]
            observer.begin(label, seed, prepared.experiment.rounds)
            if saved is None or saved.status == "interrupted":
                saved = _solve(prepared, store, observer, label, seed, algorithm, saved)
                store.save(label, seed, saved)
            runs.append(Run(label, seed, saved))
            observer.end(runs[-1])
    return Outcome(prepared, tuple(runs))


class Store:
    """The checkpoints in an output folder."""

    def __init__(self, out: Path, experiment: Experiment, resume: bool) -> None:
        """Opens the store of `out`: to go on with `resume`, else emptied.

        Raises InputError when there is nothing to resume, or another experiment.
        """
        self.out, self.folder = out, out / "runs"
        self._asked = self.folder / "experiment.toml"
        self._index = {label: i for i, label in enumerate(experiment.labels)}
        if resume:
            self._check_same(experiment)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in [*self.folder.glob("*.npz"), *self.folder.glob("experiment.toml")]:
                old.unlink()
            write_atomic(self._asked, experiment.to_toml())
        except OSError as error:
            raise InputError(
                f"the output folder {out} cannot be written: {error.strerror}"
            ) from error

    def load(self, label: str, seed: int, problem: Problem) -> Result | None:
        """What has been kept of a run on the problem.

        Raises InputError when it cannot be read, or when the rows or clients were others then.
        """
        path = self._path(label, seed)
        if not path.is_file():
            return None
        try:
            result = Result.load(path)
        except Exception as error:  # NumPy, JSON and Arrow raise anything for a damaged file
            raise InputError(
                f"--resume: {error}; delete {path} to run {label}, seed {seed}, anew, or "
                f"{START_AGAIN}"
            ) from None
        then = result.run.get("rows"), result.run.get("clients")
        if then != (problem.fingerprint, problem.names):
            raise InputError(
                f"--resume: the rows or the clients have changed since the run in {self.out} "
                f"({label}, seed {seed}); {START_AGAIN}"
            )
        return result

    def save(self, label: str, seed: int, result: Result) -> None:
        """Keeps a run, finished or not."""
        result.save(self._path(label, seed))

    def _path(self, label: str, seed: int) -> Path:
        return self.folder / f"{file_name(self._index[label] + 1, label)}-seed{seed}.npz"

    def _check_same(self, experiment: Experiment) -> None:
        if not self._asked.is_file():
            raise InputError(f"--resume: {self.out} holds no run that could be resumed")
        remove_parts(self.folder)
        there = _flat(self._read_asked())
        here = _flat(tomllib.loads(experiment.to_toml()))
        differ = [
            f"  {key}: {there.get(key, 'nothing')} there, {here.get(key, 'nothing')} here"
            for key in dict.fromkeys([*here, *there])
            if there.get(key) != here.get(key)
        ]
        if differ:
            raise InputError(
                f"--resume: the run in {self.out} is of another experiment:\n"
                + "\n".join(differ)
                + f"\ngive another --out, or {START_AGAIN}"
            )

    def _read_asked(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self._asked.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"--resume: {self._asked} is damaged ({error}); {START_AGAIN}"
            ) from None


def file_name(number: int, label: str) -> str:
    """Of what is kept of an algorithm, the first of an experiment having number 1."""
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}"


def _solve(
    prepared: Prepared,
    store: Store,
    observer: Observer,
    label: str,
    seed: int,
    algorithm: Algorithm,
    saved: Result | None,
) -> Result:
    last = time.monotonic()

    def watch(progress: Progress) -> None:
        nonlocal last
        observer.advance(progress)
        if time.monotonic() - last >= SAVE_EVERY:
            store.save(label, seed, progress.result())
            last = time.monotonic()

    experiment = prepared.experiment
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # it is in the result and the table
            return solve(
                prepared.problem,
                algorithm,
                prepared.participation,
                rounds=experiment.rounds,
                tol=experiment.tol,
                seed=seed,
                record_every=experiment.record_every,
                precision=experiment.precision,
                reference=prepared.reference,
                reference_se=prepared.reference_se,
                resume=saved,
                callback=watch,
            )
    except Interrupted as interrupted:
        store.save(label, seed, interrupted.result)
        raise


def _pooled_solution(
    problem: Problem,
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
    """The solution, its standard errors, and what is to be said about them."""
    try:
        x = reference(problem)
    except InputError:
        raise
    except FedexactError as error:
        return None, None, (f"no pooled solution to compare with: {error}",)
    se = certify(problem, x).standard_errors
    return x, se, ()


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(table, list) and any(isinstance(entry, dict) for entry in table):
        table = {str(entry.get("label", i)): entry for i, entry in enumerate(table)}
    if not isinstance(table, dict):
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat
