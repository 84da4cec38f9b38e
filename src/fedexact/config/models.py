"""Experiments as TOML files: what may stand in them, and how they become objects.

    title, rounds, tol, seeds, record_every, precision
    [data]           bundled | csv | parquet | libsvm | folder; client, missing, standardize, ...
    [data.target]    column, above | equals                 (or target = "column")
    [data.features]  columns, exclude, categorical, reference     (or features = [...])
    [data.partition] name = "dirichlet" or another, its arguments
    [problem]        loss, regularizer, l2, weights, reduction, fit_intercept
    [participation]  name = "bernoulli" or another, its arguments, per client in order or by name
    [[algorithms]]   name = "FOCUS" or another, its hyperparameters; label
    [deploy]         how it runs across machines: clients, algorithms, rounds, deadline, quorum, ...

Names and arguments are those of the registries, the only place where they are listed.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedexact import data
from fedexact.algorithms import ALGORITHMS
from fedexact.config.records import (
    PATH,
    arguments_of,
    as_table,
    by_name,
    check_keys,
    check_record,
    find,
    has_names,
    make_named,
    make_record,
    record_fields,
    with_inner,
)
from fedexact.core import Algorithm
from fedexact.data import PARTITIONS, Features, Federation, Target
from fedexact.data.tables import existing
from fedexact.errors import InputError
from fedexact.losses import LOSSES
from fedexact.objective import Objective
from fedexact.participation import PARTICIPATIONS, Participation
from fedexact.problem import Problem
from fedexact.regularizers import REGULARIZERS
from fedexact.result import Result

Registry = Mapping[str, type]

# --- validators -----------------------------------------------------------------------------------


def _named(registry: Registry) -> AfterValidator:
    """A table `name` + arguments: made on the spot to find errors early, unless it needs names of
    clients or columns, which are not known yet."""

    def check(table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        cls, where = find(registry, table)
        table = _absolute(cls, table, info)
        arguments = with_inner(registry, cls, arguments_of(table), where)
        if has_names(arguments):
            check_record(cls, arguments, where)
        else:
            make_record(cls, arguments, where)
        return table

    return AfterValidator(check)


def _check_loss(table: dict[str, Any]) -> dict[str, Any]:
    cls, where = find(LOSSES, table)
    if len(table) > 1:  # the name alone is enough for any loss
        make_record(cls, arguments_of(table), where)
    return table


def _absolute(cls: type, table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    paths = {name for name, allowed in record_fields(cls).items() if PATH in allowed}
    return {
        key: _from_base(value, info) if key in paths and isinstance(value, str) else value
        for key, value in table.items()
    }


def _from_base(path: str, info: ValidationInfo) -> str:
    """A path relative to the experiment's file, as an absolute one."""
    return str((info.context or Path.cwd()) / path)


