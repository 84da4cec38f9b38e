"""Who is there, and one exchange of messages with them.

Members are known by their client-id, never by the node that speaks for them: a node that restarts
may come back as another one. Two nodes that claim one client-id are told apart by the identity in
their state folders; the second is refused as long as the first is connected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedexact.deploy.messages import (
    FOREIGN,
    REFUSED,
    Content,
    Failure,
    RefusedError,
    Reply,
    Transport,
)  # fmt: skip

POLL = 0.2  # seconds between two looks for replies
ABSENT, LATE = "absent", "late"  # codes: no node speaks for the client; no reply in time

Say = Callable[[str], None]


class Clock(NamedTuple):
    """Time in seconds, and how to let it pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Exchanged(NamedTuple):
    """What came of one exchange, by client."""

    contents: dict[str, Content]  # accepted
    failures: dict[str, Failure]  # everybody else who was asked
    duplicates: int
    late: int  # replies to the exchange before, dropped unread
    bytes_down: int
    bytes_up: int  # accepted or not
    seconds: float


class Member(NamedTuple):
    """A node that speaks for a client."""

    node: int
    hello: Mapping[str, Any]


class Roster:
    """The members, the nodes that speak for them, and the messages between.

    Args:
        transport: carries the messages.
        names: of the members, in order.
        hello: the question that makes a node tell its client-id.
        say: told of every node that is refused.
    """

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        hello: Content,
        say: Say,
        clock: Clock | None = None,
    ) -> None:
        self.transport, self.say, self.clock = transport, say, clock or Clock()
        self.names = list(names)
        self.members: dict[str, Member] = {}
        self._hello = hello
        self._greeted: set[int] = set()  # nodes that have been asked
        self._asked: dict[str, int] = {}  # hello messages under way, and their nodes
        self._stale: set[str] = set()  # messages of the exchange before

    def missing(self) -> list[str]:
        """Members for whom no node speaks."""
        return [name for name in self.names if name not in self.members]

    def keys(self, names: Sequence[str]) -> dict[str, bytes]:
        """The public keys of members for whom a node speaks."""
        return {name: bytes.fromhex(str(self.members[name].hello["key"])) for name in names}

    def greet(self) -> None:
        """Asks nodes that are new who they are, and takes in the answers that have come."""
        nodes = set(self.transport.nodes())
        self._greeted &= nodes
        new = sorted(nodes - self._greeted)
        if new:
            ids = self.transport.send([(node, self._hello) for node in new])
            self._asked |= dict(zip(ids, new, strict=True))
            self._greeted |= set(new)
        for reply in self.transport.receive(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.id, None)
            if node is not None:
                self._welcome(node, reply.content, nodes)

    def _welcome(self, node: int, content: Content | Failure, nodes: set[int]) -> None:
        if isinstance(content, Failure):
            self._greeted.discard(node)  # asked again as long as it is listed
            return
        name, reason = str(content.meta.get("client", "")), ""
        if content.kind == REFUSED:
            reason = str(content.meta.get("reason"))
        elif name not in self.names:
            reason = f"{name!r} is no member; members: {', '.join(self.names)}"
        elif name in self.members:
            before = self.members[name]
            same = before.hello.get("identity") == content.meta.get("identity")
            if not same and before.node in nodes and before.node != node:
                reason = (
                    f"another node speaks for client {name!r} and is still connected; stop one of "
                    "them, or wait a minute if it is dead"
                )
        if reason:
            self.say(f"node {node} refused: {reason}")
            return
        self.members[name] = Member(node, content.meta)

    def wait(self, seconds: float) -> None:
        """Greets until all members are there, or the time is over."""
        until = self.clock.now() + seconds
        self.greet()
        while self.missing() and self.clock.now() < until:
            self.clock.sleep(POLL)
            self.greet()

    def exchange(
        self,
        requests: Mapping[str, Content],
        deadline: float,
        accept: Callable[[str, Content], None],
    ) -> Exchanged:
        """Sends to each client its request and gathers the replies until all have come or
        `deadline` seconds are over.

        `accept` raises RefusedError for a reply that is not as it should be; it is not counted.
        """
        began = self.clock.now()
        self.greet()
        failures = {
            name: Failure(ABSENT, f"no node speaks for client {name!r}")
            for name in requests
            if name not in self.members
        }
        asked = [name for name in requests if name in self.members]
        ids = self.transport.send([(self.members[name].node, requests[name]) for name in asked])
        waiting = dict(zip(ids, asked, strict=True))
        done, contents, duplicates, late, up = set[str](), dict[str, Content](), 0, 0, 0
        while waiting and self.clock.now() - began < deadline:
            replies = self.transport.receive([*waiting, *done, *self._stale])
            for reply in replies:
                up += reply.content.size if isinstance(reply.content, Content) else 0
                if reply.id in self._stale:
                    late += 1
                elif reply.id in done:
                    duplicates += 1
                else:
                    name = waiting.pop(reply.id)
                    done.add(reply.id)
                    found = _accepted(name, reply, accept)
                    (contents if isinstance(found, Content) else failures)[name] = found  # pyright: ignore[reportArgumentType]
            if not replies:
                self.greet()
                self.clock.sleep(POLL)
        for name in waiting.values():
            failures[name] = Failure(LATE, f"client {name!r}: no reply within {deadline:g} s")
        self._stale = {*waiting, *done}
        down = sum(requests[name].size for name in asked)
        seconds = self.clock.now() - began
        return Exchanged(contents, failures, duplicates, late, down, up, seconds)


def _accepted(name: str, reply: Reply, accept: Callable[[str, Content], None]) -> Content | Failure:
    """The content if it can be counted, else why not."""
    content = reply.content
    if isinstance(content, Failure):
        return Failure(content.code, f"client {name!r}: {content.reason}")
    try:
        if content.meta.get("client") != name:
            raise RefusedError(
                FOREIGN, f"the node of client {name!r} answers as {content.meta.get('client')!r}"
            )
        if content.kind == REFUSED:
            return Failure(str(content.meta.get("code")), str(content.meta.get("reason")))
        accept(name, content)
    except RefusedError as refusal:
        return Failure(refusal.code, f"client {name!r}: {refusal.reason}")
    return content
