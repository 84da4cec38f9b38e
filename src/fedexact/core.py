"""The protocol (pull, local, push), the record it is written with, and the keys.

A round r with participants S_r: every k in S_r receives ``pull(server, r)``; computes
``(new client state, upload) = local(client state, pulled, oracle, key)``; the server receives only
the plain sum of the uploads and their number, ``push(server, total, count)``. A client outside S_r
keeps its state bit for bit; a round with nobody changes nothing but the round counter, which the
engine owns. Models are flat vectors x in R^d. Where an
algorithm `receives`, the participants get the new model after the push: a second message down.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    dataclass_transform,
)

import jax
import numpy as np
from jax import Array

S = TypeVar("S")  # server state
C = TypeVar("C")  # client state
B = TypeVar("B")  # what a participant pulls (the broadcast)
U = TypeVar("U")  # what a participant pushes (the upload)
T = TypeVar("T")
P = ParamSpec("P")


# --- records --------------------------------------------------------------------------------------


def static(default: Any = dataclasses.MISSING) -> Any:
    """A record field that is part of the program (a count, a choice), not a traced value."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(static,))
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass that is a pytree: float fields are leaves, `static()` fields are not.

    Not jax.tree_util.register_dataclass: in jaxlib 0.10.2 the tree structures of two such classes
    with equal static fields compare equal, and now and then, when hashes collide, jit then runs the
    program compiled for the other class. JAX rebuilds a record without calling `__post_init__`.
    """
    kind = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType] - it is a dataclass
    parts = [field.name for field in fields if field.metadata.get("static", False)]
    leaves = [field.name for field in fields if not field.metadata.get("static", False)]
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(tree: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(tree, name) for name in leaves], tuple(getattr(tree, n) for n in parts)

    def flatten_with_keys(tree: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, aux = flatten(tree)
        return list(zip(keys, values, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], values: Iterable[Any]) -> T:
        tree = object.__new__(kind)
        for name, value in zip((*parts, *leaves), (*aux, *values), strict=True):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
    return kind


@contextmanager
def float64() -> Iterator[None]:
    """Computes in float64 inside the scope and leaves JAX's global setting alone."""
    with jax.enable_x64(True):
        yield


def narrowed(tree: Any) -> Any:
    """The same arrays, those of 8-byte numbers in 4 bytes; equal ones, broadcast from one, stay
    so. Python's numbers, which have no width, stay what they are."""
    return jax.tree.map(_narrow, tree)


def _narrow(a: Any) -> Any:
    if isinstance(a, int | float):
        return a
    narrow = {"f": np.float32, "i": np.int32}.get(a.dtype.kind)
    if narrow is None or a.dtype.itemsize < 8:
        return a
    if isinstance(a, np.ndarray) and a.ndim and a.strides[0] == 0:
        return np.broadcast_to(a[0].astype(narrow), a.shape)
    return a.astype(narrow)


