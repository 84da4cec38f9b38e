"""What a site does with a message: it reads its rows, computes, keeps its state, answers.

Under Flower every message meets a new process, so whatever a site has to remember lies in its state
folder: its key, its identity, and one store for each run. Rows never leave; what does is listed in
the answers below.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from fedexact import __version__
from fedexact.clients import Clients
from fedexact.core import Algorithm, client_key, in_float64, root_key
from fedexact.data import Moments, Schema, Spec, describe, encode
from fedexact.deploy.messages import BAD_DATA, BAD_REQUEST, FOREIGN, FULL, Content, RefusedError
from fedexact.deploy.oracles import ObjectOracle, load
from fedexact.deploy.records import from_meta
from fedexact.deploy.secure import Announcement, masked, private_key, public_bytes
from fedexact.deploy.sources import Source, read
from fedexact.deploy.store import NEVER, Counted, Store, Version
from fedexact.devices import cache_programs
from fedexact.engines import loop
from fedexact.engines.state import visit
from fedexact.errors import FedexactError, InputError
from fedexact.files import write_atomic
from fedexact.losses import Loss
from fedexact.objective import SUMMABLE
from fedexact.oracles import RowOracle, Stack
from fedexact.parts import lone_part
from fedexact.problem import Problem
from fedexact.result import by_field, from_fields

Arrays = dict[str, np.ndarray]
LOG = logging.getLogger(__name__)

OVER = ("sum_over_rows", "sum_over_clients", "map_clients")  # see Objective
_RUN = re.compile(r"[0-9a-f]{1,64}")  # the name of a run, which becomes that of a folder
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NUMBER = re.compile(r"(?<!\w)[+-]?(?:\d[\w.+-]*|(?:nan|inf)\b)", re.IGNORECASE)


class SiteConfig(NamedTuple):
    """The node's config."""

    client: str
    state: Path
    source: Source | None
    oracle: str | None

    @staticmethod
    def from_mapping(config: Mapping[str, Any]) -> SiteConfig:
        """From the keys client-id, state-dir, and data (with table or query) or oracle.
        InputError for a key that is missing or unknown."""
        known = {"client-id", "state-dir", "data", "table", "query", "oracle"}
        for key in config:
            if key not in known:
                keys = ", ".join(sorted(known))
                raise InputError(f"node config: {key!r} is unknown; keys: {keys}")
        for key in ("client-id", "state-dir"):
            if not config.get(key):
                raise InputError(f"node config: {key} is missing")
        if ("data" in config) == ("oracle" in config):
            raise InputError("node config: give data (the site's rows) or oracle, one of them")
        rows = {key: config[key] for key in ("data", "table", "query") if key in config}
        return SiteConfig(
            str(config["client-id"]), Path(str(config["state-dir"])),
            Source.from_mapping(rows) if rows else None,
            str(config["oracle"]) if "oracle" in config else None,
        )  # fmt: skip


