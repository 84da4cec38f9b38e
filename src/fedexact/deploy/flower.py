"""Messages over Flower: `Content` as a Flower record, and the transport on a Flower grid.

A record holds one ConfigRecord (kind, and the meta data as JSON) and one ArrayRecord (raw bytes in
C order, little-endian, so that arrays arrive bit for bit). What comes in is checked against its
declared size before an array is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedexact.deploy.messages import Content, Failure, RefusedError, Reply

HEAD, ARRAYS = "fedexact", "arrays"  # the records of a message
RAW = "fedexact.raw"  # how the bytes of an array are written
LIMIT = 2**30  # bytes of a message, unless told otherwise
MOST_DIMENSIONS = 32
TRAIN, QUERY = "train", "query"  # Flower's types of messages

DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in ("float64", "int64", "uint64", "uint32")
}

MALFORMED, TOO_LARGE, UNSENT = "malformed", "too large", "unsent"

_ERRORS = {
    0: "the node failed",
    1: "the node could not load the app (fedexact[flower] of the same version installed there?)",
    2: "the app at the node raised an error",
    3: "the message has expired, or is gone",
    4: "the reply has expired, or is gone",
    5: "the node is not connected",
    6: "the node refused the message",
    7: "the node could not unpack the app",
    8: "the app at the node crashed (killed, or out of memory)",
}


# --- records --------------------------------------------------------------------------------------


def to_record(content: Content) -> RecordDict:
    """The message as a Flower record.

    Raises TypeError for meta data that is not fit for JSON or an array of another type than DTYPES.
    """
    head = ConfigRecord({"kind": content.kind, "meta": json.dumps(dict(content.meta))})
    arrays = {name: _packed(name, array) for name, array in content.arrays.items()}
    return RecordDict({HEAD: head, ARRAYS: ArrayRecord(arrays)})


def from_record(record: RecordDict, limit: int | None = None) -> Content:
    """The message in a Flower record, of `limit` bytes at most.

    Raises RefusedError ("malformed" or "too large") naming what is wrong, before an array is built.
    """
    head, arrays = record.get(HEAD), record.get(ARRAYS)
    if not isinstance(head, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise RefusedError(MALFORMED, f"the records {HEAD!r} and {ARRAYS!r} are not both there")
    kind, meta = head.get("kind"), head.get("meta")
    if not isinstance(kind, str) or not isinstance(meta, str):
        raise RefusedError(MALFORMED, "kind and meta are not both text")
    size = len(meta) + sum(_declared(name, array) for name, array in arrays.items())
    if limit is not None and size > limit:
        raise RefusedError(
            TOO_LARGE, f"{kind!r}, {_largest(arrays)}: {size} bytes, expected {limit} at most"
        )
    for name, array in arrays.items():
        if len(array.data) != _declared(name, array):
            raise RefusedError(
                MALFORMED,
                f"array {name!r}: {len(array.data)} bytes for {array.dtype}{list(array.shape)}",
            )
    return Content(kind, _meta(meta), {n: _unpacked(n, array) for n, array in arrays.items()})


def _packed(name: str, array: np.ndarray) -> Array:
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise TypeError(f"array {name!r} is of type {array.dtype}; allowed: {', '.join(DTYPES)}")
    data = array.astype(dtype, copy=False).tobytes()
    return Array(dtype=array.dtype.name, shape=array.shape, stype=RAW, data=data)


def _declared(name: str, array: Array) -> int:
    """Bytes of the array by its type and shape."""
    if array.stype != RAW or array.dtype not in DTYPES:
        raise RefusedError(
            MALFORMED, f"array {name!r}: type {array.dtype!r}, written as {array.stype!r}"
        )
    if len(array.shape) > MOST_DIMENSIONS or any(
        type(length) is not int or length < 0 for length in array.shape
    ):
        raise RefusedError(MALFORMED, f"array {name!r}: shape {array.shape!r}")
    return math.prod(array.shape) * DTYPES[array.dtype].itemsize


def _largest(arrays: ArrayRecord) -> str:
    if not arrays:
        return "meta data"
    name, array = max(arrays.items(), key=lambda item: _declared(*item))
    return f"most of it the array {name!r}, {array.dtype}{list(array.shape)}"


def _unpacked(name: str, array: Array) -> np.ndarray:
    """A writable array in the machine's byte order."""
    try:
        view = np.ndarray(array.shape, DTYPES[array.dtype], buffer=array.data or None)
        return view.astype(np.dtype(array.dtype))
    except ValueError as error:  # no elements, but of an absurd shape
        raise RefusedError(MALFORMED, f"array {name!r}: shape {array.shape!r}: {error}") from None


