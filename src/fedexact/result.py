"""What a run leaves behind, and how it is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from fedexact.certificate import Certificate
from fedexact.core import Algorithm, Exactness
from fedexact.errors import InputError
from fedexact.files import atomic_path

FORMAT = 1

HISTORY = pa.schema(
    [
        ("round", pa.int64()),  # rounds done
        ("participants", pa.int64()),  # in the last of them
        ("uploads", pa.int64()),  # so far; so are the bytes and the gradients
        ("bytes_up", pa.int64()),
        ("bytes_down", pa.int64()),
        ("gradient_evaluations", pa.int64()),  # rows whose gradient was computed
        ("objective", pa.float64()),  # F + g
        ("gradient_mapping", pa.float64()),  # norm
        ("distance", pa.float64()),  # |x - reference|_2, null without a reference
        ("distance_se", pa.float64()),  # max_j |x_j - reference_j| / SE_j, null without SEs
        # null without diagnostics=True, or where the clients have no models of their own:
        (
            "local_distance",
            pa.float64(),
        ),  # sqrt(mean_k |x_k - x|^2), from the model to the clients'
        ("local_change", pa.float64()),  # sqrt(mean_k |x_k - x_k before|^2) of the last round
    ]
)

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of `fx.solve`.

    Attributes:
        x: (d,) the model; the last good one if the run diverged.
        algorithm: its name.
        hyperparameters: all of them, with the chosen values.
        chosen: those that were left out and chosen from the constants and the participation.
        exactness: exact or biased by theory, and why.
        rounds: rounds done.
        status: "finished" (all rounds), "tolerance" (tol reached), "diverged" or "interrupted".
        message: what the status means and what to do.
        history: a pyarrow Table, one row per recorded round; see `HISTORY` for its columns.
        certificate: how far x can be from the pooled answer; None for an interrupted run.
        never_present: names of the clients that took part in no round.
        server, clients: the state by field; clients stacked in client order, (N, ...).
        invariant: largest modulus of what the algorithm conserves at zero.
        run: what identifies the run (seed, participation, target, ...), checked by `resume=`.
    """

    x: np.ndarray
    algorithm: str
    hyperparameters: dict[str, Any]
    chosen: dict[str, Any]
    exactness: Exactness
    rounds: int
    status: str
    message: str
    history: pa.Table
    certificate: Certificate | None
    never_present: list[str]
    server: Arrays
    clients: Arrays
    invariant: float
    run: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to one file (NumPy's npz), atomically."""
        values = {name: getattr(self, name) for name in _PLAIN}
        values["certificate"] = self.certificate.to_dict() if self.certificate else None
        meta = json.dumps({"format": FORMAT, **values}, default=_to_json)
        arrays = {"x": self.x, "meta": np.array(meta), "history": _table_to_bytes(self.history)}
        for side in ("server", "clients"):
            arrays |= {f"{side}/{name}": a for name, a in getattr(self, side).items()}
        with atomic_path(path) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Result:
        """Reads what `save` wrote; InputError for another file."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            meta = json.loads(str(arrays.pop("meta")))
        except FileNotFoundError:
            raise InputError(f"there is no saved result at {path}") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is not a saved result of fedexact ({error})") from None
        if meta.get("format") != FORMAT:
            raise InputError(f"{path} has format {meta.get('format')}, this version reads {FORMAT}")
        certificate = meta["certificate"]
        return Result(
            **{name: meta[name] for name in _PLAIN if name != "exactness"},
            exactness=Exactness(*meta["exactness"]),
            x=arrays.pop("x"),
            history=_table_from_bytes(arrays.pop("history")),
            certificate=Certificate.from_dict(certificate) if certificate else None,
            server=_with_prefix(arrays, "server/"),
            clients=_with_prefix(arrays, "clients/"),
        )

    def __str__(self) -> str:
        lines = [f"{self.algorithm}: {self.message}"]
        if self.chosen:
            chosen = (f"{name} = {_short(value)}" for name, value in self.chosen.items())
            lines.append("chosen: " + ", ".join(chosen))
        lines.append(str(self.certificate) if self.certificate else "no certificate")
        return "\n".join(lines)


_PLAIN = (
    "algorithm", "hyperparameters", "chosen", "exactness", "rounds", "status", "message",
    "never_present", "invariant", "run",
)  # fmt: skip


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot save a {type(value)}")


def _table_to_bytes(table: pa.Table) -> np.ndarray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _table_from_bytes(data: np.ndarray) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(data.tobytes())).read_all()


def _with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    return {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}


def fields_of(state: Any) -> dict[str, Any]:
    """The leaves of a state, or of a tree of shapes, by field name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def by_field(state: Any) -> Arrays:
    """A state as NumPy arrays by field name."""
    return {name: np.asarray(leaf) for name, leaf in fields_of(state).items()}


def from_fields(like: Any, fields: Arrays, what: str) -> Any:
    """The state of the structure of `like` with these arrays; InputError if they do not fit."""
    expected = fields_of(like)
    if {k: a.shape for k, a in expected.items()} != {k: a.shape for k, a in fields.items()}:
        raise InputError(f"resume: the {what} state does not fit this algorithm and problem")
    return jax.tree.unflatten(jax.tree.structure(like), [fields[name] for name in expected])


def hyperparameters(algorithm: Algorithm) -> dict[str, Any]:
    """By name; a regulariser in words, an algorithm inside another by its own names."""
    values = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, Algorithm):
            values[field.name] = value.name
            inner = hyperparameters(value).items()
            values |= {f"{field.name}.{name}": part for name, part in inner}
        else:
            values[field.name] = _in_words(value)
    return values


def _in_words(value: Any) -> Any:
    if hasattr(value, "describe"):
        return value.describe()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
