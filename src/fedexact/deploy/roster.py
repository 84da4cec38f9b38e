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
from fedexact.deploy.sums import MALFORMED
from fedexact.errors import InputError

POLL = 0.2  # seconds between two looks for replies
AGAIN = 60.0  # seconds after which a node that has not said hello is asked again
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

    Attributes:
        members: the node that speaks for a client, by client.
        refusals: why a connected node was refused, by node.
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
        self.refusals: dict[int, str] = {}
        self._greeted: set[int] = set()  # nodes that have been asked
        self._asked: dict[str, tuple[int, float]] = {}  # hellos under way: their nodes and times
        self._rivals: dict[int, Content] = {}  # hellos of nodes that claim a client already there
        self._stale: set[str] = set()  # messages of the exchange before

    def missing(self) -> list[str]:
        """Members for whom no node speaks."""
        return [name for name in self.names if name not in self.members]

    def keys(self, names: Sequence[str]) -> dict[str, bytes]:
        """The public keys of members for whom a node speaks."""
        try:
            return {n: bytes.fromhex(str(self.members[n].hello.get("key"))) for n in names}
        except ValueError:
            raise InputError(f"a public key of {', '.join(names)} cannot be read") from None

    def greet(self) -> None:
        """Asks nodes that are new who they are, and takes in the answers that have come."""
        nodes, now = set(self.transport.nodes()), self.clock.now()
        latest = dict(self._asked.values())
        silent = {node for node, asked in latest.items() if now - asked >= AGAIN}
        self._asked = {id: asked for id, asked in self._asked.items() if asked[0] in nodes}
        self._greeted = (self._greeted & nodes) - silent
        self.refusals = {node: why for node, why in self.refusals.items() if node in nodes}
        self._rivals = {node: hello for node, hello in self._rivals.items() if node in nodes}
        new = sorted(nodes - self._greeted)
        if new:
            ids = self.transport.send([(node, self._hello) for node in new])
            self._asked |= {id: (node, now) for id, node in zip(ids, new, strict=True)}
            self._greeted |= set(new)
        for reply in self.transport.receive(list(self._asked)) if self._asked else ():
            node, _ = self._asked.pop(reply.id, (None, now))
            if node is not None:
                self._welcome(node, reply.content, nodes)
        for node, hello in list(self._rivals.items()):
            if self._speaker(hello) not in nodes:
                self._welcome(node, hello, nodes)

    def _speaker(self, hello: Content) -> int:
        return self.members[str(hello.meta["client"])].node

    def _welcome(self, node: int, content: Content | Failure, nodes: set[int]) -> None:
        if isinstance(content, Failure):
            self._greeted.discard(node)  # asked again as long as it is listed
            return
        self._asked = {id: asked for id, asked in self._asked.items() if asked[0] != node}
        self._rivals.pop(node, None)
        reason = self._why_not(node, content, nodes)
        if reason:
            self.refusals[node] = reason
            self.say(f"node {node} refused: {reason}")
            return
        self.refusals.pop(node, None)
        self.members[str(content.meta["client"])] = Member(node, content.meta)

    def _why_not(self, node: int, content: Content, nodes: set[int]) -> str:
        """Why the node that says this is refused; empty if it is not."""
        name = str(content.meta.get("client", ""))
        if content.kind == REFUSED:
            return str(content.meta.get("reason"))
        if name not in self.names:
            return f"{name!r} is no member; members: {', '.join(self.names)}"
        before = self.members.get(name)
        if before is None or before.node == node or before.node not in nodes:
            return ""
        if before.hello.get("identity") == content.meta.get("identity"):
            return ""  # the same site, started again
        self._rivals[node] = content
        return (
            f"another node speaks for client {name!r} and is still connected; stop one of them, or "
            "wait a minute if it is dead"
        )

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
                    found = _accepted(name, requests[name].kind, reply, accept)
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


def _accepted(
    name: str, kind: str, reply: Reply, accept: Callable[[str, Content], None]
) -> Content | Failure:
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
        if content.kind != kind:
            raise RefusedError(MALFORMED, f"answers {content.kind!r}, the question was {kind!r}")
        accept(name, content)
    except RefusedError as refusal:
        return Failure(refusal.code, f"client {name!r}: {refusal.reason}")
    return content
