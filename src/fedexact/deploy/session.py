"""Before round 0: the members say hello, agree on columns, moments and constants.

Three exchanges: what each table looks like; the sums that give exact pooled moments; the constants
of each objective. Later, sums over all rows are asked for in the same way.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedexact import __version__
from fedexact.bounds import DENSE_LIMIT
from fedexact.clients import Clients
from fedexact.config import Experiment
from fedexact.core import Algorithm, float64, in_float64, root_key
from fedexact.data import Description, Moments, Spec, Sums, agree, pooled_moments
from fedexact.data.columns import Features
from fedexact.deploy import sums
from fedexact.deploy.messages import (
    BAD_DATA,
    BAD_REQUEST,
    Content,
    Failure,
    RefusedError,
    Transport,
)
from fedexact.deploy.oracles import ObjectOracle
from fedexact.deploy.records import to_meta
from fedexact.deploy.remote import (
    Call,
    FederationError,
    RemoteObjective,
    UnansweredError,
    collected,
)
from fedexact.deploy.roster import Clock, Roster, Say
from fedexact.deploy.secure import announce
from fedexact.errors import InputError, check_count
from fedexact.losses import CustomLoss, Loss, Multinomial, make_loss
from fedexact.oracles import prox_method
from fedexact.parts import lone_part


class Rules(NamedTuple):
    """How rounds are run; see `DeployTable`."""

    wait: float
    deadline: float
    quorum: int
    secure: bool
    lost: str


class Session:
    """The members, what they agreed on, and how to ask them.

    Attributes:
        objective: the pooled objective.
        agreement: what was agreed of it, the same for all.
    """

    def __init__(self, roster: Roster, rules: Rules, say: Say) -> None:
        self.roster, self.rules, self.say = roster, rules, say
        self.names: list[str] = list(roster.names)
        self.agreement: dict[str, Any] = {}
        self.objective: RemoteObjective

    # --- asking all members ---------------------------------------------------------------------

    def everybody(
        self,
        request: Callable[[int], Content],
        accept: Callable[[str, Content], None] = lambda name, content: None,
        again: bool = True,
    ) -> list[Content]:
        """The replies of all members in client order; who does not answer is asked again until the
        waiting time is over. Raises UnansweredError, and FederationError where one refuses."""
        found: dict[str, Content] = {}
        until = self.roster.clock.now() + self.rules.wait
        while True:
            asked = {n: request(k) for k, n in enumerate(self.names) if n not in found}
            done = self.roster.exchange(asked, self.rules.deadline, accept)
            found |= done.contents
            if not done.failures:
                return [found[name] for name in self.names]
            self._refused(done.failures)
            if not again or self.roster.clock.now() >= until:
                raise UnansweredError(_reasons(done.failures))
            self.roster.clock.sleep(1.0)

    def _refused(self, failures: Mapping[str, Failure]) -> None:
        refusals = {n: f for n, f in failures.items() if f.code in (BAD_DATA, BAD_REQUEST)}
        if refusals:
            raise FederationError(_reasons(refusals))

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """What all members answer to these calls, summed or collected."""
        if self.rules.secure and any(call.over != "map_clients" for call in calls):
            return self._ask_secure(calls)
        expected = self._query_like(calls)
        replies = self.everybody(
            lambda k: self._query(k, calls, None),
            lambda name, content: sums.check(content, expected),
        )
        return _outcomes(calls, [_fields(reply.arrays) for reply in replies])

    def _ask_secure(self, calls: Sequence[Call]) -> list[Any]:
        """The same as one masked vector of each, under a fresh announcement for every attempt."""
        until = self.roster.clock.now() + self.rules.wait
        while True:
            try:
                return self._ask_masked(calls)
            except UnansweredError as error:
                if self.roster.clock.now() >= until:
                    raise
                self.say(f"a secure sum over all rows is repeated: {error}")
                self.roster.clock.sleep(1.0)

    def _ask_masked(self, calls: Sequence[Call]) -> list[Any]:
        announced = announce(self.roster.keys(self.names), "query", 0, 0)
        meta, expected = announced.to_meta(), self._query_like(calls)
        replies = self.everybody(
            lambda k: self._query(k, calls, meta),
            lambda name, content: sums.check_masked(content, expected),
            again=False,
        )
        contents = dict(zip(self.names, replies, strict=True))
        try:
            total = sums.secure(contents, announced, expected)
        except InputError as error:
            raise UnansweredError(str(error)) from None
        return _outcomes(calls, [_fields(total)])

    @in_float64
    def _query_like(self, calls: Sequence[Call]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a reply to these calls, in the order in which a site sends them."""
        oracle, like = self._any_oracle, {}
        for i, call in enumerate(calls):
            fn = call.fn
            if isinstance(oracle, ObjectOracle):
                fn = getattr(ObjectOracle, fn.__name__, None)
            if fn is None:
                raise InputError(
                    f"objects at the sites have no {call.fn.__name__}, which is needed here: take "
                    "another algorithm, such as FOCUS or FedDR"
                )
            found = jax.eval_shape(lambda *args, fn=fn: fn(oracle, *args), *call.args)
            ahead = (1,) if call.over == "map_clients" else ()
            for j, part in enumerate(jax.tree.leaves(found)):
                like[f"{i}/{j}"] = jax.ShapeDtypeStruct((*ahead, *part.shape), part.dtype)
        return like

    @functools.cached_property
    def _any_oracle(self) -> Any:
        """An oracle for shapes."""
        if isinstance(self.objective.loss, CustomLoss):
            return ObjectOracle(_AnyObjective(self.objective.dim), 1.0)
        return _some_rows(self.objective, self.agreement["prox_method"]).client(0, 0)

    def _query(self, k: int, calls: Sequence[Call], announced: Any) -> Content:
        arrays = {
            f"{i}/{j}": arg for i, call in enumerate(calls) for j, arg in enumerate(call.args)
        }
        named = [
            {"fn": call.fn.__qualname__, "over": call.over, "args": len(call.args)}
            for call in calls
        ]
        meta = {"objective": self.agreed(k), "calls": named, "secure": announced}
        return Content("query", meta, arrays)

    # --- what was agreed ------------------------------------------------------------------------

    def agreed(self, k: int) -> dict[str, Any]:
        """What client k needs to know of the objective."""
        L_k, l_k = self.objective.smoothness()
        return {
            **self.agreement,
            "weight": float(self.objective.n_clients * self.objective.w[k]),
            "rows": int(self.objective.n_rows[k]),
            "L": float(L_k[k]),
            "l": float(l_k[k]),
        }

    def about(self) -> dict[str, Any]:
        """What a run that is resumed must find again."""
        text = json.dumps(self.agreement, sort_keys=True)
        return {
            "clients": self.names,
            "rows": self.objective.n_rows.tolist(),
            "weights": self.objective.w.tolist(),
            "regularizer": to_meta(self.objective.regularizer),
            "target": self.objective.target(),
            "columns and moments": hashlib.sha256(text.encode()).hexdigest(),
        }

    @in_float64
    def upload_like(self, algorithm: Algorithm) -> Any:
        """The shapes of an upload of the algorithm."""
        x = jnp.zeros(self.objective.dim)
        oracle = self._any_oracle

        def upload(x: jax.Array) -> Any:
            pulled = algorithm.pull(algorithm.init_server(x, len(self.names)), jnp.asarray(0))
            return algorithm.local(algorithm.init_client(x), pulled, oracle, root_key(0))[1]

        return jax.eval_shape(upload, x)


