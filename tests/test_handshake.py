"""The schema handshake: bit for bit what the stacked tables give, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

import fedexact as fx
from fedexact import data
from fedexact.data import Description, Features, Moments, Schema, Spec, Sums, Target
from fedexact.data.tables import read_csv_table

HEART = data.BUNDLED["heart_disease_uci"].path
COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "thalch", "exang", "oldpeak")


def sent(meta: dict[str, Any]) -> dict[str, Any]:
    """As a carrier may return it: keys in another order, tuples as lists."""
    return json.loads(json.dumps(meta, sort_keys=True))


def described(table: pa.Table, spec: Spec, name: str) -> Description:
    meta = data.describe(table, Spec.from_meta(sent(spec.to_meta())), name).to_meta()
    return Description.from_meta(sent(meta), name)


class Agreed(NamedTuple):
    """What the handshake leads to."""

    descriptions: dict[str, Description]
    schema: Schema
    clients: list[tuple[np.ndarray, np.ndarray]]
    moments: Moments


def handshake(parts: Mapping[str, pa.Table], spec: Spec) -> Agreed:
    """All of it, each message through JSON."""
    descriptions = {name: described(table, spec, name) for name, table in parts.items()}
    schema = Schema.from_meta(sent(data.agree(spec, descriptions).to_meta()))
    rows = {name: data.encode(table, schema, name) for name, table in parts.items()}
    columns = schema.feature_names
    sums = [
        Sums.from_arrays(each.sums().to_arrays(), columns, descriptions[name].complete, name)
        for name, each in rows.items()
    ]
    moments = data.pooled_moments(sums, columns, spec.standardize)
    moments = Moments.from_arrays(moments.to_arrays(), columns)
    clients = [(moments.apply(each.X), each.y) for each in rows.values()]
    assert {each.feature_names for each in rows.values()} == {columns}
    return Agreed(descriptions, schema, clients, moments)


def split(table: pa.Table, client: str) -> dict[str, pa.Table]:
    """A table for each value of a column, in the order of their first rows."""
    owners = table.column(client).to_pylist()
    return {
        owner: table.filter(pa.array([o == owner for o in owners])).drop_columns([client])
        for owner in dict.fromkeys(owners)
    }


def bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.tobytes()


def assert_same(found: Agreed, expected: data.Federation) -> None:
    """Bit for bit."""
    assert tuple(found.descriptions) == expected.names
    assert found.schema.feature_names == expected.feature_names
    assert found.schema.levels == dict(expected.levels)
    assert found.schema.classes == expected.classes
    assert tuple(d.dropped for d in found.descriptions.values()) == expected.dropped
    assert {n: d.missing for n, d in found.descriptions.items()} == expected.missing
    for (X, y), (X_k, y_k) in zip(found.clients, expected.clients, strict=True):
        assert bits(X) == bits(X_k)
        assert bits(y) == bits(y_k)
    for field in ("mean", "sd", "standardized"):
        assert bits(getattr(found.moments, field)) == bits(getattr(expected.moments, field))
    for field in ("columns", "count", "centred"):
        assert getattr(found.moments, field) == getattr(expected.moments, field)


def stacked(table: pa.Table, spec: Spec) -> data.Federation:
    return data.from_table(
        table, spec.target, client="site", features=spec.features, missing=spec.missing,
        standardize=spec.standardize,
    )  # fmt: skip


# --- the same as the stacked tables ---------------------------------------------------------------


@pytest.mark.parametrize("standardize", [False, True, "scale", ("age", "cp[non-anginal]")])
@pytest.mark.parametrize(
    "features",
    [
        Features(COLUMNS),
        Features(("cp", "thalch", "sex"), reference={"cp": "typical angina", "sex": "Male"}),
        Features(("oldpeak", "cp", "age"), categorical=("oldpeak",)),
        Features(exclude=("id", "ca", "thal", "slope", "restecg", "fbs")),
    ],
    ids=["named", "references", "number codes", "all but some"],
)
def test_heart_by_hospital_is_the_stacked_table(features: Features, standardize: Any) -> None:
    table = read_csv_table(HEART).rename_columns({"dataset": "site"})
    if isinstance(standardize, tuple) and "age" not in (features.columns or ("age",)):
        standardize = ("cp[non-anginal]",)
    spec = Spec(Target("num", above=0), features, standardize=standardize)
    assert_same(handshake(split(table, "site"), spec), stacked(table, spec))


@pytest.mark.parametrize(
    "target",
    [
        Target("num"), Target("cp"), Target("cp", equals="asymptomatic"), Target("num", equals=2),
        Target("num", equals="2"), Target("exang"), Target("exang", equals=True),
        Target("exang", equals="true"),
    ],
    ids=repr,
)  # fmt: skip
def test_heart_with_any_target(target: Target) -> None:
    table = read_csv_table(HEART).rename_columns({"dataset": "site"})
    spec = Spec(target, Features(("age", "sex")), standardize=True)
    assert_same(handshake(split(table, "site"), spec), stacked(table, spec))


def test_heart_in_a_file_per_hospital_is_the_folder(tmp_path: Path) -> None:
    """Types are inferred per file here: oldpeak, age and ca may be integers at one hospital."""
    for name, part in split(read_csv_table(HEART), "dataset").items():
        arrow_csv.write_csv(part, tmp_path / f"{name}.csv")
    parts = {path.stem: read_csv_table(path) for path in sorted(tmp_path.iterdir())}
    spec = Spec(Target("num", above=0), Features(COLUMNS), standardize=True)
    expected = data.from_folder(
        tmp_path, spec.target, features=spec.features, standardize=spec.standardize
    )  # fmt: skip
    types = {table.schema.field("oldpeak").type for table in parts.values()}
    assert len(types) == 1 or pa.int64() in types
    assert_same(handshake(parts, spec), expected)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Three sites with number, true/false, text and code columns, and missing cells."""
    n, seed = draw(st.integers(12, 60)), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.append(np.arange(3), rng.integers(0, 3, n - 3)))
    whole = np.isin(np.arange(n), np.unique(owner, return_index=True)[1])  # a row of each site
    columns = {
        "x": rng.normal(size=n) * 10.0 ** rng.integers(-3, 6),
        "stage": rng.choice(["I", "II", "III", "é", "zz"], n),
        "smoker": rng.random(n) < 0.5,
        "code": rng.choice([-0.0, 0.0, 2, 10, 1.5], n),
        "y": rng.choice(["low", "high", "none"], n),
    }
    gone = draw(st.floats(0, 0.2))
    cells = {
        name: pa.array(values, mask=(rng.random(n) < gone) & ~whole)
        for name, values in columns.items()
    }
    return pa.table({"site": [f"site {k}" for k in owner], **cells})


