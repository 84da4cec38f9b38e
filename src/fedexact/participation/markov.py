"""Clients that stay away, and stay, for a while."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedexact.errors import InputError
from fedexact.participation.base import (
    Participation,
    PerClient,
    probabilities,
    round_blocks,
    spread,
    uniforms,
)
from fedexact.participation.expectations import independent_aggregation


@dataclass(frozen=True)
class Markov(Participation):
    """Each client on its own: absent, it returns with probability `on`; present, it leaves with
    probability `off`. Round 0 is drawn from the stationary law on / (on + off)."""

    on: PerClient
    off: PerClient

    name: ClassVar[str] = "markov"
    summary: ClassVar[str] = (
        "each client an on/off chain: joins with probability on, leaves with off"
    )
    per_client: ClassVar[tuple[str, ...]] = ("on", "off")

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", probabilities("on", self.on))
        object.__setattr__(self, "off", probabilities("off", self.off))
        on, off = np.atleast_1d(self.on), np.atleast_1d(self.off)
        if len(on) > 1 and len(off) > 1 and len(on) != len(off):
            raise InputError(
                f"on has {len(on)} entries and off has {len(off)}; give one per client"
            )
        stuck = (on == 0.0) & (off == 0.0)
        if np.any(stuck):
            raise InputError(
                f"on and off are both 0 (entry {int(np.argmax(stuck))}, counted from 0): the "
                f"client would never change and has no stationary law; make one of them positive"
            )

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        before = self._present(n_clients, start - 1, seed)
        mask = _follow(self._moves(n_clients, start, stop, seed), before)
        self._remember(mask, stop - 1, seed)
        return mask

    def inclusion(self, n_clients: int) -> np.ndarray:
        on, off = self._rates(n_clients)
        return on / (on + off)

    def aggregation(self, n_clients: int) -> np.ndarray:
        return independent_aggregation(self.inclusion(n_clients))

    def gap(self, n_clients: int) -> float:
        """The longest mean absence, 1 / on, of the clients that come and go."""
        on, off = self._rates(n_clients)
        return float(np.max(1.0 / on[(on > 0.0) & (off > 0.0)], initial=1.0))

    def _rates(self, n_clients: int) -> tuple[np.ndarray, np.ndarray]:
        return spread("on", self.on, n_clients), spread("off", self.off, n_clients)

    def _masks(self, n_clients: int, start: int, stop: int, seed: int) -> Iterator[np.ndarray]:
        present = self._present(n_clients, start - 1, seed)
        for begin, end in round_blocks(start, stop, n_clients):
            mask = _follow(self._moves(n_clients, begin, end, seed), present)
            present = mask[-1]
            self._remember(mask, end - 1, seed)
            yield mask

    @functools.cached_property
    def _latest(self) -> dict[tuple[int, int, int], np.ndarray]:
        """Who was present in the last round asked for, by (N, round, seed): looking back is for
        those who do not go on from there."""
        return {}

    def _remember(self, mask: np.ndarray, round: int, seed: int) -> None:
        if len(mask):
            self._latest.clear()
            self._latest[mask.shape[1], round, seed] = mask[-1].copy()

    def _present(self, n_clients: int, round: int, seed: int) -> np.ndarray:
        """(N,) bool: who is present in `round`, found by going back until every client has had a
        move that does not depend on where it was (round 0 is one)."""
        latest = self._latest.get((n_clients, round, seed))
        if latest is not None:
            return latest
        present = np.zeros(n_clients, bool)
        flipped = np.zeros(n_clients, bool)
        open_ = np.ones(n_clients, bool)
        end, span = round + 1, 32
        while end > 0 and np.any(open_):
            span = min(2 * span, max(1, _LOOK_BACK // n_clients))
            begin = max(0, end - span)
            moves = self._moves(n_clients, begin, end, seed)
            landed = _follow(moves, np.zeros(n_clients, bool))[-1] ^ flipped
            settled = open_ & np.any(moves.settles, axis=0)
            present[settled] = landed[settled]
            open_ &= ~settled
            flipped ^= np.logical_xor.reduce(moves.flips, axis=0)
            end = begin
        return present

    def _moves(self, n_clients: int, start: int, stop: int, seed: int) -> _Moves:
        u = uniforms(seed, start, stop, n_clients)
        on, off = self._rates(n_clients)
        moves = _Moves(u < on[None, :], u < 1.0 - off[None, :])
        if start == 0 and stop > 0:
            first = u[0] < self.inclusion(n_clients)
            moves.absent[0], moves.present[0] = first, first
        return moves


_LOOK_BACK = 2**20  # entries of the table of moves looked at in one go


class _Moves(NamedTuple):
    """Where each client goes in each round from either state: maps of {absent, present}."""

    absent: np.ndarray  # (T, N) bool: present after the round if absent before
    present: np.ndarray  # (T, N) bool: present after the round if present before

    @property
    def settles(self) -> np.ndarray:
        return self.absent == self.present

    @property
    def flips(self) -> np.ndarray:
        return self.absent & ~self.present


def _follow(moves: _Moves, before: np.ndarray) -> np.ndarray:
    """(T, N) bool: present after each round, from the (N,) state before the first.

    The last settling move gives the state, the parity of the flips since then changes it.
    """
    T = len(moves.absent)
    flips = np.cumsum(moves.flips, axis=0) % 2 == 1
    rounds = np.arange(T)[:, None]
    settled = np.maximum.accumulate(np.where(moves.settles, rounds, -1), axis=0)
    last = np.maximum(settled, 0)
    since = np.take_along_axis(moves.absent ^ flips, last, axis=0)
    return np.where(settled >= 0, since, before[None, :]) ^ flips