# --- the handshake --------------------------------------------------------------------------------


def open_session(
    transport: Transport, experiment: Experiment, say: Say, clock: Clock | None = None
) -> Session:
    """The session of all members. Raises InputError for data that do not fit, naming the client,
    and FederationError where a member is missing."""
    deploy = experiment.deploy
    if deploy is None or deploy.clients is None:
        raise InputError("deploy.clients: name the members of the federation, in order")
    rows = experiment.data.sites != "oracles"
    spec = _spec(experiment) if rows else None
    hello = Content("hello", {"spec": spec.to_meta() if spec else None})
    rules = Rules(deploy.wait, deploy.deadline, deploy.quorum or 1, deploy.secure, deploy.lost)
    session = Session(Roster(transport, deploy.clients, hello, say, clock), rules, say)
    say(f"waiting for {len(session.names)} clients: {', '.join(session.names)}")
    session.roster.wait(deploy.wait)
    missing = session.roster.missing()
    if missing:
        refused = "".join(f"; {reason}" for reason in session.roster.refusals.values())
        raise FederationError(
            f"no node spoke for {', '.join(missing)} within {deploy.wait:g} s; start "
            f"their SuperNodes, or raise deploy.wait{refused}"
        )
    _check_versions(session)
    with float64():
        _agree_on_rows(session, experiment, spec) if spec else _agree_on_oracles(
            session, experiment
        )
        replies = session.everybody(
            lambda k: Content("constants", {"objective": session.agreed(k)}), _check_constants
        )
        L_k, l_k = (np.array([float(r.arrays[name]) for r in replies]) for name in ("L", "l"))
        session.objective.with_smoothness(L_k, l_k)
    transport.limit = _largest(session.objective.dim)
    say(f"target of the fit: {session.objective.target()}")
    return session


