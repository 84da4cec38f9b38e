"""The rounds of one algorithm over real sites: the ledger, the checkpoint, the sum.

The server writes down, before the messages of a round go out, its state and for every client the
last round that it counted. It tells each client that round, and the client starts from the state
that belongs to it (see `store`). Whatever is lost on the way, by either side, both agree on what
has been counted. A client whose state is gone cannot be taken back into the sums that it is part
of: the federation restarts from the model that it has reached, which every algorithm may do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.core import Algorithm, in_float64
from fedexact.deploy import sums
from fedexact.deploy.messages import LOST, STALE, Content, Failure, RefusedError
from fedexact.deploy.records import from_meta, to_meta
from fedexact.deploy.remote import FederationError
from fedexact.deploy.roster import Exchanged
from fedexact.deploy.secure import LEAST, Announcement, announce
from fedexact.deploy.session import Session
from fedexact.deploy.store import NEVER, DamagedRecordError, read_record, write_record
from fedexact.engines import loop
from fedexact.errors import InputError
from fedexact.participation import Participation
from fedexact.result import by_field, fields_of, from_fields

CHECKPOINT = "checkpoint.record"
NOTHING = Exchanged({}, {}, 0, 0, 0, 0, 0.0)
ABORTED = "aborted"  # code: an upload that came, in a secure sum that somebody else left


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All that the server has to remember between rounds."""

    run: str  # names the run at the sites
    epoch: int  # restarts so far
    round: int  # the next one
    server: Any
    x0: np.ndarray  # (d,) where the epoch started
    counted: np.ndarray  # (N,) last round of each client that was counted in this epoch, or NEVER
    visits: tuple[str, ...]  # N: that visit, as the client names it
    models: dict[int, np.ndarray]  # those that participants have yet to receive, by round
    seen: np.ndarray  # (N,) bool: counted ever
    history: tuple[dict[str, Any], ...]


class Report(NamedTuple):
    """What happened in a round."""

    round: int
    invited: tuple[str, ...]
    counted: tuple[str, ...]
    failed: Mapping[str, Failure]
    late: int
    duplicates: int
    bytes_up: int
    bytes_down: int
    seconds: float
    note: str  # why nothing was counted, or that the federation restarted
    rows: float = 0.0  # whose gradients were computed
    value: float | None = None  # F at the round's first model, where everybody answered
    grad: np.ndarray | None = None  # its gradient there

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        failed = {n: {"code": f.code, "reason": f.reason} for n, f in self.failed.items()}
        plain = self._asdict() | {"failed": failed}
        return {key: value for key, value in plain.items() if key not in ("grad", "value")}


