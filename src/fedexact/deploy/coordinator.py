"""The server of a federation: the handshake, the rounds of each algorithm, the certificate."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from fedexact.certificate import Certificate, certify
from fedexact.config import Experiment, Outcome, Prepared, Run, file_name
from fedexact.core import Algorithm, in_float64
from fedexact.deploy.messages import Transport
from fedexact.deploy.remote import FederationError
from fedexact.deploy.roster import Clock
from fedexact.deploy.rounds import CHECKPOINT, Report, Rounds
from fedexact.deploy.session import Session, open_session
from fedexact.deploy.store import locked
from fedexact.deploy.sums import NOT_FINITE
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.result import HISTORY, Result, by_field, hyperparameters
from fedexact.solve import GROWTH, check_fit, chosen, evaluate, evaluated, setting_of

ROUNDS = "rounds.jsonl"

Say = Callable[[str], None]


def run_federation(
    transport: Transport,
    experiment: Experiment,
    out: Path,
    say: Say,
    resume: bool = True,
    clock: Clock | None = None,
) -> Outcome:
    """Runs the experiment over the members that the transport reaches.

    Args:
        transport: carries the messages.
        experiment: with a table [deploy] that names the clients.
        out: folder for the checkpoints, the round reports (`rounds.jsonl`) and the results.
        say: told of every round in a line.
        resume: goes on from the checkpoints in `out`, if there are any; else they are removed.

    Raises InputError before round 0 for data or settings that do not fit, naming the client, and
    FederationError where the federation cannot go on; what has been done is in the checkpoints.
    """
    with _alone(out):
        return _run(transport, experiment.deployed(), out, say, resume, clock)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Refuses a folder in which another server is running."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(out, wait=False))
        except BlockingIOError:
            raise FederationError(
                f"another server is running in {out}; stop it, or give another output folder"
            ) from None
        yield


def _run(
    transport: Transport,
    asked: Experiment,
    out: Path,
    say: Say,
    resume: bool,
    clock: Clock | None,
) -> Outcome:
    algorithms = asked.build_algorithms()
    session = open_session(transport, asked, say, clock)
    participation = asked.build_participation(session.objective)
    for algorithm in algorithms.values():
        check_fit(session.objective, algorithm)
    runs = []
    for i, (label, given) in enumerate(algorithms.items(), 1):
        slug = file_name(i, label)
        server = _Server(session, asked, participation, label, given, out / slug, say)
        server.start(resume)
        result = server.go()
        result.save(out / "runs" / f"{slug}-seed{asked.seeds[0]}.npz")
        runs.append(Run(label, asked.seeds[0], result))
    prepared = Prepared(
        asked, None, cast(Problem, session.objective), participation, algorithms, None, None, ()
    )
    return Outcome(prepared, tuple(runs))


class _Server:
    """One algorithm's run."""

    def __init__(
        self,
        session: Session,
        experiment: Experiment,
        participation: Participation,
        label: str,
        given: Algorithm,
        folder: Path,
        say: Say,
    ) -> None:
        self.session, self.experiment, self.label, self.given = session, experiment, label, given
        self.out, self.folder, self.say = folder.parent, folder, say
        self.seed = experiment.seeds[0]
        self.participation = participation
        self.setting = setting_of(session.objective, self.participation, self.seed)
        algorithm = given.resolve(self.setting)
        self.rounds = Rounds(
            session, given, algorithm, self.participation, self.folder, self.seed, self._x0()
        )
        self.checked = 0  # the round of the last pass over all rows
        self.mapping = np.inf  # norm of the gradient mapping in it

    def _x0(self) -> np.ndarray:
        """(d,) the model of the result that the experiment names, or zeros."""
        deploy, objective = self.experiment.deploy, self.session.objective
        if deploy is None or deploy.start is None:
            return np.zeros(objective.dim)
        return objective.check_model(Result.load(deploy.start).x)

    def start(self, resume: bool) -> None:
        """From the checkpoint if there is one and it is wanted."""
        if not resume:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        elif self.rounds.resume():
            self.say(f"{self.label}: goes on from round {self.rounds.ledger.round}")

    @in_float64
    def go(self) -> Result:
        """All rounds to the end, the tolerance, or divergence."""
        asked = self.experiment
        x, status = self.rounds.x, "finished"
        while self.rounds.ledger.round < asked.rounds:
            before = self.rounds.ledger
            report = self.rounds.step()
            self._evaluate(report, x)
            self._write(report)
            if self._diverged(report):
                self.rounds.ledger, status = before, "diverged"
                break
            if asked.tol is not None and self.mapping <= asked.tol:
                if report.value is not None:
                    self.rounds.ledger = before  # the model that was looked at
                status = "tolerance"
                break
            x = self.rounds.x
        self.rounds.save()
        return self._result(status)

    def _diverged(self, report: Report) -> bool:
        """Whether the model, or all that was sent, is not finite, or the gradients have grown."""
        if not np.all(np.isfinite(self.rounds.x)):
            return True
        codes = [failure.code for failure in report.failed.values()]
        enough = len(codes) == len(report.invited) >= min(2, len(self.session.names))
        if enough and set(codes) == {NOT_FINITE}:
            return True
        rows = self.rounds.ledger.history
        found = [row["gradient_mapping"] for row in rows if row["gradient_mapping"] is not None]
        if self.rounds.algorithm.recovers or len(found) < 2 or rows[-1]["gradient_mapping"] is None:
            return False
        scale = max(found[0], self.session.objective.constants().L_F)
        return found[-1] > found[-2] and found[-1] > GROWTH * scale

    # --- how far the model is -------------------------------------------------------------------

    def _evaluate(self, report: Report, x: np.ndarray) -> None:
        """The gradient mapping at the model with which the round began, where everybody answered;
        else, every now and then, at the new one in a pass of its own."""
        objective, ledger = self.session.objective, self.rounds.ledger
        value = None
        if report.value is not None and report.grad is not None:
            self.checked = report.round
            value, self.mapping = evaluated(objective, x, report.value, report.grad)
        elif (
            self.experiment.tol is not None
            and self.experiment.deploy is not None
            and report.round - self.checked >= self.experiment.deploy.check_every
        ):
            self.checked = report.round
            try:
                value, self.mapping = evaluate(objective, self.rounds.x)
            except FederationError as error:
                self.say(f"{self.label}: no pass over all rows after round {report.round}: {error}")
        row = self._row(report, value, None if value is None else self.mapping)
        self.rounds.ledger = dataclasses.replace(ledger, history=(*ledger.history, row))

    def _row(self, report: Report, value: float | None, mapping: float | None) -> dict[str, Any]:
        last = self.rounds.ledger.history[-1] if self.rounds.ledger.history else {}
        return {
            "round": report.round + 1,
            "participants": len(report.counted),
            "uploads": last.get("uploads", 0) + len(report.counted),
            "bytes_up": last.get("bytes_up", 0) + report.bytes_up,
            "bytes_down": last.get("bytes_down", 0) + report.bytes_down,
            "gradient_evaluations": last.get("gradient_evaluations", 0) + int(report.rows),
            "objective": value,
            "gradient_mapping": mapping,
        }

    def _write(self, report: Report) -> None:
        """The report as a line of the file, and in words."""
        line = json.dumps({"algorithm": self.label, **report.to_dict()})
        try:
            with (self.out / ROUNDS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FederationError(
                f"{self.out / ROUNDS} cannot be written ({error.strerror}); make room and start "
                "again: it goes on from the last checkpoint"
            ) from error
        words = [f"{len(report.counted)} of {len(report.invited)} clients"]
        mapping = self.rounds.ledger.history[-1]["gradient_mapping"]
        words += [f"gradient mapping {mapping:.1e}"] if mapping is not None else []
        words += [f"{report.seconds:.1f} s"]
        words += [report.note] if report.note else []
        words += [f"{f.reason} ({f.code})" for f in report.failed.values() if not report.note]
        self.say(f"{self.label}, round {report.round}: " + "; ".join(words))

    # --- the result -----------------------------------------------------------------------------

    def _result(self, status: str) -> Result:
        rounds, algorithm = self.rounds, self.rounds.algorithm
        ledger, x, objective = rounds.ledger, rounds.x, self.session.objective
        names = zip(objective.names, ledger.seen, strict=True)
        never = [name for name, seen in names if not seen]
        certificate, why = self._certificate(x, never)
        history = list(ledger.history)
        if certificate is not None and history:
            value, mapping = evaluate(objective, x)
            history[-1] = {**history[-1], "objective": value, "gradient_mapping": mapping}
        return Result(
            x=x,
            algorithm=algorithm.name,
            hyperparameters=hyperparameters(algorithm),
            chosen=chosen(self.given, algorithm),
            exactness=algorithm.exactness(self.setting),
            rounds=ledger.round,
            status=status,
            message=self._message(status) + why,
            history=pa.Table.from_pylist(history, schema=HISTORY),
            certificate=certificate,
            never_present=never,
            server=by_field(ledger.server),
            clients={},
            invariant=float("nan"),
            run={"seed": self.seed, "participation": repr(self.participation)},
        )

    def _certificate(self, x: np.ndarray, never: list[str]) -> tuple[Certificate | None, str]:
        """From a pass over all rows of all members; None, and who is missing, without one."""
        try:
            self.session.objective.prepare(x)
            certificate = certify(self.session.objective, x, absent=never)
        except FederationError as error:
            return None, f"; no certificate, a pass over all rows is incomplete: {error}"
        self.say(f"{self.label}: all {len(self.session.names)} clients answered the last pass")
        return certificate, ""

    def _message(self, status: str) -> str:
        round, algorithm = self.rounds.ledger.round, self.rounds.algorithm
        if status == "diverged":
            return f"diverged in round {round}: {algorithm.remedy()}; the last good state is kept"
        if status == "tolerance":
            return f"gradient mapping {self.mapping:.3g} <= tol after {round} rounds"
        return f"{round} rounds done"