def _record(cls: type, short: str) -> BeforeValidator:
    """A record from a table, or from the value of its field `short` alone."""

    def make(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        table = value if isinstance(value, dict) else {short: value}
        return make_record(cls, table, "")

    return BeforeValidator(make)


FilePath = Annotated[str, AfterValidator(_from_base)]
TargetField = Annotated[Target, _record(Target, "column")]
FeaturesField = Annotated[Features, _record(Features, "columns")]
PartitionField = Annotated[dict[str, Any], BeforeValidator(as_table), _named(PARTITIONS)]
LossField = Annotated[dict[str, Any], BeforeValidator(as_table), AfterValidator(_check_loss)]
RegularizerField = Annotated[dict[str, Any], BeforeValidator(as_table), _named(REGULARIZERS)]
ParticipationField = Annotated[dict[str, Any], BeforeValidator(as_table), _named(PARTICIPATIONS)]
AlgorithmField = Annotated[dict[str, Any], BeforeValidator(as_table), _named(ALGORITHMS)]
Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    """A table of the file; a key that is not known is refused with the nearest one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_keys(value, cls.model_fields, "")
        return value


# --- the tables -----------------------------------------------------------------------------------

SOURCES = ("bundled", "csv", "parquet", "libsvm", "folder", "sites")


class DataTable(_Table):
    """[data]: which file, and which column is what."""

    bundled: str | None = None
    csv: FilePath | None = None
    parquet: FilePath | None = None
    libsvm: FilePath | None = None
    folder: FilePath | None = None
    sites: Literal["rows", "oracles"] | None = None
    client: str | None = None
    target: TargetField | None = None
    features: FeaturesField | None = None
    partition: PartitionField | None = None
    missing: Literal["drop", "error"] = "drop"
    missing_values: list[str] | None = None
    delimiter: str | None = None
    n_features: Count | None = None
    standardize: bool | Literal["scale"] | list[str] = False

    @model_validator(mode="after")
    def _one_source(self) -> DataTable:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise InputError(f"give one of {', '.join(SOURCES)}, {found}")
        source = given[0]
        for key in sorted(self._given() - _ACCEPTS[source] - {source}):
            raise InputError(f"{key} does not go with {source}")
        if source != "libsvm" and self.sites != "oracles" and self.target is None:
            raise InputError("target is missing: which column is to be explained?")
        return self

    def _given(self) -> set[str]:
        return {
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }

    def federation(self) -> Federation:
        """Reads the data and makes the clients. Raises InputError."""
        given = {name: getattr(self, name) for name in self._given()}
        source = next(name for name in SOURCES if name in given)
        path = given.pop(source)
        if source == "sites":
            raise InputError("data: the rows lie at the sites; run it with `fedexact deploy`")
        if self.partition is not None:
            given["partition"] = make_named(PARTITIONS, self.partition, "data.partition")
        return _READERS[source](path, **given)


_COMMON = {"target", "features", "missing", "standardize"}
_ACCEPTS = {
    "bundled": _COMMON | {"client", "partition"},
    "csv": _COMMON | {"client", "partition", "missing_values", "delimiter"},
    "parquet": _COMMON | {"client", "partition"},
    "folder": _COMMON | {"missing_values", "delimiter"},
    "libsvm": {"target", "partition", "n_features", "standardize"},
    "sites": _COMMON,
}
_READERS = {
    "bundled": data.bundled,
    "csv": data.from_csv,
    "parquet": data.from_parquet,
    "folder": data.from_folder,
    "libsvm": data.from_libsvm,
}


class ProblemTable(_Table):
    """[problem]: the arguments of `fx.Problem`."""

    loss: LossField | None = None
    regularizer: RegularizerField | None = None
    l2: Annotated[float, Field(ge=0)] = 0.0
    weights: str | list[float] | dict[str, float] = "rows"
    reduction: Literal["mean", "sum"] = "mean"
    fit_intercept: bool = False

    def build(self, federation: Federation) -> Problem:
        """The problem on these clients. Raises InputError."""
        return federation.problem(
            loss=self.build_loss(), **self.settings(federation.names, federation.feature_names)
        )

    def build_loss(self) -> Any:
        """The loss, or its name where it has no arguments. Raises InputError."""
        if self.loss is None:
            raise InputError("problem.loss: is missing")
        return make_named(LOSSES, self.loss, "problem.loss") if len(self.loss) > 1 else self.name

    @property
    def name(self) -> str:
        """Of the loss."""
        return "" if self.loss is None else str(self.loss["name"])

    def settings(self, names: Sequence[str], feature_names: Sequence[str]) -> dict[str, Any]:
        """The other arguments of `fx.Problem` for these clients and columns. Raises InputError."""
        regularizer, weights = None, self.weights
        if self.regularizer is not None:
            where = "problem.regularizer"
            regularizer = make_named(REGULARIZERS, self.regularizer, where, feature_names)
        if isinstance(weights, dict):
            weights = by_name(weights, names, "problem.weights")
        return {
            "regularizer": regularizer,
            "l2": self.l2,
            "weights": weights,
            "reduction": self.reduction,
            "fit_intercept": self.fit_intercept,
        }


class DeployTable(_Table):
    """[deploy]: what differs when the experiment runs across machines.

    clients: names of the members, in order; those that say hello if left out.
    algorithms, participation, rounds, tol: instead of the experiment's; whom a round invites is by
        default everybody.
    wait: seconds for all members to say hello; deadline: seconds of a round.
    quorum: uploads without which a round does not count; any number if left out.
    secure: the server sees sums only.
    lost: what follows when a site has lost its state: "restart" from the model reached, or "refuse"
        the site.
    start: a saved result, whose model the run starts from: after members have joined or left.
    check_every: rounds between two passes over all rows, where rounds are not such passes already.
    """

    clients: Annotated[list[str], Field(min_length=1)] | None = None
    algorithms: Annotated[list[AlgorithmField], Field(min_length=1)] | None = None
    participation: ParticipationField = {"name": "full"}
    rounds: Count | None = None
    tol: Annotated[float, Field(gt=0)] | None = None
    wait: Annotated[float, Field(gt=0)] = 300.0
    deadline: Annotated[float, Field(gt=0)] = 180.0
    quorum: Count | None = None
    secure: bool = False
    lost: Literal["restart", "refuse"] = "restart"
    start: FilePath | None = None
    check_every: Count = 10

    @model_validator(mode="after")
    def _no_doubles(self) -> DeployTable:
        _check_distinct(self.clients or [], "clients")
        return self


class Experiment(_Table):
    """A whole experiment file."""

    title: str = ""
    rounds: Count = 1000
    tol: Annotated[float, Field(gt=0)] | None = None
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)] = [0]
    record_every: Count | None = None
    precision: Literal["double", "single"] = "double"
    data: DataTable
    problem: ProblemTable
    participation: ParticipationField = {"name": "full"}
    algorithms: Annotated[list[AlgorithmField], Field(min_length=1)]
    deploy: DeployTable | None = None

    @model_validator(mode="after")
    def _has_a_loss(self) -> Experiment:
        if self.data.sites != "oracles":
            self.problem.build_loss()
        return self

    @model_validator(mode="after")
    def _no_doubles(self) -> Experiment:
        _check_distinct(self.seeds, "seeds")
        _check_distinct(self.labels, "algorithms", "; give one of them another label")
        return self

    @property
    def labels(self) -> list[str]:
        """What each algorithm is called in tables and figures: its label, or else its name."""
        return [str(table.get("label", table["name"])) for table in self.algorithms]

    def with_seeds(self, seeds: Sequence[int]) -> Experiment:
        """The same experiment with other seeds. Raises InputError for one given twice."""
        _check_distinct(seeds, "seeds")
        return self.model_copy(update={"seeds": list(seeds)})

    def deployed(self) -> Experiment:
        """The experiment with what [deploy] puts in place of its own settings."""
        if self.precision != "double":
            raise InputError("precision: a federation across machines computes in double precision")
        deploy = self.deploy or DeployTable()
        replaced = {
            name: value
            for name in ("algorithms", "participation", "rounds", "tol")
            if (value := getattr(deploy, name)) is not None
        }
        found = self.model_copy(update={**replaced, "deploy": deploy, "seeds": self.seeds[:1]})
        _check_distinct(found.labels, "deploy.algorithms", "; give one of them another label")
        return found

    def build_algorithms(self) -> dict[str, Algorithm]:
        """The algorithms by label, with hyperparameters as given."""
        built = (make_named(ALGORITHMS, table, "algorithms") for table in self.algorithms)
        return dict(zip(self.labels, built, strict=True))

    def build_participation(self, problem: Objective) -> Participation:
        """Who takes part, checked against the clients. Raises InputError."""
        where = "participation"
        pattern = make_named(PARTICIPATIONS, self.participation, where, problem.names)
        try:
            pattern.check(problem.n_clients, problem.names)
        except InputError as error:
            raise InputError(f"{where} ({pattern.name}): {error}") from None
        return pattern

    def to_toml(self, resolved: Mapping[str, Result] | None = None) -> str:
        """The experiment as a file that runs again: paths absolute, all defaults filled in.

        With `resolved`, results by label, also the hyperparameters that were chosen.
        """
        table = _without_none(self.model_dump())
        table["data"] = {key: value for key, value in table["data"].items() if value != {}}
        registries = {"loss": LOSSES, "regularizer": REGULARIZERS}
        for key in registries.keys() & table["problem"].keys():
            table["problem"][key] = _filled(registries[key], table["problem"][key])
        table["participation"] = _filled(PARTICIPATIONS, self.participation)
        table["algorithms"] = [
            self._algorithm_table(entry, label, (resolved or {}).get(label))
            for entry, label in zip(self.algorithms, self.labels, strict=True)
        ]
        return tomli_w.dumps(table)

    def _algorithm_table(
        self, entry: Mapping[str, Any], label: str, result: Result | None
    ) -> dict[str, Any]:
        table = {"label": label, **_filled(ALGORITHMS, entry)}
        if result is not None:
            settable = record_fields(ALGORITHMS[entry["name"]])
            chosen = {k: v for k, v in result.chosen.items() if k in settable and _is_scalar(v)}
            table |= chosen
        return table


# --- reading --------------------------------------------------------------------------------------


def load(path: str | Path) -> Experiment:
    """The experiment in a TOML file; relative paths in it are relative to it. InputError."""
    path = existing(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not a valid TOML file: {error}") from None
    try:
        return parse(table, path.parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse(table: Mapping[str, Any], base: Path | None = None) -> Experiment:
    """The experiment in a table; relative paths are relative to `base`. InputError."""
    base = (base or Path()).absolute()
    try:
        return Experiment.model_validate(table, context=base)
    except ValidationError as error:
        raise InputError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    """One line per place: key path, what is wrong, the value."""
    found: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for detail in error.errors():
        place = _place(detail["loc"])
        if detail["type"] == "missing":
            message = "is missing"
        elif isinstance(detail.get("ctx", {}).get("error"), InputError):
            message = detail["msg"].removeprefix("Value error, ")
        else:
            message = detail["msg"].removeprefix("Input ")
            values[place] = detail["input"]
        found.setdefault(place, []).append(message)
    lines = []
    for place, messages in found.items():
        got = f", got {_shortened(values[place])}" if place in values else ""
        text = f"{' or '.join(dict.fromkeys(messages))}{got}"
        lines.append(f"{place}: {text}" if place else text)
    return "\n".join(lines)


def _place(loc: Sequence[str | int]) -> str:
    """data.target, or algorithms (entry 2); what pydantic adds for unions is left out."""
    model: Any = Experiment
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f" (entry {part + 1})"
        elif model is not None and part in model.model_fields:
            place += f".{part}" if place else part
            kind = model.model_fields[part].annotation
            model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        else:
            break
    return place


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_distinct(values: Sequence[Any], where: str, remedy: str = "") -> None:
    for value in values:
        if list(values).count(value) > 1:
            raise InputError(f"{where}: {value!r} occurs twice{remedy}")


def _filled(registry: Registry, table: Mapping[str, Any]) -> dict[str, Any]:
    """A named table with the defaults of the record's fields."""
    cls = registry[table["name"]]
    settable = record_fields(cls)
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.name in settable}
    return {
        "name": table["name"],
        **{name: value for name, value in defaults.items() if _is_scalar(value)},
        **{key: value for key, value in table.items() if key != "name"},
    }


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
