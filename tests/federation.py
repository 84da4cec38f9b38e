"""A federation in one process: sites behind a carrier that loses, doubles and delays messages,
sites and a server that die at the worst moment, disks that fill."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import fedexact as fx
from fedexact import config
from fedexact.core import float64
from fedexact.deploy import store
from fedexact.deploy.coordinator import run_federation
from fedexact.deploy.messages import Content, Failure, Reply
from fedexact.deploy.roster import Clock
from fedexact.deploy.rounds import Report, Rounds
from fedexact.deploy.site import Site, SiteConfig
from fedexact.deploy.store import NEVER, DamagedRecordError, Version, read_record
from fedexact.engines import loop
from fedexact.result import by_field, from_fields

CRASHED = Failure("8", "the process of the app crashed")


class ServerKilledError(Exception):
    """The server's process ends here."""


class SiteCrashError(BaseException):
    """A site's process ends here; nothing in it catches this."""


@dataclasses.dataclass
class Faults:
    """How often what goes wrong, as probabilities; and once in rounds that are named."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    crash_before: float = 0.0  # of the durable write
    crash_after: float = 0.0
    duplicate: float = 0.0
    stale: float = 0.0  # an old request arrives again
    full_disk: float = 0.0
    killed_before_send: frozenset[int] = frozenset()  # numbers of train exchanges
    killed_after_replies: frozenset[int] = frozenset()
    torn: Mapping[int, str] = dataclasses.field(default_factory=dict)  # exchange -> client


NONE = Faults()
EVERYTHING = Faults(0.15, 0.20, 0.05, 0.05, 0.05, 0.05, 0.02)


class Carrier:
    """A transport in one process. A site that crashes is a new object afterwards; what it remembers
    lies on its disk."""

    def __init__(self, configs: Sequence[SiteConfig], faults: Faults = NONE, seed: int = 0) -> None:
        self.configs, self.faults = list(configs), faults
        self.sites = [Site(each) for each in configs]
        self.rng = np.random.default_rng(seed)
        self.exchanges, self.sent, self.limit = 0, 0, 2**30
        self.replies: list[Reply] = []
        self.old: dict[int, list[Content]] = {}
        self.alter: Callable[[str, Content], Content] = lambda name, content: content
        self.listed = set(range(len(self.sites)))
        self.requests: list[tuple[str, Content]] = []

    def nodes(self) -> list[int]:
        return sorted(self.listed)

    def send(self, batch: Sequence[tuple[int, Content]]) -> list[str]:
        train = bool(batch) and batch[0][1].kind == "train"
        if train:
            self.exchanges += 1
            if self.exchanges in self.faults.killed_before_send:
                raise ServerKilledError
            self.tear()
        ids = []
        for node, content in batch:
            self.sent += 1
            ids.append(str(self.sent))
            self.requests.append((self.configs[node].client, content))
            self.deliver(ids[-1], node, content, self.faults if train else NONE)
        if train and self.exchanges in self.faults.killed_after_replies:
            raise ServerKilledError
        return ids

    def receive(self, ids: Collection[str]) -> list[Reply]:
        wanted = set(ids)
        found = [reply for reply in self.replies if reply.id in wanted]
        self.replies = [reply for reply in self.replies if reply.id not in wanted]
        return found

    def deliver(self, id: str, node: int, content: Content, faults: Faults) -> None:
        chance = self.rng.random
        if chance() < faults.lost_request:
            return
        old = self.old.setdefault(node, [])
        if old and chance() < faults.stale:
            self.visit(node, old[int(self.rng.integers(len(old)))], faults)
        answers = [self.visit(node, content, faults)]
        if faults is not NONE:
            old.append(content)
            if chance() < faults.duplicate:
                answers.append(self.visit(node, content, faults))
        for answer in answers:
            if chance() >= faults.lost_reply:
                self.replies.append(Reply(id, node, answer))

    def visit(self, node: int, content: Content, faults: Faults) -> Content | Failure:
        """One message at a site, whose process may crash or whose disk may be full."""
        site, put = self.sites[node], store.Store.put
        before, after, full = (
            self.rng.random() < p
            for p in (faults.crash_before, faults.crash_after, faults.full_disk)
        )

        def failing(self: store.Store, version: Version) -> None:
            if before:
                raise SiteCrashError
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(self, version)
            if after:
                raise SiteCrashError

        try:
            store.Store.put = failing
            return self.alter(site.name, site.answer(content))
        except SiteCrashError:
            self.sites[node] = Site(self.configs[node])
            return CRASHED
        finally:
            store.Store.put = put

    def tear(self) -> None:
        """Cuts a site's state files in half."""
        name = self.faults.torn.get(self.exchanges)
        for each in self.configs:
            if each.client == name:
                for path in each.state.rglob("*.state"):
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@dataclasses.dataclass
class Federation:
    """Clients with rows in files, and how to run an experiment on them."""

    folder: Path
    names: list[str]
    rows: list[tuple[np.ndarray, np.ndarray]]
    loss: str

    @staticmethod
    def of(
        problem_rows: Sequence[tuple[Any, Any]],
        loss: str,
        folder: Path,
        names: Sequence[str] | None = None,
    ) -> Federation:
        made = Federation(folder, list(names or ()), list(problem_rows), loss)
        made.names = made.names or [f"site {k}" for k in range(len(problem_rows))]
        folder.mkdir(parents=True, exist_ok=True)
        for k, (X, y) in enumerate(problem_rows):
            columns = {f"x{j}": X[:, j] for j in range(X.shape[1])} | {"y": np.asarray(y, float)}
            pq.write_table(pa.table(columns), made.file(k))
        return made

    def file(self, k: int) -> Path:
        """The rows of client k."""
        return self.folder / f"site {k}.parquet"

    def configs(self) -> list[SiteConfig]:
        return [
            SiteConfig.from_mapping(
                {
                    "client-id": name,
                    "data": str(self.file(k)),
                    "state-dir": str(self.folder / "states" / f"site {k}"),
                }
            )
            for k, name in enumerate(self.names)
        ]

    def experiment(self, algorithm: Mapping[str, Any], rounds: int, **deploy: Any) -> Any:
        return config.parse(
            {
                "rounds": rounds,
                "data": {"sites": "rows", "target": "y"},
                "problem": {"loss": self.loss, "fit_intercept": True},
                "algorithms": [dict(algorithm)],
                "deploy": {"clients": self.names, "deadline": 5.0, "wait": 60.0, **deploy},
            }
        )

    def problem(self) -> fx.Problem:
        """The pooled problem, all rows in one place."""
        return fx.Problem(self.rows, loss=self.loss, fit_intercept=True, names=self.names)

    def run(
        self, experiment: Any, carrier: Carrier, said: list[str] | None = None, **settings: Any
    ) -> fx.Result:
        """The result, the server started again whenever it is killed."""
        said = [] if said is None else said
        resume, clock = settings.pop("resume", False), settings.pop("clock", None)
        while True:
            try:
                outcome = run_federation(
                    carrier, experiment, self.folder / "out", said.append, resume=resume,
                    clock=clock or passing(),
                )  # fmt: skip
                return outcome.runs[0].result
            except ServerKilledError:
                carrier.replies.clear()
                resume = True


def passing() -> Clock:
    """A clock that goes on only where somebody sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return Clock(lambda: now[0], sleep)


def states(rounds: Rounds, configs: Sequence[SiteConfig]) -> Any:
    """The clients' states that the server has counted, stacked in client order."""
    algorithm, ledger = rounds.algorithm, rounds.ledger
    like = algorithm.init_client(jnp.asarray(ledger.x0))
    found = []
    for each, counted in zip(configs, ledger.counted.tolist(), strict=True):
        client = like
        if counted != NEVER and jax.tree.leaves(like):
            client = _version(each, ledger.run, like, (ledger.epoch, counted))
            if algorithm.receives:
                client = loop.receive(algorithm, client, jnp.asarray(ledger.models[counted]))
        found.append(client)
    return jax.tree.map(lambda *a: np.stack([np.asarray(v) for v in a]), *found)


def _version(site: SiteConfig, run: str, like: Any, stamp: tuple[int, int]) -> Any:
    for which in ("pending", "committed"):
        found = read_record(site.state / run / f"{which}.state")
        if found and (found[0]["epoch"], found[0]["round"]) == stamp:
            return from_fields(like, found[1], "client")
    raise AssertionError(f"{site.client} has no version {stamp}")


class Watched:
    """Checks the invariant after every round that comes to its end."""

    def __init__(self, monkeypatch: Any, configs: Sequence[SiteConfig]) -> None:
        self.worst, self.reports = 0.0, list[Report]()
        step = Rounds.step

        def watched(rounds: Rounds) -> Report:
            report = step(rounds)
            self.reports.append(report)
            try:
                held = states(rounds, configs)
            except DamagedRecordError:
                return report  # torn, and nobody has asked the site since
            with float64():
                broken = rounds.algorithm.invariant(rounds.ledger.server, held)
            sizes = [np.abs(a).max(initial=1.0) for a in by_field(rounds.ledger.server).values()]
            self.worst = max(self.worst, float(np.max(np.abs(broken))) / max(sizes))
            return report

        monkeypatch.setattr(Rounds, "step", watched)