class Site:
    """Answers messages. What it reads and builds is kept for the messages that follow."""

    def __init__(self, config: SiteConfig) -> None:
        self.config, self.name = config, config.client
        self._kept: dict[str, Any] = {}

    @in_float64
    def answer(self, request: Content) -> Content:
        """The reply; for a request that cannot be met one of the kind "refused"."""
        try:
            cache_programs(self.config.state / "programs")
            kinds = {
                "hello": self._hello, "moments": self._moments, "constants": self._constants,
                "train": self._train, "query": self._query,
            }  # fmt: skip
            if request.kind not in kinds:
                raise RefusedError(BAD_REQUEST, f"unknown kind {request.kind!r}")
            meta, arrays = kinds[request.kind](request)
            return Content(request.kind, {"client": self.name, **meta}, arrays)
        except RefusedError as refusal:
            return self._refused(refusal)
        except FedexactError as error:
            LOG.warning("client %r: %s", self.name, error)
            return self._refused(RefusedError(BAD_DATA, self._shareable(str(error), request)))
        except OSError as error:
            reason = f"client {self.name!r} cannot write its state: {error.strerror or error}"
            return self._refused(RefusedError(FULL, reason))
        except Exception as error:  # the server must hear of whatever goes wrong
            LOG.exception("client %r", self.name)
            reason = f"client {self.name!r}: {type(error).__name__} (in full in its log)"
            return self._refused(RefusedError(BAD_REQUEST, reason))

    def _refused(self, refusal: RefusedError) -> Content:
        content = refusal.content()
        return content._replace(meta={**content.meta, "client": self.name})

    def _shareable(self, reason: str, request: Content) -> str:
        """The reason without what may be a cell: numbers, and quoted texts that are neither names
        of columns nor in the request. The whole of it is in the site's log."""
        table = self._kept.get("table")
        columns = table.column_names if table is not None else ()
        known = {repr(name) for name in (self.name, *columns, *_texts(request.meta))}
        told, end = "", 0
        for quoted in _QUOTED.finditer(reason):
            told += _NUMBER.sub("(...)", reason[end : quoted.start()])
            told += quoted[0] if quoted[0] in known else "(...)"
            end = quoted.end()
        told += _NUMBER.sub("(...)", reason[end:])
        return f"client {self.name!r}: {told} (in full in its log)"

    # --- before round 0 -------------------------------------------------------------------------

    def _hello(self, request: Content) -> tuple[dict[str, Any], Arrays]:
        """Who it is, and what its table looks like: columns, levels, counts; no rows."""
        state = self.config.state
        with Store(state, self.name).locked():
            key = public_bytes(private_key(state)).hex()
            meta = {"identity": self._identity(), "key": key, "version": __version__}
        if request.meta.get("spec") is None:
            return meta | {"rows": int(self._object().n_rows), "dim": int(self._object().dim)}, {}
        spec = Spec.from_meta(request.meta["spec"])
        return meta | {"description": describe(self._table(), spec, self.name).to_meta()}, {}

    def _identity(self) -> str:
        """Tells this state folder from any other. RefusedError if it is another client's."""
        path = self.config.state / "identity"
        if not path.is_file():
            write_atomic(path, json.dumps([secrets.token_hex(16), self.name]))
        identity, owner = json.loads(path.read_text(encoding="utf-8"))
        if owner != self.name:
            raise RefusedError(
                FOREIGN,
                f"the state folder of client {self.name!r} is that of {owner!r}: give each client "
                "its own",
            )
        return identity

    def _moments(self, request: Content) -> tuple[dict[str, Any], Arrays]:
        """Sums and sums of squares of its columns; where targets are numbered classes, how many."""
        encoded = encode(self._table(), Schema.from_meta(request.meta["schema"]), self.name)
        meta = {"classes": int(np.max(encoded.y)) + 1} if request.meta["classes"] else {}
        return meta, encoded.sums().to_arrays()

    def _constants(self, request: Content) -> tuple[dict[str, Any], Arrays]:
        """Smoothness and strong convexity of its objective."""
        if self.config.oracle is not None:
            oracle = self._oracle(request.meta["objective"])
            L, l = oracle.smoothness, oracle.strong_convexity  # noqa: E741
        else:
            L, l = self._problem(request.meta["objective"]).smoothness()  # noqa: E741
        return {}, {"L": np.reshape(L, ()), "l": np.reshape(l, ())}

    # --- rounds ---------------------------------------------------------------------------------

    def _train(self, request: Content) -> tuple[dict[str, Any], Arrays]:
        """One visit: the upload, the objective and its gradient at the model, row gradients."""
        meta, arrays = request.meta, request.arrays
        algorithm, oracle = _algorithm(meta["algorithm"]), self._oracle(meta["objective"])
        x = jnp.asarray(arrays["x"])
        like = algorithm.init_client(x)
        epoch, round, counted = int(meta["epoch"]), int(meta["round"]), int(meta["counted"])

        def initial() -> Arrays:
            return by_field(algorithm.init_client(jnp.asarray(arrays["x0"])))

        if not _RUN.fullmatch(str(meta["run"])):
            raise RefusedError(BAD_REQUEST, f"{meta['run']!r} is no name of a run")
        store = Store(self.config.state / str(meta["run"]), self.name)
        asked = _digest(request)
        with store.locked():
            self._check_rows(store.folder / "rows", oracle)
            if jax.tree.leaves(like):
                version = store.open(epoch, round, Counted(counted, meta["visit"]), initial)
            else:  # an algorithm without client states has none to lose
                version = Version(epoch, NEVER, {})
            client = jax.tree.map(jnp.asarray, from_fields(like, version.arrays, "client"))
            if algorithm.receives and version.round != NEVER:
                client = loop.receive(algorithm, client, jnp.asarray(arrays["received"]))
            pulled = _pulled(algorithm, x, int(meta["n_clients"]), arrays)
            key = (root_key(int(meta["seed"])), round, int(meta["k"]))
            local = self._local(algorithm, oracle, meta)
            new, upload, rows = local(client, pulled, *key)
            if jax.tree.leaves(like):
                store.put(Version(epoch, round, by_field(new), asked))
        value, grad = self._value_and_grad(oracle, meta)(x)
        sent = {
            **{f"upload/{name}": array for name, array in by_field(upload).items()},
            "value": np.asarray(value), "grad": np.asarray(grad), "rows": np.asarray(rows, float),
        }  # fmt: skip
        return {"round": round, "epoch": epoch, "visit": asked}, self._masked(sent, meta)

    def _local(
        self, algorithm: Algorithm, oracle: Stack | ObjectOracle, meta: Mapping[str, Any]
    ) -> Callable[..., tuple[Any, Any, Any]]:
        """(client, pulled, root, round, k) -> the visit that the loop engine would make."""
        if isinstance(oracle, Stack):
            return lambda client, pulled, *key: loop.local(algorithm, client, pulled, oracle, *key)
        as_rows = cast(RowOracle, oracle)

        def local(client: Any, pulled: Any, root: jax.Array, round: Any, k: Any) -> Any:
            return visit(algorithm, client, pulled, as_rows, client_key(root, round, k))

        about = {"algorithm": meta["algorithm"], "objective": meta["objective"]}
        return self._keep("visit", about, lambda: jax.jit(local))

    def _value_and_grad(
        self, oracle: Stack | ObjectOracle, meta: Mapping[str, Any]
    ) -> Callable[[jax.Array], tuple[Any, Any]]:
        if isinstance(oracle, Stack):
            return lambda x: _at(oracle, x)
        return self._keep("value", meta["objective"], lambda: jax.jit(oracle.value_and_grad))

    def _check_rows(self, path: Path, oracle: Stack | ObjectOracle) -> None:
        """Refuses rows that are others than in the first visit of the run."""
        if not isinstance(oracle, Stack):
            return
        digest = hashlib.blake2b(digest_size=16)
        for array in (oracle.X, oracle.y):
            digest.update(np.ascontiguousarray(array).data)
        if not path.is_file():
            write_atomic(path, digest.hexdigest())
        elif path.read_text() != digest.hexdigest():
            raise RefusedError(
                BAD_DATA, f"client {self.name!r}: its rows have changed since the run began"
            )

    def _query(self, request: Content) -> tuple[dict[str, Any], Arrays]:
        """Sums over its rows that the server may ask for by name: values, gradients, Hessians."""
        problem, sent = self._any_problem(request.meta["objective"]), {}
        for i, call in enumerate(request.meta["calls"]):
            if call["fn"] not in SUMMABLE or call["over"] not in OVER:
                raise RefusedError(BAD_REQUEST, f"there is no sum called {call['fn']!r}")
            args = [request.arrays[f"{i}/{j}"] for j in range(call["args"])]
            fn = SUMMABLE[call["fn"]]
            if call["over"] == "map_clients":
                found = problem.map_clients(fn, shared=tuple(args))
            else:
                found = getattr(problem, call["over"])(fn, *args)
            parts = found if isinstance(found, tuple) else (found,)
            sent |= {f"{i}/{j}": np.asarray(part) for j, part in enumerate(parts)}
        return {}, self._masked(sent, request.meta)

    def _masked(self, sent: Arrays, meta: Mapping[str, Any]) -> Arrays:
        """What is sent; as one masked vector where the server announced a secure sum."""
        if meta.get("secure") is None:
            return sent
        announcement = Announcement.from_meta(meta["secure"])
        vector = np.concatenate([np.ravel(array).astype(float) for array in sent.values()])
        try:
            limbs = masked(vector, self.name, private_key(self.config.state), announcement)
        except InputError as error:  # the message may name a value, which must not leave
            LOG.warning("client %r: %s", self.name, error)
            raise RefusedError(
                BAD_DATA, f"client {self.name!r} cannot mask its upload; the reason is in its log"
            ) from None
        return {"masked": limbs}

    # --- rows and oracles -----------------------------------------------------------------------

    def _table(self) -> pa.Table:
        if self.config.source is None:
            raise InputError("the server asks for rows; this node is configured with an oracle")
        if "table" not in self._kept:
            self._kept["table"] = read(self.config.source)
        return self._kept["table"]

    def _object(self) -> Any:
        if self.config.oracle is None:
            raise InputError("the server asks for an oracle; this node is configured with rows")
        if "object" not in self._kept:
            sys.path.insert(0, os.getcwd())
            self._kept["object"] = load(self.config.oracle)
        return self._kept["object"]

    def _rows(self, agreed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """X, standardised as agreed, and y."""
        schema = Schema.from_meta(agreed["schema"])
        encoded = encode(self._table(), schema, self.name)
        if len(encoded.y) != agreed["rows"]:
            raise InputError(
                f"client {self.name!r}: its rows have changed since the columns were agreed; start "
                "the federation again"
            )
        arrays = {name: np.asarray(values) for name, values in agreed["moments"].items()}
        return Moments.from_arrays(arrays, schema.feature_names).apply(encoded.X), encoded.y

    def _problem(self, agreed: Mapping[str, Any]) -> Problem:
        """The site's own part of the problem, as a problem of one client."""

        def make() -> Problem:
            X, y = self._rows(agreed)
            loss = cast(Loss, from_meta(agreed["loss"]))
            settings = {name: agreed[name] for name in ("l2", "reduction", "fit_intercept")}
            return Problem(
                [(X, y)], loss=loss, weights=[agreed["weight"]], names=[self.name], shards=1,
                **settings,
            )  # fmt: skip

        return self._keep("problem", agreed, make)

    def _any_problem(self, agreed: Mapping[str, Any]) -> Any:
        if self.config.oracle is None:
            return self._problem(agreed)
        return _ObjectProblem(cast(ObjectOracle, self._oracle(agreed)))

    def _oracle(self, agreed: Mapping[str, Any]) -> Stack | ObjectOracle:
        """What an algorithm computes with."""

        def make() -> Stack | ObjectOracle:
            if self.config.oracle is not None:
                return ObjectOracle(self._object(), float(agreed["weight"]))
            X, y = self._rows(agreed)
            loss, client = cast(Loss, from_meta(agreed["loss"])), Clients.of([(X, y)])
            if agreed["fit_intercept"]:
                client = client.with_intercept()
            client = client.with_targets(loss.check_targets(y, f"client {self.name!r}"))
            n = len(y) if agreed["reduction"] == "mean" else 1.0
            return lone_part(
                client, loss, np.asarray(agreed["ridge"]), agreed["weight"] / n,
                (agreed["L"], agreed["l"]), agreed["prox_method"], prox=True,
            ).oracles  # fmt: skip

        return self._keep("oracle", agreed, make)

    def _keep(self, what: str, agreed: Mapping[str, Any], make: Any) -> Any:
        """What has been made for the agreement last seen, or else anew."""
        about = json.dumps(agreed, sort_keys=True)
        kept = self._kept.get(what)
        if kept is None or kept[0] != about:
            self._kept[what] = kept = (about, make())
        return kept[1]


class _ObjectProblem:
    """Sums over one site that has an oracle instead of rows."""

    def __init__(self, oracle: ObjectOracle) -> None:
        self._oracle = oracle

    def sum_over_rows(self, fn: Any, *args: np.ndarray) -> Any:
        found = getattr(ObjectOracle, fn.__name__)(self._oracle, *(jnp.asarray(a) for a in args))
        return jax.tree.map(np.asarray, found)

    sum_over_clients = sum_over_rows


def _digest(request: Content) -> str:
    """Of all that a visit depends on: what differs in it is another visit."""
    meta = {name: value for name, value in request.meta.items() if name != "secure"}
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name, array in sorted(request.arrays.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _texts(meta: Any) -> list[str]:
    """All texts in a message."""
    if isinstance(meta, str):
        return [meta]
    if isinstance(meta, Mapping):
        return [text for item in meta.items() for text in _texts(item)]
    parts = meta if isinstance(meta, list | tuple) else ()
    return [text for part in parts for text in _texts(part)]


def _algorithm(meta: Any) -> Algorithm:
    algorithm = from_meta(meta)
    if not isinstance(algorithm, Algorithm):
        raise RefusedError(BAD_REQUEST, f"{meta!r} is no algorithm")
    return algorithm


def _pulled(algorithm: Algorithm, x: jax.Array, N: int, arrays: Mapping[str, np.ndarray]) -> Any:
    """The broadcast, in the structure that the algorithm gives it."""
    like = jax.eval_shape(lambda x: algorithm.pull(algorithm.init_server(x, N), jnp.asarray(0)), x)
    fields = {
        name.removeprefix("pulled/"): array
        for name, array in arrays.items()
        if name.startswith("pulled/")
    }
    return jax.tree.map(jnp.asarray, from_fields(like, fields, "pulled"))


@jax.jit
def _at(alone: Stack, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return alone.client(0, 0).value_and_grad(x)
