"""Splits of one table into clients, for experiments: seeded, checked before they are made."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fedexact.errors import InputError, check_count, check_positive

MAX_CLASSES = 100


@dataclasses.dataclass(frozen=True)
class PartitionRecord:
    """What a partition made."""

    kind: str
    description: str
    sizes: np.ndarray  # (N,) rows per client
    labels: tuple[float, ...]  # the classes of the target, empty when it is not discrete
    label_counts: np.ndarray  # (N, number of classes)


class Partition(abc.ABC):
    """A rule that deals the rows of one table out to clients."""

    name: ClassVar[str]
    summary: ClassVar[str]
    seed: int
    min_rows: int

    def __post_init__(self) -> None:
        check_count(f"{self.name}: seed", self.seed, at_least=0)
        check_count(f"{self.name}: min_rows", self.min_rows)
        self._check()

    def split(self, y: np.ndarray) -> list[np.ndarray]:
        """For each client the indices of its rows, ascending; every row goes to one client.

        Raises InputError, before anything is dealt out, when the rows do not suffice, and when a
        client gets fewer than `min_rows`.
        """
        n, clients = len(y), self._n_clients()
        if clients * self.min_rows > n:
            raise InputError(
                f"partition {self.name}: {clients} clients with at least {self.min_rows} row(s) "
                f"each need {clients * self.min_rows} rows, the table has {n}: ask for fewer"
            )
        parts = [np.sort(part) for part in self._deal(y, np.random.default_rng(self.seed))]
        smallest = int(np.argmin([len(part) for part in parts]))
        if len(parts[smallest]) < self.min_rows:
            raise InputError(
                f"partition {self.name}: client {smallest} gets {len(parts[smallest])} row(s), "
                f"fewer than min_rows = {self.min_rows}; {self._remedy()}"
            )
        return parts

    def record(self, y: np.ndarray, parts: Sequence[np.ndarray]) -> PartitionRecord:
        """Sizes and label counts of the clients."""
        labels = np.unique(y)
        discrete = len(labels) <= MAX_CLASSES
        labels = labels if discrete else labels[:0]
        sizes = np.array([len(part) for part in parts])
        cell = np.repeat(np.arange(len(parts)), sizes) * len(labels)
        if discrete:
            cell += np.searchsorted(labels, y[np.concatenate(parts)])
            counts = np.bincount(cell, minlength=len(parts) * len(labels))
        else:
            counts = np.zeros(0, dtype=int)
        return PartitionRecord(
            self.name,
            self.describe(),
            sizes,
            tuple(labels.tolist()),
            counts.reshape(len(parts), len(labels)),
        )

    def describe(self) -> str:
        """The rule with its parameters, in words."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in given.items() if v is not None)})"

    @abc.abstractmethod
    def _n_clients(self) -> int: ...

    @abc.abstractmethod
    def _check(self) -> None: ...

    @abc.abstractmethod
    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]: ...

    def _remedy(self) -> str:
        return "ask for fewer clients or another seed"


@dataclasses.dataclass(frozen=True)
class Iid(Partition):
    """Rows in random order, dealt out in parts of equal size (to within one row)."""

    name: ClassVar[str] = "iid"
    summary: ClassVar[str] = "rows at random, clients of equal size"
    clients: int
    seed: int = 0
    min_rows: int = 1

    def _n_clients(self) -> int:
        return self.clients

    def _check(self) -> None:
        check_count("iid: clients", self.clients)

    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(y)), self.clients)