def in_float64(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, run inside `float64()`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with float64():
            return function(*args, **kwargs)

    return wrapped


# --- keys -----------------------------------------------------------------------------------------


def root_key(seed: int) -> Array:
    """The key from which all randomness inside a run is derived."""
    # what jax.random.key(seed) is, which compiles a program
    halves: Any = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(halves)


def round_key(root: Array, round: Array | int) -> Array:
    """fold_in(root, round): what the keys of a round's clients are derived from."""
    return jax.random.fold_in(root, round)


def client_key(root: Array, round: Array | int, client: Array | int) -> Array:
    """fold_in(fold_in(root, round), client): whatever the cohort, the engine, the order."""
    return jax.random.fold_in(round_key(root, round), client)


# --- one client's objective -----------------------------------------------------------------------


class Oracle(Protocol):
    """Client k's objective, scaled once to N w_k f_k so that F = (1/N) sum_k f_k + g.

    `step` is that of prox(v, step) = argmin_u f(u) + |u - v|^2 / (2 step) everywhere.
    """

    @property
    def n_rows(self) -> Any: ...  # n_k, scalar
    @property
    def smoothness(self) -> Any: ...  # L_k, scalar
    @property
    def strong_convexity(self) -> Any: ...  # l_k, scalar

    def value(self, x: Array) -> Array: ...  # scalar
    def grad(self, x: Array) -> Array: ...  # (d,)
    def stochastic_grad(self, x: Array, key: Array, batch_size: int) -> Array: ...  # (d,)
    def prox(self, v: Array, step: Any, start: Array) -> Array: ...  # (d,); warm start
    def hessian(self, x: Array) -> Array: ...  # (d, d)


class Prox(Protocol):
    """A closed convex function g with a cheap prox."""

    def value(self, x: Array) -> Array: ...  # scalar
    def prox(self, v: Array, step: Any) -> Array: ...  # (d,)


# --- what is known before round 0 -----------------------------------------------------------------


class Pooled(NamedTuple):
    """Constants of the smooth part F of the pooled objective."""

    L: float  # smoothness; 1 where F is flat
    l: float  # strong convexity  # noqa: E741 - the papers' symbol
    conditioning: float  # condition number of the Hessian at x = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Constants:
    """Smoothness and strong convexity of the scaled client objectives f_k (N w_k times the client's
    own) and of the smooth part F of the pooled objective, (1/N) sum_k f_k.

    Those that take a pass over the rows are found when they are first read.
    """

    L_k: np.ndarray  # (N,)
    l_k: np.ndarray  # (N,)
    global_: bool  # False where the loss has no global L and L_k is that of a reference point
    convex: bool  # False where the loss is not known to be convex
    find_row_L_k: Callable[[], np.ndarray]  # noqa: N815
    find_pooled: Callable[[], Pooled]

    @property
    def L(self) -> float:  # noqa: N802
        """max_k L_k; 1 where all are flat, since any step will do."""
        return float(np.max(self.L_k)) or 1.0

    @property
    def l(self) -> float:  # noqa: E743
        """min_k l_k."""
        return float(np.min(self.l_k))

    @property
    def kappa(self) -> float:
        """L / l, inf when l = 0."""
        return float(np.max(self.L_k)) / self.l if self.l > 0 else np.inf

    @functools.cached_property
    def row_L_k(self) -> np.ndarray:  # noqa: N802
        """(N,) n_k times the smoothness of the steepest row of f_k."""
        return self.find_row_L_k()

    @functools.cached_property
    def pooled(self) -> Pooled:
        """Those of F."""
        return self.find_pooled()

    @property
    def L_F(self) -> float:  # noqa: N802
        """Smoothness of F; 1 where it is flat."""
        return self.pooled.L

    @property
    def l_F(self) -> float:  # noqa: N802
        """Strong convexity of F."""
        return self.pooled.l

    @property
    def conditioning(self) -> float:
        """Condition number of the Hessian of F at x = 0: a guide for defaults only."""
        return self.pooled.conditioning


class Pattern(Protocol):
    """What an algorithm may know of the participation before round 0."""

    def inclusion(self, n_clients: int) -> np.ndarray: ...  # (N,) p_k = P(k in S)
    def aggregation(self, n_clients: int) -> np.ndarray: ...  # (N,) q_k = E[1{k in S} / |S|]
    def gap(self, n_clients: int) -> float: ...  # rounds between two visits that come in a fixed

    # or correlated order; 1 for independent rounds


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything a choice of hyperparameters may depend on; it travels once, before round 0."""

    names: Sequence[str]  # of the clients
    dim: int
    constants: Constants
    regularizer: Prox
    participation: Pattern
    seed: int = 0  # of the run: for what the server draws

    @property
    def n_clients(self) -> int:
        """N."""
        return len(self.names)

    @functools.cached_property
    def p(self) -> np.ndarray:
        """(N,) inclusion probabilities p_k = P(k in S)."""
        return self.participation.inclusion(self.n_clients)

    @functools.cached_property
    def q(self) -> np.ndarray:
        """(N,) aggregation weights q_k = E[1{k in S} / |S|]."""
        return self.participation.aggregation(self.n_clients)

    @property
    def gap(self) -> float:
        """Rounds between two visits of a client, those with nobody left out, where they come in a
        fixed or correlated order; 1 for independent rounds."""
        return 1.0 if self.n_clients == 1 else self.participation.gap(self.n_clients)

    @property
    def full(self) -> bool:
        """Whether every client takes part in every round."""
        return bool(np.all(self.p == 1.0))

    @property
    def even(self) -> bool:
        """Whether a mean over the participants weighs all clients alike, q_k = const."""
        return bool(np.ptp(self.q) <= 1e-9 * np.mean(self.q))


class Exactness(NamedTuple):
    """Whether, by theory, the only fixed points are minimisers of F, and why."""

    exact: bool
    why: str


class Assumption(NamedTuple):
    """Something that the guarantee of an algorithm needs, and whether it holds here."""

    what: str
    met: bool


# --- the algorithm --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC, Generic[S, C, B, U]):
    """A frozen record of hyperparameters with the rules of one federated algorithm.

    Float hyperparameters are leaves (no recompilation, vmap over them), counts are static. A
    hyperparameter left at None is chosen by `resolve` from the constants and the participation.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `fedexact list`
    reference: ClassVar[str]  # the paper
    requires: ClassVar[frozenset[str]]  # methods of the oracle that `local` calls
    participation: ClassVar[str]  # under which its guarantee holds, in words
    rate: ClassVar[str]  # that is guaranteed, in words
    composite: ClassVar[bool] = False  # handles a regulariser g
    receives: ClassVar[bool] = False  # participants get the new model after the push
    recovers: ClassVar[bool] = False  # takes bad steps back: only an overflow is divergence
    lower: ClassVar[str]  # the hyperparameter to lower when the run diverges

    @abc.abstractmethod
    def resolve(self, setting: Setting) -> Self:
        """The same algorithm with every None replaced by a chosen value."""

    @abc.abstractmethod
    def exactness(self, setting: Setting) -> Exactness:
        """Exact or biased by theory, under this participation."""

    @abc.abstractmethod
    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        """What the guarantee of `rate` needs, and whether it holds under this participation."""

    @abc.abstractmethod
    def init_server(self, x0: Array, n_clients: int) -> S: ...

    @abc.abstractmethod
    def init_client(self, x0: Array) -> C: ...

    @abc.abstractmethod
    def pull(self, server: S, round: Array) -> B:
        """What a participant receives."""

    @abc.abstractmethod
    def local(self, client: C, pulled: B, oracle: Oracle, key: Array) -> tuple[C, U]:
        """New state and upload of a client that is present."""

    @abc.abstractmethod
    def push(self, server: S, total: U, count: Array) -> S:
        """`total` is the plain sum of the uploads, `count` >= 1 their number."""

    @abc.abstractmethod
    def model(self, server: S) -> Array:
        """(d,) the model the server would hand out now."""

    def receive(self, client: C, model: Array) -> C:
        """New state of a participant that gets the (d,) model after the push, where `receives`."""
        raise NotImplementedError(f"{self.name} has no `receive`")

    def remedy(self) -> str:
        """What to do when a run diverges."""
        return f"lower {self.lower} (now {getattr(self, self.lower):.3g})"

    def row_gradients(self, client: C, pulled: B, oracle: Oracle, key: Array) -> Array | int:
        """Rows whose gradient `local` computes; those inside a prox are counted by the engine."""
        return 0

    def local_models(self, clients: C) -> Array | None:
        """(N, d) the clients' own models, where they keep one; `clients` is stacked."""
        return None

    def invariant(self, server: S, clients: C) -> Array:
        """What the rounds conserve at zero, (d,) or longer; `clients` is stacked, with a leading
        axis N."""
        nothing: Any = np.zeros(self.model(server).shape)
        return nothing