class Rounds:
    """One algorithm, from its ledger on.

    Args:
        session: the members and what they agreed on.
        given, algorithm: as asked for, and resolved.
        participation: whom each round invites.
        folder: of the checkpoint.
        seed: of participation and mini-batches.
        x0: (d,) where the run starts.
    """

    def __init__(
        self,
        session: Session,
        given: Algorithm,
        algorithm: Algorithm,
        participation: Participation,
        folder: Path,
        seed: int,
        x0: np.ndarray,
    ) -> None:
        self.session, self.given, self.algorithm = session, given, algorithm
        self.participation = participation
        self.folder, self.seed = folder, seed
        self.names = list(session.objective.names)
        self.meta = {"algorithm": to_meta(algorithm), "seed": seed, "n_clients": len(self.names)}
        self._upload = session.upload_like(algorithm)
        self._fields = [f"upload/{name}" for name in fields_of(self._upload)]
        self._expected = _reply_like(self._upload, session.objective.dim)
        self._start = hashlib.sha256(x0.tobytes()).hexdigest()
        self.ledger = self._fresh(secrets.token_hex(8), 0, 0, x0)

    # --- the ledger -----------------------------------------------------------------------------

    @in_float64
    def _fresh(
        self, run: str, epoch: int, round: int, x0: np.ndarray, before: Ledger | None = None
    ) -> Ledger:
        N = len(self.names)
        return Ledger(
            run=run,
            epoch=epoch,
            round=round,
            server=self.algorithm.init_server(jnp.asarray(x0), N),
            x0=x0,
            counted=np.full(N, NEVER),
            visits=("",) * N,
            models={},
            seen=before.seen if before else np.zeros(N, bool),
            history=before.history if before else (),
        )

    @property
    def x(self) -> np.ndarray:
        """(d,) the model now."""
        return np.asarray(self.algorithm.model(self.ledger.server))

    def save(self) -> None:
        """Writes the checkpoint, durably. FederationError where the disk does not take it."""
        ledger = self.ledger
        meta = {
            "about": self._about(),
            "algorithm": self.meta["algorithm"],
            "run": ledger.run,
            "epoch": ledger.epoch,
            "round": ledger.round,
            "visits": ledger.visits,
            "history": ledger.history,
        }
        arrays = {f"server/{name}": array for name, array in by_field(ledger.server).items()}
        arrays |= {f"models/{round}": x for round, x in ledger.models.items()}
        arrays |= {"x0": ledger.x0, "counted": ledger.counted, "seen": ledger.seen}
        try:
            write_record(self.folder / CHECKPOINT, meta, arrays)
        except OSError as error:
            raise FederationError(
                f"the checkpoint in {self.folder} cannot be written ({error.strerror}); make room "
                "and start again: it goes on from the last good one"
            ) from error

    def resume(self) -> bool:
        """Goes on from the checkpoint; False where there is none. Raises InputError where it is
        damaged or of another run."""
        try:
            found = read_record(self.folder / CHECKPOINT)
        except DamagedRecordError as error:
            raise InputError(f"{error}; restore it, or start afresh") from None
        if found is None:
            return False
        meta, arrays = found
        if meta["about"] != self._about():
            raise InputError(
                f"the checkpoint in {self.folder} is of another run: {self._differences(meta)}; "
                "give another output folder, or start afresh"
            )
        self.meta["algorithm"] = meta["algorithm"]  # whose steps depend on constants, bit for bit
        self.algorithm = from_meta(meta["algorithm"])
        fields = {n: a for n, a in arrays.items() if n.startswith("server/")}
        server = from_fields(
            self.ledger.server,
            {name.removeprefix("server/"): array for name, array in fields.items()},
            "server",
        )
        self.ledger = Ledger(
            run=meta["run"],
            epoch=meta["epoch"],
            round=meta["round"],
            server=jax.tree.map(jnp.asarray, server),
            x0=arrays["x0"],
            counted=arrays["counted"],
            visits=tuple(meta["visits"]),
            models={int(n[7:]): a for n, a in arrays.items() if n.startswith("models/")},
            seen=arrays["seen"],
            history=tuple(meta["history"]),
        )
        return True

    def _about(self) -> dict[str, Any]:
        """What must not change from one run to the next that resumes it."""
        about = {
            "algorithm": to_meta(self.given), "seed": self.seed, "start": self._start,
            "participation": repr(self.participation), **self.session.about(),
        }  # fmt: skip
        return json.loads(json.dumps(about))

    def _differences(self, meta: Mapping[str, Any]) -> str:
        now = self._about()
        keys = (key for key in now if now[key] != meta["about"].get(key))
        return ", ".join(keys) + " differ"

    # --- a round --------------------------------------------------------------------------------

    def invited(self) -> list[int]:
        """(n,) clients that the participation draws for the next round."""
        r = self.ledger.round
        cohorts = self.participation.cohorts(len(self.names), r, r + 1, self.seed)
        return cohorts.ids.tolist()

    @in_float64
    def step(self) -> Report:
        """One round. The checkpoint is written first."""
        self.save()
        invited = self.invited()
        if not invited:
            return self._pass([], NOTHING, "nobody was invited")
        done, announced = self._visits(invited)
        gone = [f.reason for f in done.failures.values() if f.code in (LOST, STALE)]
        if gone and self.session.rules.lost == "restart":
            report = self._report(invited, done, (), f"restarted from here: {'; '.join(gone)}")
            self._restart()
            return report
        counted = [k for k in invited if self.names[k] in done.contents]
        quorum = self.session.rules.quorum
        if not counted or len(counted) < quorum:
            note = f"{len(counted)} uploads, the quorum is {quorum}" if counted else "no upload"
            return self._pass(invited, done, note)
        return self._count(invited, counted, done, announced)

    def _count(
        self,
        invited: list[int],
        counted: list[int],
        done: Exchanged,
        announced: Announcement | None,
    ) -> Report:
        """Adds up the uploads of these clients and pushes the sum."""
        ledger = self.ledger
        contents = {self.names[k]: done.contents[self.names[k]] for k in counted}
        if announced is None:
            total = sums.plain(list(contents.values()))
        else:
            try:
                total = sums.secure(contents, announced, self._expected)
            except InputError as error:
                return self._pass(invited, done, str(error))
        upload = jax.tree.unflatten(
            jax.tree.structure(self._upload), [jnp.asarray(total[name]) for name in self._fields]
        )
        report = self._report(invited, done, tuple(contents), "")._replace(
            rows=float(total["rows"])
        )
        if len(counted) == len(self.names):
            N = len(self.names)
            report = report._replace(value=float(total["value"]) / N, grad=total["grad"] / N)
        server = loop.push(self.algorithm, ledger.server, upload, len(counted))
        now, seen = ledger.counted.copy(), ledger.seen.copy()
        now[counted], seen[counted] = ledger.round, True
        visits = list(ledger.visits)
        for k in counted:
            visits[k] = contents[self.names[k]].meta["visit"]
        models = ledger.models
        if self.algorithm.receives:
            models = {**models, ledger.round: np.asarray(self.algorithm.model(server))}
        self._advance(
            dataclasses.replace(
                ledger,
                server=server,
                counted=now,
                visits=tuple(visits),
                seen=seen,
                models={r: x for r, x in models.items() if r in now},
            )
        )
        return report

    def _pass(self, invited: list[int], done: Exchanged, note: str) -> Report:
        """A round in which nothing was counted."""
        report = self._report(invited, done, (), note)
        self._advance(self.ledger)
        return report

    def _advance(self, ledger: Ledger) -> None:
        self.ledger = dataclasses.replace(ledger, round=ledger.round + 1)

    def _restart(self) -> None:
        """A new epoch from the model reached: no client has a state, none has been counted."""
        ledger = self.ledger
        self.ledger = self._fresh(ledger.run, ledger.epoch + 1, ledger.round + 1, self.x, ledger)

    # --- messages -------------------------------------------------------------------------------

    def _visits(self, invited: list[int]) -> tuple[Exchanged, Announcement | None]:
        """The uploads of a round. A secure sum that somebody leaves is repeated with the others."""
        remaining, failures, up, down, seconds = list(invited), {}, 0, 0, 0.0
        pulled = self._pulled()
        while True:
            announced = self._announced(remaining, failures)
            if announced is None and self.session.rules.secure:
                return Exchanged({}, failures, 0, 0, down, up, seconds), None
            if announced is not None:
                remaining = [k for k in remaining if self.names[k] in announced.members]
            requests = {self.names[k]: self._request(k, pulled, announced) for k in remaining}
            done = self.session.roster.exchange(
                requests, self.session.rules.deadline, lambda name, content: self._accept(content)
            )
            failures = {**failures, **done.failures}
            up, down, seconds = up + done.bytes_up, down + done.bytes_down, seconds + done.seconds
            done = done._replace(failures=failures, bytes_up=up, bytes_down=down, seconds=seconds)
            if announced is None or len(done.contents) == len(remaining):
                return done, announced
            gone = any(f.code in (LOST, STALE) for f in failures.values())
            if gone and self.session.rules.lost == "restart":
                return done._replace(contents={}), None
            remaining = [k for k in remaining if self.names[k] in done.contents]

    def _announced(self, remaining: list[int], failures: dict[str, Failure]) -> Announcement | None:
        """Who is in a secure sum; None for a plain one, or where too few are left for one."""
        if not self.session.rules.secure:
            return None
        members = self.session.roster.members
        there = [self.names[k] for k in remaining if self.names[k] in members]
        for k in remaining:
            if self.names[k] not in members:
                failures[self.names[k]] = Failure("absent", f"no node for {self.names[k]!r}")
        if len(there) < max(LEAST, self.session.rules.quorum):
            for name in there:
                failures[name] = Failure(ABORTED, f"too few are left for a secure sum: {there}")
            return None
        keys = self.session.roster.keys(there)
        return announce(keys, self.ledger.run, self.ledger.epoch, self.ledger.round)

    def _request(
        self, k: int, pulled: Mapping[str, np.ndarray], announced: Announcement | None
    ) -> Content:
        ledger, counted = self.ledger, int(self.ledger.counted[k])
        meta = {
            **self.meta, "objective": self.session.agreed(k), "run": ledger.run, "k": k,
            "epoch": ledger.epoch, "round": ledger.round, "counted": counted,
            "visit": ledger.visits[k],
            "secure": None if announced is None else announced.to_meta(),
        }  # fmt: skip
        arrays = {**pulled, "x": self.x}
        if counted == NEVER:
            arrays["x0"] = ledger.x0
        elif self.algorithm.receives:
            arrays["received"] = ledger.models[counted]
        return Content("train", meta, arrays)

    def _pulled(self) -> dict[str, np.ndarray]:
        pulled = loop.pull(self.algorithm, self.ledger.server, self.ledger.round)
        return {f"pulled/{name}": array for name, array in by_field(pulled).items()}

    def _accept(self, content: Content) -> None:
        """Raises RefusedError for a reply that cannot be counted."""
        stamp = content.meta.get("epoch"), content.meta.get("round")
        if stamp != (self.ledger.epoch, self.ledger.round):
            raise RefusedError(
                "round",
                f"the reply is of round {stamp[1]} (epoch {stamp[0]}), this is "
                f"{self.ledger.round} ({self.ledger.epoch})",
            )
        if not isinstance(content.meta.get("visit"), str):
            raise RefusedError(sums.MALFORMED, "the reply does not name its visit")
        (sums.check_masked if self.session.rules.secure else sums.check)(content, self._expected)

    def _report(
        self, invited: list[int], done: Exchanged, counted: tuple[str, ...], note: str
    ) -> Report:
        return Report(
            self.ledger.round, tuple(self.names[k] for k in invited), counted, done.failures,
            done.late, done.duplicates, done.bytes_up, done.bytes_down, done.seconds, note,
        )  # fmt: skip


def _reply_like(upload: Any, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a reply, by name."""
    number = jax.ShapeDtypeStruct((), np.dtype(float))
    return {
        **{f"upload/{name}": like for name, like in fields_of(upload).items()},
        "value": number,
        "grad": jax.ShapeDtypeStruct((dim,), np.dtype(float)),
        "rows": number,
    }