@given(tables(), st.sampled_from([False, "scale"]))
def test_synthetic_tables_are_the_stacked_table(table: pa.Table, standardize: bool | str) -> None:
    spec = Spec(Target("y"), Features(categorical=("code",)), standardize=standardize)
    try:
        expected = stacked(table, spec)
    except fx.InputError as error:  # a column with a single level
        with pytest.raises(fx.InputError, match=re.escape(str(error))):
            handshake(split(table, "site"), spec)
        return
    assert_same(handshake(split(table, "site"), spec), expected)


@given(st.integers(1, 400), st.integers(1, 4), st.integers(0, 99))
def test_the_sums_of_a_site_are_those_of_its_rows_in_the_stack(m: int, p: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, n_rows = rng.normal(size=(m + 30, p)), np.array([10, m, 20])
    of_all = data.sums_of_clients(X, n_rows)
    sums = data.Encoded(X[10 : 10 + m].copy(), np.zeros(m), ("x",) * p).sums().to_arrays()
    assert bits(sums["total"][0]) == bits(of_all.total[1])
    assert bits(sums["centred"][0]) == bits(of_all.centred[1])
    assert sums["count"].tolist() == [m]


PARTS = {
    "A": pa.table({"age": [50, 60, None], "stage": ["II", "I", "I"], "y": ["no", "yes", "no"]}),
    "B": pa.table({"stage": ["IV", "IV"], "y": ["perhaps", "no"], "age": [55.5, 65.0]}),
}
SPEC = Spec(Target("y"))


def test_levels_and_classes_of_one_site_only_are_known_to_all() -> None:
    found = handshake(PARTS, SPEC)
    assert found.schema.feature_names == ("age", "stage[II]", "stage[IV]")
    assert found.schema.classes == ("no", "perhaps", "yes")
    assert found.clients[0][0].tolist() == [[50, 1, 0], [60, 0, 0]]
    assert found.clients[1][0].tolist() == [[55.5, 0, 1], [65, 0, 1]]
    assert found.clients[1][1].tolist() == [1, 0]


def test_an_event_that_occurs_at_one_site_is_none_at_the_other() -> None:
    found = handshake(PARTS, Spec(Target("y", equals="perhaps")))
    assert [y.tolist() for _, y in found.clients] == [[0, 0], [1, 0]]
    assert found.descriptions["A"].classes == ()


def test_a_description_holds_counts_and_levels_and_nothing_else() -> None:
    meta = data.describe(PARTS["A"], SPEC, "A").to_meta()
    assert sent(meta) == {
        "columns": [["age", "number"], ["stage", "text"]],
        "levels": {"stage": ["I", "II"]},
        "target": "text",
        "classes": ["no", "yes"],
        "occurs": True,
        "rows": 3,
        "complete": 2,
        "missing": {"age": 1},
    }


def test_columns_that_are_not_used_are_not_told_and_may_differ() -> None:
    more = {**PARTS, "A": PARTS["A"].append_column("name", pa.array(["Ann", "Bob", "Cy"]))}
    found = handshake(more, Spec(Target("y"), Features(("age", "stage"))))
    assert "Ann" not in json.dumps([d.to_meta() for d in found.descriptions.values()])
    assert found.schema.feature_names == handshake(PARTS, SPEC).schema.feature_names


def test_a_specification_survives_the_message() -> None:
    spec = Spec(
        Target("y", equals=0.1),
        Features(("a", "b"), exclude=("b",), categorical=("a",), reference={"a": "1"}),
        missing="error",
        standardize=["a[2]"],
    )
    assert Spec.from_meta(sent(spec.to_meta())) == spec
    assert Spec.from_meta(sent(SPEC.to_meta())) == SPEC


# --- what a site refuses --------------------------------------------------------------------------

THIRTY = [f"patient {i}" for i in range(30)]


@pytest.mark.parametrize(
    ("columns", "spec", "message"),
    [
        ({"x": [1.0]}, SPEC, r"target: .*no column 'y' in the table of client 'A' \(columns: x\)"),
        ({"y": [1.0]}, SPEC, "table of client 'A': no feature columns are left"),
        ({"y": [1.0]}, Spec(Target("y"), Features(("x",))), r"features.columns: .*'x'.*client 'A'"),
        ({"y": [1.0], "x": [np.nan]}, SPEC, "client 'A', row 1, column 'x': nan is not a finite"),
        ({"y": [1.0, None], "x": [None, 2]}, SPEC, "client 'A' has no complete row .of 2 rows.*x"),
        (
            {"y": [1.0, None], "x": [1, 2]}, Spec(Target("y"), missing="error"),
            "client 'A', row 2: column 'y' is missing",
        ),
        ({"y": [1.0, 2], "x": ["3", "four"]}, SPEC, "'x' was read as text: client 'A', row 2 has"),
        ({"y": ["3", "four"], "x": [1.0, 2]}, SPEC, "'y' was read as text: client 'A', row 2 has"),
        ({"y": [*range(30)], "x": THIRTY}, SPEC, "client 'A': column 'x' has 30 levels.*identif"),
        ({"x": [*range(30)], "y": THIRTY}, SPEC, "client 'A': column 'y' has 30.*target.equals"),
        (
            {"x": [*range(30)], "y": [*range(30)]}, Spec(Target("y"), Features(categorical=("x",))),
            "client 'A': column 'x' has 30 levels",
        ),
        ({"y": ["a"], "x": [1]}, Spec(Target("y", above=1)), "target.above: column 'y' holds text"),
        ({"y": [], "x": []}, SPEC, "table of client 'A': the table has no rows"),
        (
            {"y": [1], "x": pa.array([1], pa.date32())},
            Spec(Target("y"), Features(categorical=("x",))), "'x' holds date32",
        ),
        (
            {"x": [1], "y": pa.array([1], pa.date32())}, Spec(Target("y", equals="1970-01-02")),
            "'y' holds date32",
        ),
    ],
)  # fmt: skip
def test_a_site_refuses_what_it_can_see(columns: dict[str, Any], spec: Spec, message: str) -> None:
    with pytest.raises(fx.InputError, match=message) as caught:
        data.describe(pa.table(columns), spec, "A")
    assert "patient" not in str(caught.value)


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.table([[1], [2], [3]], names=["x", "x", "y"])
    with pytest.raises(fx.InputError, match="client 'A': two columns are called 'x'"):
        data.describe(table, SPEC, "A")


def changed(**columns: Any) -> pa.Table:
    return pa.table({**PARTS["B"].to_pydict(), **columns})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(stage=["IV", "V"]), "client 'B', row 2, column 'stage': 'V' is not among.*I, II"),
        (changed(y=["no", "never"]), "client 'B', row 2, column 'y': 'never' is not among"),
        (changed(age=["old", "young"]), "client 'B', column 'age': it holds text, agreed was num"),
        (PARTS["B"].drop_columns(["age"]), "no column 'age' in the table of client 'B'"),
        (PARTS["B"].slice(0, 0), "table of client 'B': the table has no rows"),
    ],
)
def test_a_table_that_has_changed_since_is_refused(table: pa.Table, message: str) -> None:
    schema = handshake(PARTS, SPEC).schema
    with pytest.raises(fx.InputError, match=message):
        data.encode(table, schema, "B")


