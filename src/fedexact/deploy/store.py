"""What a site keeps on its disk, and the server too: records that are whole or refused.

A site holds two versions of an algorithm's state: the `committed` one, which the server has
counted, and the `pending` one, made by the last visit, which the server may or may not have
counted. The next request says which; only then is the pending version promoted or dropped. So a
lost reply, a crash or a message that comes twice never lets the two sides drift apart.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedexact.deploy.messages import FOREIGN, LOST, STALE, RefusedError
from fedexact.files import write_atomic

try:
    import fcntl
except ImportError:  # Windows: two processes with one state folder are not noticed there
    fcntl = None

MAGIC, FORMAT = "fedexact-record", 1
NEVER = -1  # the round of a state that no visit has made

Arrays = dict[str, np.ndarray]


class DamagedRecordError(Exception):
    """A file that is not, or no longer, what was written."""


def write_record(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a record durably and in one step: complete on the disk, or not at all. OSError."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{"meta": np.array(json.dumps(meta)), **arrays})
    payload = buffer.getvalue()
    head = f"{MAGIC} {FORMAT} {hashlib.sha256(payload).hexdigest()}\n"
    write_atomic(path, head.encode() + payload)


def read_record(path: Path) -> tuple[dict[str, Any], Arrays] | None:
    """Meta and arrays of a record; None if there is no file. DamagedRecordError."""
    try:
        head, _, payload = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    words = head.decode("ascii", "replace").split()
    if len(words) != 3 or words[0] != MAGIC:
        raise DamagedRecordError(f"{path} is not a record of fedexact")
    if words[1] != str(FORMAT):
        raise DamagedRecordError(f"{path} has format {words[1]}, this version reads {FORMAT}")
    if hashlib.sha256(payload).hexdigest() != words[2]:
        raise DamagedRecordError(f"{path} is damaged: its checksum does not fit")
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return json.loads(str(arrays.pop("meta"))), arrays
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedRecordError(f"{path} cannot be read: {error}") from None


class Counted(NamedTuple):
    """The last visit of a client that the server has counted in this epoch."""

    round: int  # NEVER if there is none
    visit: str = ""  # see Version


class Version(NamedTuple):
    """A state, and the visit that made it.

    `visit` tells visits of one round apart that were not asked for in the same words: two servers
    that go on from one checkpoint number their rounds alike.
    """

    epoch: int  # how often the federation has restarted
    round: int  # NEVER for the initial state
    arrays: Arrays
    visit: str = ""

    @property
    def stamp(self) -> tuple[int, int]:
        """In the order in which versions are made."""
        return self.epoch, self.round


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Keeps other processes out of the folder, which is made if it does not exist.
    BlockingIOError where another is in it and this one does not want to wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


class Store:
    """The two versions of one client's state in one run.

    Args:
        folder: made if it does not exist.
        client: whose store it is; another client's is refused.
    """

    def __init__(self, folder: Path, client: str) -> None:
        self.folder, self.client = folder, client

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the folder."""
        with locked(self.folder):
            yield

    def open(
        self, epoch: int, round: int, counted: Counted, initial: Callable[[], Arrays]
    ) -> Version:
        """The state in which round `round` starts.

        Raises RefusedError: STALE where a later round has been done, LOST where the state that the
        server counted is not here, FOREIGN where the folder is another client's.
        """
        committed, why = self._read("committed")
        pending, why_pending = self._read("pending")
        newest = max((v.stamp for v in (committed, pending) if v), default=(0, NEVER))
        if newest > (epoch, round) or (committed and committed.stamp >= (epoch, round)):
            raise RefusedError(
                STALE, f"client {self.client!r} has done round {newest[1]} already, not {round}"
            )
        wanted = (epoch, *counted)
        if counted.round == NEVER:
            if committed and committed.epoch == epoch:
                raise RefusedError(LOST, self._differs(f"round {committed.round}", "none"))
            return Version(epoch, NEVER, initial())
        if pending and (*pending.stamp, pending.visit) == wanted:
            os.replace(self._path("pending"), self._path("committed"))
            return pending
        if committed and (*committed.stamp, committed.visit) == wanted:
            return committed
        rounds = " and ".join(f"round {v.round}" for v in (committed, pending) if v)
        here = why or why_pending or rounds or "nothing"
        raise RefusedError(LOST, self._differs(here, f"round {counted.round}"))

    def put(self, version: Version) -> None:
        """Keeps a new pending version, durably. OSError where the disk does not take it."""
        meta = {
            "client": self.client, "epoch": version.epoch, "round": version.round,
            "visit": version.visit,
        }  # fmt: skip
        write_record(self._path("pending"), meta, version.arrays)

    def _read(self, which: str) -> tuple[Version | None, str]:
        """A version, or why there is none."""
        try:
            found = read_record(self._path(which))
        except DamagedRecordError as error:
            return None, str(error)
        if found is None:
            return None, ""
        meta, arrays = found
        if meta["client"] != self.client:
            raise RefusedError(
                FOREIGN,
                f"the state folder of client {self.client!r} is that of {meta['client']!r}: give "
                "each client its own",
            )
        return Version(meta["epoch"], meta["round"], arrays, meta["visit"]), ""

    def _path(self, which: str) -> Path:
        return self.folder / f"{which}.state"

    def _differs(self, here: str, there: str) -> str:
        return (
            f"client {self.client!r} holds {here} and the server has counted {there}: the state "
            "folder was lost or exchanged, or the server's checkpoint is another one"
        )