def _meta(text: str) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(MALFORMED, f"the meta data is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise RefusedError(
            MALFORMED, f"the meta data is a JSON {type(meta).__name__}, not an object"
        )
    return meta


# --- transport ------------------------------------------------------------------------------------


class FlowerTransport:
    """The `Transport` of a ServerApp.

    A reply larger than `limit` bytes (it may be set at any time) or one that cannot be read becomes
    a Failure. Messages expire after `ttl` seconds; None: after Flower's default, twelve hours.
    """

    def __init__(self, grid: Grid, limit: int = LIMIT, ttl: float | None = None) -> None:
        self.grid, self.limit, self.ttl = grid, limit, ttl
        self._open: dict[str, int] = {}  # message id -> node, while there is no reply
        self._nodes: dict[str, int] = {}  # message id -> node, of all messages
        self._unsent: dict[str, Reply] = {}

    def nodes(self) -> list[int]:
        """The nodes that the SuperLink counts as online; a dead one up to a minute longer."""
        return sorted(self.grid.get_node_ids())

    def send(self, batch: Sequence[tuple[int, Content]]) -> list[str]:
        """Sends without waiting; one id for each message."""
        messages = [self._message(node, content) for node, content in batch]
        taken = list(self.grid.push_messages(messages)) if messages else []
        taken += [""] * (len(batch) - len(taken))  # Flower gives none back for a batch too large
        return [self._note(id, node) for id, (node, _) in zip(taken, batch, strict=True)]

    def receive(self, ids: Collection[str]) -> list[Reply]:
        """The replies to these messages that have come in since the last call; does not wait."""
        replies = [self._unsent.pop(id) for id in ids if id in self._unsent]
        for id in [id for id in ids if id in self._open]:
            replies += self._pull(id)
        return replies

    def _message(self, node: int, content: Content) -> Message:
        return Message(
            to_record(content),
            node,
            TRAIN if content.kind == TRAIN else QUERY,
            ttl=self.ttl,
            group_id=str(content.meta.get("round", "")),
        )

    def _note(self, id: str | None, node: int) -> str:
        if id:
            self._open[id] = self._nodes[id] = node
            return id
        id = f"unsent-{len(self._nodes)}"
        self._nodes[id] = node
        failure = Failure(UNSENT, "the SuperLink did not take the message: node gone, or too large")
        self._unsent[id] = Reply(id, node, failure)
        return id

    def _pull(self, id: str) -> list[Reply]:
        """One message at a time: one that Flower cannot read does not take others with it."""
        try:
            messages: Iterable[Message] = self.grid.pull_messages([id])
        except (httpx.HTTPError, OSError):
            raise  # the SuperLink, not the node
        except Exception as error:  # Flower raises anything for a damaged message
            node = self._open.pop(id)
            return [Reply(id, node, Failure(MALFORMED, f"Flower cannot read it: {error!r}"))]
        replies = []
        for message in messages:
            # Errors come from the SuperLink's own node: the message answered says whose they are.
            answered = message.metadata.reply_to_message_id
            self._open.pop(answered, None)
            node = self._nodes.get(answered, message.metadata.src_node_id or 0)
            replies.append(Reply(answered, node, self._content(message)))
        return replies

    def _content(self, message: Message) -> Content | Failure:
        if message.has_error():
            words = _ERRORS.get(message.error.code, "an error that Flower does not explain")
            detail = (message.error.reason or "").strip()
            return Failure(str(message.error.code), f"{words}: {detail}" if detail else words)
        try:
            return from_record(message.content, self.limit)
        except RefusedError as refusal:
            return Failure(refusal.code, refusal.reason)
