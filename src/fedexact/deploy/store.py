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

from fedexact.deploy.messages import LOST, STALE, RefusedError
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
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedRecordError(f"{path} cannot be read: {error}") from None


class Version(NamedTuple):
    """A state, and the visit that made it."""

    epoch: int  # how often the federation has restarted
    round: int  # NEVER for the initial state
    arrays: Arrays

    @property
    def stamp(self) -> tuple[int, int]:
        """In the order in which versions are made."""
        return self.epoch, self.round


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
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def open(self, epoch: int, round: int, counted: int, initial: Callable[[], Arrays]) -> Version:
        """The state in which round `round` starts; `counted` is the last round of this client that
        the server has counted, NEVER if there is none.

        Raises RefusedError: STALE where a later round has been done, LOST where the state that the
        server counted is not here.
        """
        committed, why = self._read("committed")
        pending, why_pending = self._read("pending")
        newest = max((v.stamp for v in (committed, pending) if v), default=(0, NEVER))
        if newest > (epoch, round) or (committed and committed.stamp >= (epoch, round)):
            raise RefusedError(
                STALE, f"client {self.client!r} has done round {newest[1]} already, not {round}"
            )
        wanted = (epoch, counted)
        if counted == NEVER:
            if committed and committed.epoch == epoch:
                raise RefusedError(LOST, self._differs(f"round {committed.round}", "none"))
            return Version(epoch, NEVER, initial())
        if pending and pending.stamp == wanted:
            os.replace(self._path("pending"), self._path("committed"))
            return pending
        if committed and committed.stamp == wanted:
            return committed
        here = f"round {committed.round}" if committed else why or why_pending or "nothing"
        raise RefusedError(LOST, self._differs(here, f"round {counted}"))

    def put(self, version: Version) -> None:
        """Keeps a new pending version, durably. OSError where the disk does not take it."""
        meta = {"client": self.client, "epoch": version.epoch, "round": version.round}
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
                LOST, f"the state folder of client {self.client!r} is that of {meta['client']!r}"
            )
        return Version(meta["epoch"], meta["round"], arrays), ""

    def _path(self, which: str) -> Path:
        return self.folder / f"{which}.state"

    def _differs(self, here: str, there: str) -> str:
        return (
            f"client {self.client!r} holds {here} and the server has counted {there}: the state "
            "folder was lost or exchanged, or the server's checkpoint is an older one"
        )
