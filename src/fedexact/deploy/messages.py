"""What travels between the server and the sites, whatever carries it.

A request has one of the `KINDS`; the reply has the same kind, or the kind "refused" with a code and
a reason. The carrier may lose requests and replies, deliver them twice, late or never.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

KINDS = ("hello", "moments", "constants", "train", "query")
REFUSED = "refused"

# Codes of a refusal, beyond those of the carrier.
LOST = "lost"  # the site's store is missing, damaged or of another round
STALE = "stale"  # the request is older than what the site has done
FULL = "disk"  # the site could not write its state
BAD_REQUEST = "request"
BAD_DATA = "data"
FOREIGN = "client-id"


class Content(NamedTuple):
    """One message."""

    kind: str
    meta: Mapping[str, Any]  # fit for JSON
    arrays: Mapping[str, np.ndarray] = {}

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Failure(NamedTuple):
    """There is no content: the carrier says why."""

    code: str
    reason: str


class Reply(NamedTuple):
    """What came back for the request `id`, from a node."""

    id: str
    node: int
    content: Content | Failure


class Transport(Protocol):
    """Carries messages to nodes and back.

    Attributes:
        limit: bytes of a reply; a larger one is not read, but a failure.
    """

    limit: int

    def nodes(self) -> list[int]:
        """Those that are connected, as far as is known."""
        ...

    def send(self, batch: Sequence[tuple[int, Content]]) -> list[str]:
        """Sends without waiting; one id for each message."""
        ...

    def receive(self, ids: Collection[str]) -> list[Reply]:
        """The replies to these messages that have come in since the last call; does not wait."""
        ...


class RefusedError(Exception):
    """A site or the server does not accept a message."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason

    def content(self) -> Content:
        """As a reply."""
        return Content(REFUSED, {"code": self.code, "reason": self.reason})
