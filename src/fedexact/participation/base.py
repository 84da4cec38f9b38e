"""What a participation pattern is, its random numbers, and the checks of its arguments."""

from __future__ import annotations

import abc
import functools
import hashlib
import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from fedexact.errors import InputError, check_count

PerClient: TypeAlias = float | Sequence[float] | np.ndarray  # one number for all, or one for each


class Numbers(tuple[float, ...]):
    """One number per client: a tuple that is an array, too, and short in print if it is long."""

    _array: np.ndarray

    def __new__(cls, vector: np.ndarray) -> Numbers:
        numbers = super().__new__(cls, vector.tolist())
        numbers._array = np.array(vector, dtype=np.float64)
        numbers._array.flags.writeable = False
        return numbers

    def __getnewargs__(self) -> tuple[np.ndarray]:
        return (self._array,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        if len(self) <= _PRINTED:
            return super().__repr__()
        digest = hashlib.sha256(self._array.tobytes()).hexdigest()[:16]
        return f"({self[0]!r}, ..., {self[-1]!r}; {len(self)} numbers, sha256 {digest})"


_BLOCK = 2**22  # entries of a table held at once
_PRINTED = 10_000  # entries of a vector


class Cohorts(NamedTuple):
    """The participants of the rounds start, ..., stop - 1, as compressed rows."""

    ids: np.ndarray  # (sum of the counts,) int32, ascending within a round
    offsets: (
        np.ndarray
    )  # (stop - start + 1,) int64; round start + t: ids[offsets[t]:offsets[t + 1]]

    @property
    def rounds(self) -> int:
        """How many."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """(rounds,) participants of each."""
        return np.diff(self.offsets)

    def between(self, begin: int, end: int) -> Cohorts:
        """The rounds begin, ..., end - 1 of these."""
        offsets = self.offsets[begin : end + 1]
        return Cohorts(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])


def of_mask(mask: np.ndarray) -> Cohorts:
    """The cohorts of the T rounds of a mask (T, N)."""
    offsets = np.append(0, np.cumsum(np.count_nonzero(mask, axis=1)))
    return Cohorts(np.nonzero(mask)[1].astype(np.int32), offsets)


def joined(blocks: Iterable[Cohorts]) -> Cohorts:
    """The cohorts of consecutive ranges of rounds as one."""
    ids, counts = [np.empty(0, np.int32)], [np.zeros(1, np.int64)]
    for block in blocks:
        ids.append(block.ids)
        counts.append(np.diff(block.offsets))
    return Cohorts(np.concatenate(ids), np.cumsum(np.concatenate(counts)))


@dataclass(frozen=True)
class Participation(abc.ABC):
    """The set S_r of clients that take part in round r, for r = 0, 1, ...

    A pattern is a pure function of (seed, round) and the number of clients N: any range of rounds
    can be asked for in any order and any pieces. Arguments given per client are one number for all
    or a vector of N.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `fedexact list`
    per_client: ClassVar[tuple[str, ...]] = ()  # arguments that may be vectors of N

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        """Raises InputError if the pattern does not fit N clients (called `names`)."""
        for what in self.per_client:
            spread(what, getattr(self, what), n_clients, names)

    @abc.abstractmethod
    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        """(stop - start, N) bool: who takes part in the rounds start, ..., stop - 1."""

    @abc.abstractmethod
    def inclusion(self, n_clients: int) -> np.ndarray:
        """(N,) p_k = P(k in S), averaged over the rounds in the long run."""

    @abc.abstractmethod
    def aggregation(self, n_clients: int) -> np.ndarray:
        """(N,) q_k = E[1{k in S} / |S|] (an empty S counts as 0), averaged like p_k."""

    def aggregation_error(self, n_clients: int) -> np.ndarray:
        """(N,) standard errors of `aggregation`; 0 where it is exact to rounding."""
        return np.zeros(n_clients)

    def gap(self, n_clients: int) -> float:
        """Rounds between two visits that come in a fixed or correlated order; 1 otherwise."""
        return 1.0

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        """The same as `mask`, in memory proportional to the number of participants."""
        return joined(of_mask(mask) for mask in self._masks(n_clients, start, stop, seed))

    def _masks(self, n_clients: int, start: int, stop: int, seed: int) -> Iterator[np.ndarray]:
        """`mask` in consecutive blocks of bounded size."""
        for begin, end in round_blocks(start, stop, n_clients):
            yield self.mask(n_clients, begin, end, seed)


# --- random numbers -------------------------------------------------------------------------------


def round_blocks(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rounds that cover start, ..., stop - 1 with bounded tables of `width` columns."""
    rows = max(1, _BLOCK // max(1, width))
    for begin in range(start, stop, rows):
        yield begin, min(begin + rows, stop)


def uniforms(seed: int, start: int, stop: int, width: int, stream: int = 0) -> np.ndarray:
    """(stop - start, width) uniform numbers on [0, 1), functions of (seed, stream, width, round,
    column).

    Philox is a function of a counter: round r owns the counters from r * ceil(width / 4) on.
    """
    per_round = -(-width // 4)  # a counter gives four numbers
    philox = np.random.Philox(key=_key(seed, stream), counter=start * per_round)
    return np.random.Generator(philox).random((stop - start, 4 * per_round))[:, :width]


@functools.lru_cache(maxsize=64)
def _key(seed: int, stream: int) -> np.ndarray:
    check_count("seed", seed, at_least=0)
    spawn_key = (stream,) if stream else ()
    return np.random.SeedSequence(seed, spawn_key=spawn_key).generate_state(2, np.uint64)


# --- checks of the arguments ----------------------------------------------------------------------


def numbers_of(what: str, value: PerClient) -> float | Numbers:
    """A number, or the numbers of a vector; InputError for anything else."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    try:
        vector = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.empty((0, 0))
    if isinstance(value, bool | str) or vector.ndim != 1 or vector.size == 0:
        raise InputError(
            f"{what} must be one number for all clients or a vector with one for each, "
            f"got {value!r}"
        )
    return Numbers(vector)


def probabilities(what: str, value: PerClient) -> float | Numbers:
    """`numbers_of`, each within [0, 1]."""
    return within(what, value, 0.0, 1.0, "a probability within [0, 1]")


def within(what: str, value: PerClient, least: float, most: float, words: str) -> float | Numbers:
    """`numbers_of`, each finite and within [least, most], which `words` describes."""
    checked = numbers_of(what, value)
    vector = np.atleast_1d(checked)
    bad = ~(np.isfinite(vector) & (vector >= least) & (vector <= most))
    if np.any(bad):
        k = int(np.argmax(bad))
        where = what if isinstance(checked, float) else f"{what}[{k}] (client {k}, counted from 0)"
        raise InputError(f"{where} must be {words}, got {vector[k]!s}")
    return checked


def spread(
    what: str, value: PerClient, n_clients: int, names: Sequence[str] | None = None
) -> np.ndarray:
    """(N,) the value of each client; InputError for a vector of another length."""
    vector = np.asarray(value, dtype=np.float64)
    if vector.ndim == 1 and len(vector) != n_clients:
        called = f" ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})" if names else ""
        raise InputError(
            f"{what} has {len(vector)} entries but there are {n_clients} clients{called}; "
            f"give one number for all clients or one for each"
        )
    return np.broadcast_to(vector, (n_clients,))


def check_cohort(what: str, value: int, available: int, of: str) -> None:
    """InputError if a cohort of `value` cannot be drawn from `available` clients."""
    if value > available:
        raise InputError(f"{what} = {value} but there are only {available} {of}; lower {what}")