def _largest(d: int) -> int:
    """Bytes of a reply that can be needed: a few models, a few (d, d) matrices, masked."""
    matrices = d * d if d <= DENSE_LIMIT else 0
    return 2**20 + 32 * (64 * d + 8 * matrices)


def _check_versions(session: Session) -> None:
    for name, member in session.roster.members.items():
        version = member.hello.get("version")
        if version != __version__:
            raise FederationError(
                f"client {name!r} runs fedexact {version}, the server {__version__}: install the "
                "same version everywhere"
            )


def _spec(experiment: Experiment) -> Spec:
    data = experiment.data
    assert data.target is not None
    standardize = data.standardize
    return Spec(
        target=data.target,
        features=data.features or Features(),
        missing=data.missing,
        standardize=tuple(standardize) if isinstance(standardize, list) else standardize,
    )


def _agree_on_rows(session: Session, experiment: Experiment, spec: Spec) -> None:
    """Columns, levels and exact moments; then the objective."""
    hellos = {name: session.roster.members[name].hello for name in session.names}
    described = {n: Description.from_meta(h.get("description", {}), n) for n, h in hellos.items()}
    schema = agree(spec, described)
    columns = list(schema.feature_names)
    n_rows = np.array([described[name].complete for name in session.names])
    asked = experiment.problem.build_loss()
    meta = {"schema": schema.to_meta(), "classes": asked == Multinomial.name}

    def read(name: str, content: Content) -> Sums:
        return Sums.from_arrays(content.arrays, columns, described[name].complete, name)

    def accept(name: str, content: Content) -> None:
        try:
            read(name, content)
            if meta["classes"]:
                check_count(f"client {name!r}: the number of classes", content.meta.get("classes"))
        except InputError as error:
            raise RefusedError(sums.MALFORMED, str(error)) from None

    replies = session.everybody(lambda k: Content("moments", meta), accept)
    each = [read(name, reply) for name, reply in zip(session.names, replies, strict=True)]
    moments: Moments = pooled_moments(each, columns, spec.standardize)
    loss = make_loss(asked, n_classes=max(int(r.meta.get("classes", 0)) for r in replies))
    _define(session, experiment, loss, columns, n_rows)
    objective = session.objective
    session.agreement |= {
        "schema": schema.to_meta(),
        "moments": {name: array.tolist() for name, array in moments.to_arrays().items()},
        "prox_method": prox_method(loss, objective.dim, int(n_rows.max()), len(n_rows)),
    }


