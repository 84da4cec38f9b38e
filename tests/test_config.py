"""Experiment files: what they become, that they round-trip, and what is refused and how."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedexact as fx
from fedexact import config, data
from fedexact.config.models import ProblemTable
from fedexact.config.records import record_fields
from fedexact.data import PARTITIONS, Features, Target
from problems import THREE_SITES

TABLE = """\
site,age,dose,group,y
A,50,1,u,1
B,60,2,v,0
C,70,4,u,1
B,65,3,u,1
A,55,5,v,0
C,61,1,v,0
A,42,2,u,1
"""

EXPERIMENT = "rounds = 30\n" + THREE_SITES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


def experiment(folder: Path, text: str = EXPERIMENT) -> config.Experiment:
    path = folder / "experiment.toml"
    path.write_text(text)
    return config.load(path)


def edited(old: str, new: str) -> str:
    assert old in EXPERIMENT
    return EXPERIMENT.replace(old, new)


# --- what a file becomes --------------------------------------------------------------------------


def test_a_file_becomes_objects_with_the_registries_defaults(folder: Path) -> None:
    asked = experiment(folder)
    assert asked.data.target == Target("y")
    assert asked.data.features == Features(("age", "dose"))
    assert (asked.rounds, asked.seeds, asked.tol) == (30, [0], None)
    assert asked.build_algorithms() == {"FedAvg": fx.FedAvg(), "FOCUS": fx.FOCUS()}
    prepared = config.prepare(asked)
    assert prepared.problem.names == ["A", "B", "C"]
    assert prepared.problem.feature_names == ["intercept", "age", "dose"]
    assert prepared.problem.l2 == 0.1
    assert isinstance(prepared.problem.loss, fx.Logistic)
    assert prepared.participation == fx.Bernoulli((0.9, 0.5, 0.7))
    assert prepared.reference is not None
    assert np.linalg.norm(prepared.problem.grad(prepared.reference)) < 1e-14


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "trace.csv").write_text("1,0,1\n0,1,1\n")
    text = edited('name = "bernoulli"\np = [0.9, 0.5, 0.7]', 'name = "trace"\nsource = "trace.csv"')
    monkeypatch.chdir(folder.parent)
    prepared = config.prepare(experiment(folder, text))
    np.testing.assert_array_equal(
        prepared.participation.mask(3, 0, 2, 0), [[True, False, True], [False, True, True]]
    )


def test_values_by_client_name_are_put_in_order(folder: Path) -> None:
    by_name = experiment(folder, edited("[0.9, 0.5, 0.7]", "{ C = 0.7, A = 0.9, B = 0.5 }"))
    assert config.prepare(by_name).participation == fx.Bernoulli((0.9, 0.5, 0.7))
    blocks = edited(
        'name = "bernoulli"\np = [0.9, 0.5, 0.7]', 'name = "cyclic"\nblocks = [["C"], ["A", "B"]]'
    )
    assert config.prepare(experiment(folder, blocks)).participation == fx.Cyclic([[2], [0, 1]])
    weights = edited("l2 = 0.1", "l2 = 0.1\nweights = { B = 0.5, A = 0.2, C = 0.3 }")
    np.testing.assert_array_equal(
        config.prepare(experiment(folder, weights)).problem.w, [0.2, 0.5, 0.3]
    )


def test_bounds_and_groups_by_column_name(folder: Path) -> None:
    federation = experiment(folder).data.federation()

    def regularizer(table: dict[str, Any]) -> Any:
        problem = {"loss": "logistic", "regularizer": table}
        return ProblemTable.model_validate(problem).build(federation).regularizer

    box = regularizer({"name": "box", "lower": {"dose": 0.0}, "upper": 3.0})
    np.testing.assert_array_equal(box.lower, [-np.inf, 0.0])
    groups = regularizer({"name": "group_lasso", "strength": 0.1, "groups": [["dose"], ["age"]]})
    assert groups == fx.GroupLasso(0.1, ((1,), (0,)))


def test_every_source_and_partition(folder: Path) -> None:
    (folder / "t.svm").write_text("1 1:1\n0 1:2\n1 1:0.5\n0 2:1\n")
    (folder / "sites").mkdir()
    for name in ("p", "q"):
        (folder / "sites" / f"{name}.csv").write_text("x;y\n1;0\n2;1\n")
    sources: list[tuple[dict[str, Any], list[int]]] = [
        ({"csv": "table.csv", "target": "y", "partition": {"name": "iid", "clients": 2}}, [4, 3]),
        ({"libsvm": "t.svm", "partition": {"name": "by_label", "clients": 2}}, [2, 2]),
        ({"folder": "sites", "target": "y", "delimiter": ";"}, [2, 2]),
        (
            {
                "bundled": "heart_disease_uci", "client": "dataset", "features": ["age"],
                "target": {"column": "num", "above": 0},
            },
            [304, 293, 123, 200],
        ),
    ]  # fmt: skip
    rest = {"problem": {"loss": "logistic"}, "algorithms": ["FOCUS"]}
    for table, sizes in sources:
        federation = config.parse({"data": table, **rest}, folder).data.federation()
        assert federation.n_rows.tolist() == sizes


def test_the_same_algorithm_twice_needs_labels(folder: Path) -> None:
    twice = EXPERIMENT + '[[algorithms]]\nname = "FOCUS"\nlocal_steps = 3\n'
    with pytest.raises(fx.InputError, match="'FOCUS' occurs twice; give one of them another label"):
        experiment(folder, twice)
    labelled = experiment(folder, twice + 'label = "FOCUS 3"\n')
    assert list(labelled.build_algorithms()) == ["FedAvg", "FOCUS", "FOCUS 3"]
    assert labelled.build_algorithms()["FOCUS 3"] == fx.FOCUS(local_steps=3)


# --- round trip -----------------------------------------------------------------------------------


def test_the_resolved_experiment_runs_again_with_the_same_numbers(folder: Path) -> None:
    asked = experiment(folder)
    prepared = config.prepare(asked)
    results = {
        label: fx.solve(prepared.problem, algorithm, prepared.participation, rounds=5)
        for label, algorithm in prepared.algorithms.items()
    }
    text = asked.to_toml(results)
    elsewhere = folder / "results" / "experiment.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    again = config.load(elsewhere)
    repeated = config.prepare(again)
    assert repeated.participation == prepared.participation
    for label, result in results.items():
        algorithm = repeated.algorithms[label]
        chosen = {name: getattr(algorithm, name) for name in result.chosen}
        assert chosen == result.chosen
        second = fx.solve(repeated.problem, algorithm, repeated.participation, rounds=5)
        np.testing.assert_array_equal(second.x, result.x)
    assert again.to_toml() == text  # nothing is left to fill in


@pytest.mark.parametrize("name", data.EXPERIMENTS)
def test_the_bundled_experiments_round_trip(name: str) -> None:
    asked = config.load(data.bundled_experiment(name))
    again = config.parse(tomllib.loads(asked.to_toml()))
    assert again.to_toml() == asked.to_toml()
    assert again.data == asked.data


REGISTRIES: dict[str, Any] = {
    "algorithms": fx.ALGORITHMS, "participation": fx.PARTICIPATIONS,
    "loss": fx.LOSSES, "regularizer": fx.REGULARIZERS, "partition": PARTITIONS,
}  # fmt: skip
ENTRIES = [(key, name) for key, registry in REGISTRIES.items() for name in registry]
DERIVED = {"g", "scales"}  # what `resolve` fills in


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_every_field_of_every_record_can_be_set(registry: str, name: str) -> None:
    cls = REGISTRIES[registry][name]
    fields = {f.name for f in dataclasses.fields(cls) if f.init}
    assert fields - set(record_fields(cls)) == fields & DERIVED


DOCS = Path(__file__).parents[1] / "docs"
LISTED = {
    "participation": fx.PARTICIPATIONS, "regularizer": fx.REGULARIZERS, "partition": PARTITIONS,
}  # fmt: skip


def documented(page: str, heading: str) -> dict[str, str]:
    """The second cell by the name in the first, of the last table with this heading."""
    table = (DOCS / page).read_text().split(f"| {heading} |")[-1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1] for row in cells}


@pytest.mark.parametrize("heading", LISTED)
def test_the_documentation_lists_the_keys_of_every_record(heading: str) -> None:
    found, expected = {}, {}
    for name, text in documented("experiments.md", heading).items():
        found[name] = re.findall(r"`(\w+)`(?: \(([^)]*)\))?", text)
    for name, cls in LISTED[heading].items():
        default = {f.name: f.default for f in dataclasses.fields(cls)}
        scalar = {k: str(v) for k, v in default.items() if isinstance(v, int | float)}
        expected[name] = [(key, scalar.get(key, "")) for key in record_fields(cls)]
    assert found == expected


def test_the_documentation_lists_the_hyperparameters_of_every_algorithm() -> None:
    for name, cls in fx.ALGORITHMS.items():
        page = (DOCS / "algorithms" / f"{name}.md").read_text()
        for key in record_fields(cls):
            assert re.search(rf"`{key}`", page), (name, key)


# --- what is refused ------------------------------------------------------------------------------

BAD: dict[str, tuple[str, str]] = {
    "unknown key": (
        edited("rounds = 30", "round = 30"),
        r"round = 30: unknown key; did you mean 'rounds'\? Keys:",
    ),
    "unknown key below": (
        edited("client =", "clients ="),
        "data: clients = 'site': unknown key; did you mean 'client'",
    ),
    "unknown key of target": (
        edited('"y"', '{ column = "y", abov = 0 }'),
        "data.target: abov = 0: .*did you mean 'above'",
    ),
    "unknown algorithm": (
        edited('"FOCUS"', '"FOCUSS"'),
        r"algorithms \(entry 2\): name: unknown value 'FOCUSS'.*'FOCUS'.*FedAvg, FedProx",
    ),
    "unknown hyperparameter": (
        edited('name = "FOCUS"', 'name = "FOCUS"\nlearning_rate = 1.0'),
        r"algorithms \(entry 2\): FOCUS: learning_rate = 1.0: unknown key. Keys: lr, local_steps",
    ),
    "hyperparameter filled in by the library": (
        edited('name = "FOCUS"', 'name = "FedDR"\ng = 1.0'),
        "FedDR: g = 1.0: unknown key.*step",
    ),
    "negative step": (
        edited('name = "FOCUS"', 'name = "FedSplit"\nstep = -1.0'),
        r"algorithms \(entry 2\): FedSplit: .*step must be a positive.*got -1.0",
    ),
    "text for a number": (
        edited('name = "FOCUS"', 'name = "FOCUS"\nlr = "fast"'),
        "FOCUS: lr must be a number, got 'fast'",
    ),
    "a list for a hyperparameter": (
        edited('name = "FOCUS"', 'name = "FOCUS"\nlr = [0.1, 0.2]'),
        r"algorithms \(entry 2\): FOCUS: lr must be a number, got \[0.1, 0.2\]",
    ),
    "true for a hyperparameter": (
        edited('name = "FOCUS"', 'name = "FOCUS"\nlr = true'),
        "FOCUS: lr must be a number, got True",
    ),
    "a list for a strength": (
        edited("l2 = 0.1", 'regularizer = { name = "l1", strength = [0.1, 0.2] }'),
        "problem.regularizer: l1: strength must be a number, got",
    ),
    "a number for groups": (
        edited("l2 = 0.1", 'regularizer = { name = "group_lasso", strength = 0.1, groups = 2 }'),
        "problem.regularizer: group_lasso: groups must be a list, got 2",
    ),
    "scales filled in by the library": (
        edited('name = "FOCUS"', 'name = "FedSplit"\nscales = 1.0'),
        "FedSplit: scales = 1.0: unknown key. Keys: step, relax, per_client$",
    ),
    "fraction for a count": (
        edited('name = "FOCUS"', 'name = "FOCUS"\nlocal_steps = 2.5'),
        "FOCUS: local_steps must be a whole number, got 2.5",
    ),
    "no algorithm name": (
        edited('name = "FOCUS"', "lr = 0.1"),
        r"algorithms \(entry 2\): name is missing; choices: Fed",
    ),
    "no algorithms": (EXPERIMENT.split("[[")[0], "algorithms: is missing"),
    "unknown loss": (edited('"logistic"', '"logit"'), "problem.loss: name: unknown value 'logit'"),
    "loss parameter": (
        edited('"logistic"', '{ name = "huber", dleta = 1 }'),
        "huber: dleta = 1: .*'delta'",
    ),
    "unknown regulariser": (
        edited("l2 = 0.1", 'regularizer = "lasso"'),
        "problem.regularizer: name: unknown.*l1",
    ),
    "regulariser without strength": (
        edited("l2 = 0.1", 'regularizer = "l1"'),
        "problem.regularizer: l1: strength is missing",
    ),
    "unknown participation": (
        edited("bernoulli", "bernouli"),
        "participation: .*did you mean 'ber",
    ),
    "probability": (edited("0.9", "1.9"), r"participation: bernoulli: p\[0\].*got 1.9"),
    "negative l2": (edited("0.1", "-0.1"), r"problem.l2: should be greater.*got -0.1"),
    "reduction": (
        edited("l2 = 0.1", 'reduction = "median"'),
        "problem.reduction: should be 'mean' or 'sum'",
    ),
    "rounds": (edited("30", "0"), "rounds: should be greater than or equal to 1, got 0"),
    "rounds as text": (edited("30", '"30"'), "rounds: should be a valid integer, got '30'"),
    "seeds": (edited("rounds = 30", "seeds = [1, 1]"), "seeds: 1 occurs twice"),
    "seed beyond 63 bits": (
        edited("rounds = 30", "seeds = [9223372036854775808]"),
        r"seeds \(entry 1\): should be less than",
    ),
    "negative seed": (edited("rounds = 30", "seeds = [-1]"), r"seeds \(entry 1\): .*got -1"),
    "standardize": (edited("true", '"yes"'), "data.standardize: .*boolean or .*list, got 'yes'"),
    "features": (edited('["age", "dose"]', "[1, 2]"), "data.features: columns must be a list of t"),
    "two sources": (edited("csv =", 'parquet = "a"\ncsv ='), "data: give one of.*got csv and parq"),
    "no source": (edited('csv = "table.csv"\n', ""), "data: give one of bundled, csv.*got none"),
    "key of another source": (
        edited("client =", "n_features = 3\nclient ="),
        "n_features does not",
    ),
    "no target": (edited('target = "y"\n', ""), "data: target is missing"),
    "partition": (
        edited('client = "site"', 'partition = { name = "dirichlet", clients = 3 }'),
        "data.partition: dirichlet: alpha is missing: give a number",
    ),
    "not TOML": ("rounds = = 3", r"experiment.toml: not a valid TOML file: .*line 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_key_value_and_choices(case: str, folder: Path) -> None:
    text, message = BAD[case]
    with pytest.raises(fx.InputError, match=message) as caught:
        experiment(folder, text)
    assert str(caught.value).startswith(f"{folder / 'experiment.toml'}: ")
    assert "pydantic" not in str(caught.value)


BAD_WITH_DATA: dict[str, tuple[str, str]] = {
    "vector too short": (
        edited("[0.9, 0.5, 0.7]", "[0.9, 0.5]"),
        r"participation \(bernoulli\): p has 2 entries but there are 3 clients \(A, B, C\)",
    ),
    "unknown client": (
        edited("[0.9, 0.5, 0.7]", "{ A = 0.9, B = 0.5, c = 0.7 }"),
        r"participation \(bernoulli\): p: unknown value 'c'.*A, B, C",
    ),
    "a client left out": (
        edited("[0.9, 0.5, 0.7]", "{ A = 0.9, B = 0.5 }"),
        "p: there is no value for 'C'",
    ),
    "unknown column": (edited('"dose"', '"does"'), "no column 'does'.*did you mean 'dose'"),
    "missing file": (edited("table.csv", "tables.csv"), "tables.csv: no such file; did you mean"),
    "labels": (
        edited('target = "y"\nfeatures = ["age", "dose"]', 'target = "dose"\nfeatures = ["age"]'),
        r"client 'A': .*5",
    ),
    "regulariser": (
        edited("l2 = 0.1", 'regularizer = { name = "l1", strength = 0.1 }'),
        "FedAvg has no prox step for a regulariser.*use FedDR",
    ),
    "more in a cohort than clients": (
        edited('"bernoulli"\np = [0.9, 0.5, 0.7]', '"uniform"\nm = 4'),
        "m = 4 but .*only 3 clients",
    ),
    "weights": (edited("l2 = 0.1", "weights = [1.0]"), "weights must be .* 3 numbers"),
}


@pytest.mark.parametrize("case", BAD_WITH_DATA)
def test_what_needs_the_data_is_checked_before_the_first_round(case: str, folder: Path) -> None:
    text, message = BAD_WITH_DATA[case]
    asked = experiment(folder, text)
    with pytest.raises(fx.FedexactError, match=message):
        config.prepare(asked)


def test_a_missing_experiment_is_named_with_the_nearest(folder: Path) -> None:
    experiment(folder)
    with pytest.raises(fx.InputError, match=r"no such file; did you mean 'experiment.toml'"):
        config.load(folder / "experimnt.toml")
