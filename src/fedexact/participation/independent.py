"""Patterns whose rounds are independent of each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedexact.errors import InputError, check_count
from fedexact.participation.base import (
    Cohorts,
    Participation,
    PerClient,
    check_cohort,
    probabilities,
    round_blocks,
    spread,
    uniforms,
    within,
)
from fedexact.participation.draws import MANY, as_mask, distinct, independent
from fedexact.participation.expectations import (
    alike_aggregation,
    independent_aggregation,
    is_sequential_work_below,
    largest_gap,
    sequential_inclusion,
)


@dataclass(frozen=True)
class Full(Participation):
    """Everybody, every round."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "everybody, every round"

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        return np.ones((stop - start, n_clients), bool)

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        ids = np.tile(np.arange(n_clients, dtype=np.int32), stop - start)
        return Cohorts(ids, n_clients * np.arange(stop - start + 1, dtype=np.int64))

    def inclusion(self, n_clients: int) -> np.ndarray:
        return np.ones(n_clients)

    def aggregation(self, n_clients: int) -> np.ndarray:
        return np.full(n_clients, 1.0 / n_clients)


@dataclass(frozen=True)
class Uniform(Participation):
    """m of the N clients, all subsets alike."""

    m: int

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "m clients drawn uniformly without replacement"

    def __post_init__(self) -> None:
        check_count("m", self.m)

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        check_cohort("m", self.m, n_clients, "clients")

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        return as_mask(self.cohorts(n_clients, start, stop, seed), n_clients)

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        self.check(n_clients)
        if n_clients > MANY and 8 * self.m <= n_clients:

            def pick(u: np.ndarray) -> np.ndarray:
                return (u * n_clients).astype(np.int64)

            return distinct(pick, self.m, n_clients, start, stop, seed)
        width = self.m if self._few(n_clients) else n_clients
        drawn = [
            np.sort(self._draw(n_clients, begin, end, seed), axis=1).ravel()
            for begin, end in round_blocks(start, stop, width)
        ]
        offsets = self.m * np.arange(stop - start + 1, dtype=np.int64)
        return Cohorts(np.concatenate([np.empty(0, np.int32), *drawn]), offsets)

    def inclusion(self, n_clients: int) -> np.ndarray:
        return np.full(n_clients, self.m / n_clients)

    def aggregation(self, n_clients: int) -> np.ndarray:
        return np.full(n_clients, 1.0 / n_clients)

    def _few(self, n_clients: int) -> bool:
        return self.m**2 <= 8 * n_clients  # then m^2 / 2 comparisons are cheaper than N numbers

    def _draw(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        """(stop - start, m) int32 the clients drawn, in no order."""
        if self._few(n_clients):
            return _floyd(uniforms(seed, start, stop, self.m), n_clients)
        u = uniforms(seed, start, stop, n_clients)
        return np.argpartition(u, self.m - 1, axis=1)[:, : self.m].astype(np.int32)


def _floyd(u: np.ndarray, n: int) -> np.ndarray:
    """(T, m) distinct numbers below n from (T, m) uniforms, every subset alike.

    Floyd's algorithm (Bentley and Floyd 1987), all rows at once.
    """
    m = u.shape[1]
    drawn = np.empty(u.shape, np.int32)
    for i in range(m):
        top = n - m + i
        pick = (u[:, i] * (top + 1)).astype(np.int32)
        taken = np.any(drawn[:, :i] == pick[:, None], axis=1)
        drawn[:, i] = np.where(taken, top, pick)
    return drawn


def _all_alike_and_rare(p: PerClient, n_clients: int) -> bool:
    """Whether to draw the participants themselves and not a table of all clients."""
    return n_clients > MANY and np.ndim(p) == 0 and float(np.asarray(p)) <= 0.25


@dataclass(frozen=True)
class Bernoulli(Participation):
    """Each client on its own, client k with probability p_k."""

    p: PerClient

    name: ClassVar[str] = "bernoulli"
    summary: ClassVar[str] = "each client independently with probability p (one, or one each)"
    per_client: ClassVar[tuple[str, ...]] = ("p",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probabilities("p", self.p))

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        if self._direct(n_clients):
            return as_mask(self.cohorts(n_clients, start, stop, seed), n_clients)
        return uniforms(seed, start, stop, n_clients) < self.inclusion(n_clients)[None, :]

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        if not self._direct(n_clients):
            return super().cohorts(n_clients, start, stop, seed)
        p = float(np.asarray(self.p))
        return independent(
            lambda begin, end: np.full(end - begin, p), p, n_clients, start, stop, seed
        )

    def _direct(self, n_clients: int) -> bool:
        return _all_alike_and_rare(self.p, n_clients)

    def inclusion(self, n_clients: int) -> np.ndarray:
        return spread("p", self.p, n_clients)

    def aggregation(self, n_clients: int) -> np.ndarray:
        if np.ndim(self.p) == 0:
            return np.full(n_clients, alike_aggregation(np.asarray(self.p), n_clients))
        return independent_aggregation(self.inclusion(n_clients))


@dataclass(frozen=True)
class Categorical(Participation):
    """m clients drawn one by one without replacement, each draw proportional to the weights.

    p_k = m q_k by quadrature, exact to rounding; where that would take more than some seconds (more
    than a thousand clients and tens of them a round), from simulated rounds, 40 to 400, with a
    standard error that is a small part of p_k.
    """

    weights: PerClient
    m: int

    name: ClassVar[str] = "categorical"
    summary: ClassVar[str] = "m clients drawn without replacement, in proportion to weights"
    per_client: ClassVar[tuple[str, ...]] = ("weights",)

    def __post_init__(self) -> None:
        check_count("m", self.m)
        weights = within("weights", self.weights, 0.0, np.inf, "a finite number >= 0")
        if isinstance(weights, tuple):
            check_cohort("m", self.m, int(np.count_nonzero(weights)), "clients of positive weight")
        elif weights == 0.0:
            raise InputError("weights must not be 0 for all clients")
        object.__setattr__(self, "weights", weights)

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        super().check(n_clients, names)
        check_cohort("m", self.m, n_clients, "clients")

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        self.check(n_clients)
        if n_clients <= MANY or not self._mostly_new(n_clients):
            return super().cohorts(n_clients, start, stop, seed)
        if np.ndim(self.weights) == 0:
            return Uniform(self.m).cohorts(n_clients, start, stop, seed)
        wheel, last = self._wheel

        def pick(u: np.ndarray) -> np.ndarray:
            found = np.searchsorted(wheel, u * wheel[-1], side="right")
            return np.minimum(found, last)  # where rounding leads beyond the end

        return distinct(pick, self.m, n_clients, start, stop, seed)

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        self.check(n_clients)
        if n_clients > MANY and self._mostly_new(n_clients):
            return as_mask(self.cohorts(n_clients, start, stop, seed), n_clients)
        clocks = self.clocks(n_clients, start, stop, seed)
        mask = np.zeros(clocks.shape, bool)
        first = np.argpartition(clocks, self.m - 1, axis=1)[:, : self.m]
        np.put_along_axis(mask, first, True, axis=1)
        return mask

    def _mostly_new(self, n_clients: int) -> bool:
        """Whether most draws with replacement meet somebody new, to the end."""
        return self._light if np.ndim(self.weights) else 8 * self.m <= n_clients

    @functools.cached_property
    def _light(self) -> bool:
        weights, m = np.asarray(self.weights), self.m
        heaviest = np.partition(weights, -m)[-m:]
        return 8 * m <= len(weights) and bool(np.sum(heaviest) <= 0.5 * np.sum(weights))

    @functools.cached_property
    def _wheel(self) -> tuple[np.ndarray, int]:
        """(N,) sums of the weights, and the last client that can be drawn."""
        weights = np.asarray(self.weights)
        return np.cumsum(weights), int(np.flatnonzero(weights)[-1])

    def clocks(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        """(stop - start, N) independent exponential times with rates `weights`: the first m take
        part, which is the law of drawing them one by one."""
        weights = spread("weights", self.weights, n_clients)
        times = -np.log1p(-uniforms(seed, start, stop, n_clients))
        clocks = np.full(times.shape, np.inf)
        return np.divide(times, weights[None, :], out=clocks, where=weights[None, :] > 0.0)

    def inclusion(self, n_clients: int) -> np.ndarray:
        return _categorical(self, n_clients).p

    def aggregation(self, n_clients: int) -> np.ndarray:
        return self.inclusion(n_clients) / self.m

    def aggregation_error(self, n_clients: int) -> np.ndarray:
        return _categorical(self, n_clients).error / self.m


class _Inclusion(NamedTuple):
    p: np.ndarray  # (N,)
    error: np.ndarray  # (N,) standard errors


_MOST_WORK = 3e7
_SIMULATED = 400  # rounds at most
_SIMULATED_NUMBERS = 4e7  # clients times rounds, about


@functools.lru_cache(maxsize=8)
def _categorical(pattern: Categorical, n_clients: int) -> _Inclusion:
    weights = spread("weights", pattern.weights, n_clients)
    exact, m = np.zeros(n_clients), pattern.m
    drawable = weights > 0.0
    w = weights[drawable]
    if np.ptp(w) == 0.0:
        exact[drawable] = m / len(w)
    elif m == len(w):
        exact[drawable] = 1.0
    elif m == 1:
        exact = weights / np.sum(weights)
    elif is_sequential_work_below(_MOST_WORK, w, m):
        exact[drawable] = sequential_inclusion(w, m)
    else:
        return _simulated(pattern, n_clients)
    return _Inclusion(exact, np.zeros(n_clients))


def _simulated(pattern: Categorical, n_clients: int) -> _Inclusion:
    """p_k = E[1 - exp(-w_k t_k)], t_k the m-th ring of the others: every round informs every
    client's estimate. Most of the error is common to all, and leaves with sum p = m."""
    weights = spread("weights", pattern.weights, n_clients)
    m, rounds = pattern.m, int(np.clip(_SIMULATED_NUMBERS / n_clients, 40, _SIMULATED))
    total, squares, cross = np.zeros((3, n_clients))
    scales = []  # (rounds of a block,) sum of the estimates / m
    for block in round_blocks(0, rounds, n_clients):
        clocks = pattern.clocks(n_clients, *block, seed=0)
        rings = np.partition(clocks, (m - 1, m), axis=1)[:, m - 1 : m + 1]
        others = np.where(clocks <= rings[:, :1], rings[:, 1:], rings[:, :1])
        p = -np.expm1(-weights[None, :] * others)
        scales.append(np.sum(p, axis=1) / m)
        total += np.sum(p, axis=0)
        squares += np.sum(p**2, axis=0)
        cross += scales[-1] @ p
    scale = np.concatenate(scales)
    ratio = total / np.sum(scale)
    residual = np.maximum(squares - 2.0 * ratio * cross + ratio**2 * (scale @ scale), 0.0)
    return _Inclusion(ratio, np.sqrt(residual) / rounds)


@dataclass(frozen=True)
class Sine(Participation):
    """Availability that comes and goes: each client on its own, in round r with probability
    p_k (1 + amplitude_k sin(2 pi r / period + phase_k)), cut off at 0 and 1.

    `period` in rounds; `phase` in radians.
    """

    p: PerClient
    amplitude: PerClient = 1.0
    period: int = 24
    phase: PerClient = 0.0

    name: ClassVar[str] = "sine"
    summary: ClassVar[str] = "each client independently, with a probability that goes up and down"
    per_client: ClassVar[tuple[str, ...]] = ("p", "amplitude", "phase")

    def __post_init__(self) -> None:
        check_count("period", self.period, at_least=2)
        words = "a finite number >= 0"
        for what, value in {
            "p": probabilities("p", self.p),
            "amplitude": within("amplitude", self.amplitude, 0.0, np.inf, words),
            "phase": within("phase", self.phase, -np.inf, np.inf, "a finite number"),
        }.items():
            object.__setattr__(self, what, value)

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        if self._direct(n_clients):
            return as_mask(self.cohorts(n_clients, start, stop, seed), n_clients)
        return uniforms(seed, start, stop, n_clients) < self._p(n_clients, start, stop)

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        if not self._direct(n_clients):
            return super().cohorts(n_clients, start, stop, seed)
        return independent(
            lambda begin, end: self._p(1, begin, end)[:, 0],
            self._most, n_clients, start, stop, seed,
        )  # fmt: skip

    def inclusion(self, n_clients: int) -> np.ndarray:
        if self._alike:
            return np.full(n_clients, np.mean(self._p(1, 0, self.period)))
        total = np.zeros(n_clients)
        for block in round_blocks(0, self.period, n_clients):
            total += np.sum(self._p(n_clients, *block), axis=0)
        return total / self.period

    def aggregation(self, n_clients: int) -> np.ndarray:
        if self._alike:
            q = alike_aggregation(self._p(1, 0, self.period), n_clients)
            return np.full(n_clients, np.mean(q))
        total = np.zeros(n_clients)
        for r in range(self.period):
            total += independent_aggregation(self._p(n_clients, r, r + 1)[0])
        return total / self.period

    def gap(self, n_clients: int) -> float:
        """The longest stretch of rounds in which a client stays below half its mean probability,
        and one round more."""
        if self._alike:
            n_clients = 1
        usual = (0.5 - 1e-9) * self.inclusion(n_clients)  # half of it, up to rounding, is enough
        blocks = round_blocks(0, self.period, n_clients)
        p = np.concatenate([self._p(n_clients, *block) >= usual[None, :] for block in blocks])
        client, visit = np.nonzero(p.T)
        return largest_gap(client, visit, self.period)

    @property
    def _alike(self) -> bool:
        """Whether all clients have the same probabilities."""
        return all(np.ndim(getattr(self, what)) == 0 for what in self.per_client)

    @functools.cached_property
    def _most(self) -> float:
        return float(np.max(self._p(1, 0, self.period)))

    def _direct(self, n_clients: int) -> bool:
        return self._alike and _all_alike_and_rare(self._most, n_clients)

    def _p(self, n_clients: int, start: int, stop: int) -> np.ndarray:
        """(stop - start, N) probabilities."""
        p, amplitude, phase = (
            spread(what, getattr(self, what), n_clients)[None, :] for what in self.per_client
        )
        # the round within the period, so that round r and round r + period agree to the last bit
        turn = 2.0 * np.pi * (np.arange(start, stop) % self.period)[:, None] / self.period
        return np.clip(p * (1.0 + amplitude * np.sin(turn + phase)), 0.0, 1.0)