def _agree_on_oracles(session: Session, experiment: Experiment) -> None:
    """The number of coefficients; the sites compute with objects of their own."""
    hellos = [session.roster.members[name].hello for name in session.names]
    dims = {name: int(hello["dim"]) for name, hello in zip(session.names, hellos, strict=True)}
    if len(set(dims.values())) != 1:
        raise InputError(f"the oracles differ in their number of coefficients: {dims}")
    columns = [f"x[{j}]" for j in range(dims[session.names[0]])]
    n_rows = np.array([int(hello["rows"]) for hello in hellos])
    _define(session, experiment, _AtTheSites(_at_the_sites), columns, n_rows)


def _define(
    session: Session, experiment: Experiment, loss: Loss, columns: list[str], n_rows: np.ndarray
) -> None:
    settings = experiment.problem.settings(session.names, columns)
    columns = ["intercept", *columns] if settings["fit_intercept"] else columns
    objective = RemoteObjective(session.ask, loss, session.names, columns, n_rows, **settings)
    session.objective = objective
    session.agreement = {
        "loss": None if isinstance(loss, CustomLoss) else to_meta(loss),
        "ridge": objective.ridge.tolist(),
        "l2": objective.l2,
        "reduction": objective.reduction,
        "fit_intercept": objective.fit_intercept,
    }


class _AtTheSites(CustomLoss):
    """The loss of objects, which know their smoothness."""

    global_smooth = True


def _at_the_sites(x: Any, rows: Any) -> Any:
    raise InputError("the objective is known to the sites only")


def _some_rows(objective: RemoteObjective, method: str) -> Any:
    """Two rows of zeros, for shapes."""
    p = objective.n_features
    client = Clients.of([(np.zeros((2, p)), np.zeros(2))])
    return lone_part(
        client, objective.loss, objective.ridge, 1.0, (1.0, 1.0), method, prox=True
    ).oracles


class _AnyObjective:
    """An object oracle of a given dimension, for shapes."""

    def __init__(self, dim: int) -> None:
        self.n_rows, self.dim, self.smoothness = 1, dim, 1.0

    def value(self, x: np.ndarray) -> float:
        return 0.0

    def grad(self, x: np.ndarray) -> np.ndarray:
        return np.zeros(self.dim)

    def stochastic_grad(self, x: np.ndarray, seed: int, batch_size: int) -> np.ndarray:
        return np.zeros(self.dim)

    def hessian(self, x: np.ndarray) -> np.ndarray:
        return np.zeros((self.dim, self.dim))


# --- checking replies -----------------------------------------------------------------------------


def _check_constants(name: str, content: Content) -> None:
    number = jax.ShapeDtypeStruct((), np.dtype(float))
    sums.check(content, {"L": number, "l": number})
    if not 0 <= float(content.arrays["l"]) <= float(content.arrays["L"]):
        raise RefusedError(sums.MALFORMED, "L and l must be numbers with 0 <= l <= L")


def _fields(arrays: Mapping[str, np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    return {(int(i), int(j)): array for key, array in arrays.items() for i, j in [key.split("/")]}


def _outcomes(calls: Sequence[Call], found: list[dict[tuple[int, int], np.ndarray]]) -> list[Any]:
    """The outcome of each call from the clients' arrays."""
    outcomes = []
    for i, call in enumerate(calls):
        each = [_of_call(arrays, i) for arrays in found]
        outcomes.append(collected(call.over, each))
    return outcomes


def _of_call(arrays: Mapping[tuple[int, int], np.ndarray], i: int) -> Any:
    parts = [arrays[key] for key in sorted(arrays) if key[0] == i]
    return tuple(parts) if len(parts) > 1 else parts[0]


def _reasons(failures: Mapping[str, Failure]) -> str:
    return "; ".join(f"{f.reason} ({f.code})" for f in failures.values())