# --- what the server refuses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "spec", "message"),
    [
        (
            changed(age=["old", "young"]), SPEC,
            r"column 'age' is of different types: number at clients 'A', 'C'; text at client 'B'",
        ),
        (changed(y=[1.0, 2.0]), SPEC, "'y' is of different types: text at clients 'A', 'C'; numb"),
        (
            PARTS["B"].drop_columns(["age"]), SPEC,
            r"'age' is at clients 'A', 'C' and not at client 'B'; .*features.columns",
        ),
        (changed(size=[1, 2]), SPEC, "column 'size' is at client 'B' and not at clients 'A', 'C'"),
        (
            PARTS["B"], Spec(Target("y"), Features(reference={"stage": "III"})),
            r"clients 'A', 'B', 'C': features.reference: .*'stage' has no level 'III'.*I, II, IV",
        ),
        (
            PARTS["B"], Spec(Target("y", equals="never")),
            "no complete row has y = 'never', at any of clients 'A', 'B', 'C'",
        ),
        (
            PARTS["B"], Spec(Target("y"), standardize=["aeg"]),
            "standardize: unknown value 'aeg'; did you mean 'age'",
        ),
    ],
)  # fmt: skip
def test_the_server_names_who_disagrees(table: pa.Table, spec: Spec, message: str) -> None:
    parts = {"A": PARTS["A"], "B": table, "C": PARTS["A"]}
    descriptions = {name: described(part, spec, name) for name, part in parts.items()}
    with pytest.raises(fx.InputError, match=message):
        data.agree(spec, descriptions)


def test_a_single_level_at_all_sites_is_refused_and_many_clients_are_counted() -> None:
    table = pa.table({"stage": ["I", "I"], "x": [1.0, 2.0], "y": [0, 1]})
    spec = Spec(Target("y"))
    descriptions = {f"s{k:02d}": described(table, spec, f"s{k:02d}") for k in range(11)}
    message = r"^clients 's00', .*'s07' and 3 more: column 'stage' has the single level 'I'"
    with pytest.raises(fx.InputError, match=message):
        data.agree(spec, descriptions)
    with pytest.raises(fx.InputError, match="no client has described"):
        data.agree(spec, {})


def test_levels_that_differ_everywhere_are_an_identifier_for_all() -> None:
    parts = {
        f"s{k}": pa.table({"who": [f"p{k}-{i}" for i in range(5)], "y": range(5)}) for k in range(9)
    }
    spec = Spec(Target("y"))
    descriptions = {name: described(part, spec, name) for name, part in parts.items()}
    with pytest.raises(fx.InputError, match=r"'who' has 45 levels in 45 rows.*identifier"):
        data.agree(spec, descriptions)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": [["age"]]}, {"columns": [["age", 1]]}, {"columns": None}, {"levels": []},
        {"levels": {"stage": "I"}}, {"levels": {"stage": [1]}}, {"target": None}, {"occurs": 1},
        {"rows": 2.5}, {"rows": -1}, {"rows": True}, {"complete": 4}, {"complete": 0},
        {"missing": {"age": "1"}}, {"missing": [1]}, {"classes": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_a_message_that_is_no_description_is_refused(change: dict[str, Any]) -> None:
    meta = data.describe(PARTS["A"], SPEC, "A").to_meta()
    with pytest.raises(fx.InputError, match="description of client 'A'"):
        Description.from_meta({**meta, **change}, "A")
    with pytest.raises(fx.InputError, match=r"client 'A': not understood .KeyError"):
        Description.from_meta({name: meta[name] for name in meta if name not in change}, "A")


@pytest.mark.parametrize(
    ("spec", "levels"),
    [
        (SPEC, {}),
        (SPEC, {"stage": []}),
        (Spec(Target("y"), Features(categorical=("age",))), {"stage": ["I"], "age": ["old"]}),
    ],
)
def test_levels_that_do_not_fit_the_column_are_refused(spec: Spec, levels: dict[str, Any]) -> None:
    good = {name: described(part, spec, name) for name, part in PARTS.items()}
    bad = Description.from_meta({**good["B"].to_meta(), "levels": levels}, "B")
    with pytest.raises(fx.InputError, match=r"client 'B', column '(stage|age)': no levels of a"):
        data.agree(spec, {**good, "B": bad})


def test_other_messages_are_refused() -> None:
    for read in (Spec.from_meta, Schema.from_meta):
        with pytest.raises(fx.InputError, match="not understood"):
            read({"target": 1})
    meta = handshake(PARTS, SPEC).schema.to_meta()
    for change in (
        {"levels": {}},
        {"levels": {"stage": ["I"]}},
        {"levels": {**meta["levels"], "age": ["1", "2"]}},
        {"columns": [], "levels": {}},
    ):
        with pytest.raises(fx.InputError, match=r"schema: not understood .*levels do not fit"):
            Schema.from_meta({**meta, **change})
    meta = SPEC.to_meta()
    with pytest.raises(fx.InputError, match="missing: unknown value 'dorp'"):
        Spec.from_meta({**meta, "missing": "dorp"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total": np.array([[1.0, np.nan]])}, "client 'A', column 'b': nan cannot be a sum"),
        ({"centred": np.array([[-1.0, 0.0]])}, "client 'A', column 'a': -1.0 .*sum of squares"),
        ({"total": np.zeros((1, 3))}, r"client 'A': sums: total is of shape \(1, 3\)"),
        ({"total": np.zeros((1, 2), np.float32)}, "float32"),
        ({"centred": None}, r"client 'A': sums: centred is of shape \(\) and type object"),
        ({"count": np.array([4])}, r"client 'A': sums of \[4\] rows, it had 3 complete ones"),
        ({"count": np.array([3.0])}, r"sums of \[3.0\] rows"),
    ],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    arrays = data.client_sums(np.arange(6.0).reshape(3, 2)).to_arrays()
    assert Sums.from_arrays(arrays, ["a", "b"], 3, "A").total.tolist() == [[6, 9]]
    with pytest.raises(fx.InputError, match=message):
        Sums.from_arrays({**arrays, **change}, ["a", "b"], 3, "A")


def test_moments_of_other_columns_are_refused() -> None:
    arrays = data.pooled_moments([data.client_sums(np.eye(2))], ["a", "b"]).to_arrays()
    with pytest.raises(fx.InputError, match=r"moments: mean is of shape \(2,\)"):
        Moments.from_arrays(arrays, ["a"])