@dataclasses.dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class of the target is spread over the clients in proportions drawn from
    Dirichlet(alpha, ..., alpha) (Hsu, Qi and Brown 2019): small alpha, few classes per client."""

    name: ClassVar[str] = "dirichlet"
    summary: ClassVar[str] = (
        "classes spread by Dirichlet(alpha) proportions: skewed labels and sizes"
    )
    clients: int
    alpha: float
    seed: int = 0
    min_rows: int = 1

    def _n_clients(self) -> int:
        return self.clients

    def _check(self) -> None:
        check_count("dirichlet: clients", self.clients)
        check_positive("dirichlet: alpha", self.alpha)

    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        owner = np.empty(len(y), dtype=int)
        for label in classes(y, self.name):
            rows = rng.permutation(np.flatnonzero(y == label))
            shares = rng.dirichlet(np.full(self.clients, float(self.alpha)))
            owner[rows] = np.repeat(np.arange(self.clients), round_shares(shares, len(rows)))
        return [np.flatnonzero(owner == k) for k in range(self.clients)]

    def _remedy(self) -> str:
        return "raise alpha, ask for fewer clients, or take another seed"


@dataclasses.dataclass(frozen=True)
class ByLabel(Partition):
    """Client k holds the classes k c, ..., k c + c - 1 (mod K) with c = labels_per_client; the rows
    of a class are dealt out evenly among the clients that hold it."""

    name: ClassVar[str] = "by_label"
    summary: ClassVar[str] = "each client holds a few classes of the target only"
    clients: int
    labels_per_client: int = 1
    seed: int = 0
    min_rows: int = 1

    def _n_clients(self) -> int:
        return self.clients

    def _check(self) -> None:
        check_count("by_label: clients", self.clients)
        check_count("by_label: labels_per_client", self.labels_per_client)

    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        labels, c = classes(y, self.name), self.labels_per_client
        if c > len(labels):
            raise InputError(
                f"partition by_label: labels_per_client = {c}, but the target has only "
                f"{len(labels)} classes"
            )
        if self.clients * c < len(labels):
            raise InputError(
                f"partition by_label: {self.clients} clients with {c} class(es) each cannot hold "
                f"all {len(labels)} classes; raise clients or labels_per_client"
            )
        parts: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for position, label in enumerate(labels):
            held = [k for k in range(self.clients) if (position - k * c) % len(labels) < c]
            rows = rng.permutation(np.flatnonzero(y == label))
            for k, rows_k in zip(held, np.array_split(rows, len(held)), strict=True):
                parts[k].append(rows_k)
        return [np.concatenate(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class ByQuantity(Partition):
    """Rows at random, sizes as given or by a power law: client k = 1, 2, ... gets a share
    proportional to k^(-power)."""

    name: ClassVar[str] = "by_quantity"
    summary: ClassVar[str] = "rows at random, sizes by a power law or as given"
    clients: int | None = None
    power: float | None = None
    sizes: tuple[int, ...] | None = None
    seed: int = 0
    min_rows: int = 1

    def _n_clients(self) -> int:
        return len(self.sizes) if self.sizes is not None else int(self.clients or 0)

    def _check(self) -> None:
        if self.sizes is None:
            check_count("by_quantity: clients (or sizes)", self.clients)
            check_positive("by_quantity: power (needed without sizes)", self._power())
            return
        if self.power is not None or self.clients not in (None, len(self.sizes)):
            raise InputError("by_quantity: give either sizes, or clients and power")
        for size in self.sizes:
            check_count("by_quantity: each of sizes", size)

    def _power(self) -> float:
        return 1.0 if self.power is None else self.power

    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        if self.sizes is None:
            shares = np.arange(1, self._n_clients() + 1) ** -float(self._power())
            sizes = round_shares(shares / shares.sum(), len(y))
        else:
            sizes = np.asarray(self.sizes)
            if sizes.sum() != len(y):
                raise InputError(
                    f"partition by_quantity: sizes add up to {sizes.sum()}, the table has {len(y)} "
                    "complete rows"
                )
        return np.split(rng.permutation(len(y)), np.cumsum(sizes)[:-1])

    def _remedy(self) -> str:
        return "ask for fewer clients or a smaller power"


PARTITIONS: dict[str, type[Partition]] = {p.name: p for p in (Iid, Dirichlet, ByLabel, ByQuantity)}


def classes(y: np.ndarray, kind: str) -> np.ndarray:
    """The distinct values of the target; raises InputError when there are too many for classes."""
    labels = np.unique(y)
    if len(labels) > MAX_CLASSES:
        raise InputError(
            f"partition {kind} goes by the classes of the target, which has {len(labels)} distinct "
            f"values (at most {MAX_CLASSES}); take iid or by_quantity"
        )
    return labels


def round_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers with the given sum, each within one of shares * total (largest remainders)."""
    ideal = shares * total
    counts = np.floor(ideal).astype(int)
    order = np.argsort(counts - ideal, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts
