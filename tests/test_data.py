"""Readers, typed columns, exact moments, partitions, the bundled data."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import fedexact as fx
from fedexact import data
from fedexact.config import parse
from fedexact.data import Dirichlet, Features, Target, client_sums, pooled_moments
from fedexact.data.tables import read_csv_table

HEART = [*["age", "sex", "cp", "trestbps", "chol", "thalch", "exang", "oldpeak"]]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def csv(tmp_path: Path, text: str) -> Path:
    return write(tmp_path / "table.csv", text)


def heart(**settings: Any) -> data.Federation:
    return data.bundled(
        "heart_disease_uci", Target("num", above=0), client="dataset",
        features=HEART, **settings,
    )  # fmt: skip


# --- the bundled data -----------------------------------------------------------------------------


def test_heart_disease_is_prepared_as_stated() -> None:
    federation = heart(standardize=True)
    assert federation.names == ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
    assert federation.n_rows.tolist() == [304, 269, 117, 137]
    assert federation.dropped == (0, 24, 6, 63)
    assert federation.missing["Switzerland"] == {
        "trestbps": 2, "thalch": 1, "exang": 1, "oldpeak": 6,
    }  # fmt: skip
    assert federation.feature_names == (
        "age", "sex[Male]", "cp[atypical angina]", "cp[non-anginal]", "cp[typical angina]",
        "trestbps", "chol", "thalch", "exang", "oldpeak",
    )  # fmt: skip
    assert federation.levels["cp"][0] == "asymptomatic"
    assert federation.target == "num > 0"
    assert any("chol is 0 in all 117 rows of Switzerland" in note for note in federation.notes)
    problem = federation.problem(loss="logistic", fit_intercept=True)
    assert problem.dim == 11
    assert problem.names == list(federation.names)
    # facts of the file: 411 of 920 without disease
    y = np.concatenate([y for _, y in heart().clients])
    assert set(np.unique(y)) == {0.0, 1.0}


def test_the_notes_on_the_heart_data_are_true() -> None:
    table = read_csv_table(data.BUNDLED["heart_disease_uci"].path)
    rows = table.to_pylist()
    by_id = {row["id"]: {k: v for k, v in row.items() if k != "id"} for row in rows}
    assert by_id[405] == by_id[406]
    assert by_id[860] == by_id[908]
    distinct = {tuple(row.values()) for row in by_id.values()}
    assert len(distinct) == 918
    unknown = [row["dataset"] for row in rows if row["chol"] == 0]
    assert unknown.count("Switzerland") == 123
    assert unknown.count("VA Long Beach") == 49
    assert len(unknown) == 172


def test_pooled_moments_are_those_of_the_stacked_rows() -> None:
    federation = heart(standardize=True)
    raw = np.concatenate([X for X, _ in heart().clients])
    columns = np.ascontiguousarray(raw.T)  # NumPy sums pairwise along the last axis only
    np.testing.assert_allclose(federation.moments.mean, columns.mean(axis=1), rtol=1e-14)
    np.testing.assert_allclose(federation.moments.sd, columns.std(axis=1), rtol=1e-14)
    stacked = np.concatenate([X for X, _ in federation.clients])
    np.testing.assert_allclose(stacked.mean(axis=0), 0, atol=1e-13)
    np.testing.assert_allclose(stacked.std(axis=0), 1, rtol=1e-13)


def test_the_average_of_the_clients_deviations_is_something_else() -> None:
    clients = [X for X, _ in heart().clients]
    averaged = np.mean([X.std(axis=0) for X in clients], axis=0)
    pooled = pooled_moments([client_sums(X) for X in clients], heart().feature_names).sd
    assert np.max(np.abs(averaged / pooled - 1)) > 0.2


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 1000),
    st.floats(-1e6, 1e6),
)  # fmt: skip
def test_moments_merge_exactly_for_any_split(sizes: list[int], seed: int, offset: float) -> None:
    rng = np.random.default_rng(seed)
    X = offset + rng.normal(size=(sum(sizes), 2))
    parts = np.split(X, np.cumsum(sizes)[:-1])
    moments = pooled_moments([client_sums(part) for part in parts], ["a", "b"], False)
    scale = np.abs(offset) + 10
    np.testing.assert_allclose(moments.mean, X.mean(axis=0), rtol=0, atol=1e-15 * scale * len(X))
    np.testing.assert_allclose(moments.sd, X.std(axis=0), rtol=0, atol=1e-15 * scale * len(X))


def test_coefficients_map_back_to_the_original_scale() -> None:
    raw, scaled = heart(), heart(standardize=["age", "chol", "exang"])
    x = np.random.default_rng(0).normal(size=11)
    original = scaled.moments.to_original() @ x
    for (X, _), (Z, _) in zip(raw.clients, scaled.clients, strict=True):
        np.testing.assert_allclose(original[0] + X @ original[1:], x[0] + Z @ x[1:], rtol=1e-12)
    with pytest.raises(fx.InputError, match="intercept"):
        scaled.moments.to_original(fit_intercept=False)


def test_the_pooled_fit_on_the_original_scale_is_the_unstandardised_one() -> None:
    settings: dict[str, Any] = {"loss": "logistic", "fit_intercept": True}
    scaled = heart(standardize=True)
    x = fx.reference(scaled.problem(**settings))
    gradient = heart().problem(**settings).grad(scaled.moments.to_original() @ x)
    np.testing.assert_allclose(gradient, 0, atol=1e-11)  # entries of X up to 600


def test_the_bundled_experiments_are_the_examples() -> None:
    examples = Path(__file__).parent.parent / "examples"
    for name in data.EXPERIMENTS:
        bundled = data.bundled_experiment(name)
        assert (examples / f"{name}.toml").read_bytes() == bundled.read_bytes()
    for entry in data.BUNDLED.values():
        assert entry.path.with_suffix(".md").is_file()


# --- typed columns --------------------------------------------------------------------------------

TABLE = """\
site,age,smoker,stage,y
A,50,TRUE,II,1.5
B,60,FALSE,I,2.5
A,70,FALSE,III,3.5
B,,TRUE,I,4.5
A,80,TRUE,I,5.5
"""


def test_numbers_booleans_and_text_become_columns(tmp_path: Path) -> None:
    federation = data.from_csv(csv(tmp_path, TABLE), "y", client="site")
    assert federation.names == ("A", "B")
    assert federation.feature_names == ("age", "smoker", "stage[II]", "stage[III]")
    (X, y), (X_B, _) = federation.clients
    np.testing.assert_array_equal(X, [[50, 1, 1, 0], [70, 0, 0, 1], [80, 1, 0, 0]])
    np.testing.assert_array_equal(y, [1.5, 3.5, 5.5])
    np.testing.assert_array_equal(X_B, [[60, 0, 0, 0]])
    assert federation.dropped == (0, 1)
    assert federation.missing == {"A": {}, "B": {"age": 1}}


def test_a_reference_level_and_a_choice_of_columns(tmp_path: Path) -> None:
    features = Features(columns=("stage", "age"), reference={"stage": "II"})
    federation = data.from_csv(csv(tmp_path, TABLE), "y", client="site", features=features)
    assert federation.feature_names == ("stage[I]", "stage[III]", "age")
    assert federation.levels == {"stage": ("II", "I", "III")}


def test_number_codes_can_be_categories(tmp_path: Path) -> None:
    path = csv(tmp_path, "site,code,y\na,10,1\na,2,2\nb,2,3\nb,10,4\na,3,5\n")
    features = Features(categorical=("code",), reference={"code": "10"})
    federation = data.from_csv(path, "y", client="site", features=features)
    assert federation.feature_names == ("code[2]", "code[3]")
    plain = data.from_csv(path, "y", client="site", features=Features(categorical=("code",)))
    assert plain.levels["code"] == ("2", "3", "10")


@pytest.mark.parametrize(
    ("target", "y", "words"),
    [
        (Target("y", above=2.5), [0, 1, 1], "y > 2.5"),
        (Target("y", equals=3.5), [0, 1, 0], "y = 3.5"),
        (Target("smoker"), [1, 0, 1], "smoker"),
        (Target("smoker", equals=True), [1, 0, 1], "smoker = True"),
        (Target("stage", equals="I"), [0, 0, 1], "stage = I"),
        (Target("stage"), [1, 2, 0], "stage"),
    ],
)
def test_targets(tmp_path: Path, target: Target, y: list[int], words: str) -> None:
    federation = data.from_csv(
        csv(tmp_path, TABLE), target, client="site", features=["age"]
    )  # fmt: skip
    np.testing.assert_array_equal(federation.clients[0][1], y)
    assert federation.target == words
    if target == Target("stage"):
        assert federation.classes == ("I", "II", "III")
        assert "classes of the target: I = 0, II = 1, III = 2" in federation.notes


def test_parquet_and_csv_give_the_same_clients(tmp_path: Path) -> None:
    from_csv = data.from_csv(csv(tmp_path, TABLE), "y", client="site")
    parquet.write_table(read_csv_table(tmp_path / "table.csv"), tmp_path / "table.parquet")
    from_parquet = data.from_parquet(tmp_path / "table.parquet", "y", client="site")
    assert from_parquet.feature_names == from_csv.feature_names
    for (X, y), (Z, z) in zip(from_csv.clients, from_parquet.clients, strict=True):
        np.testing.assert_array_equal(X, Z)
        np.testing.assert_array_equal(y, z)


def test_a_dictionary_column_is_text() -> None:
    table = pa.table(
        {"s": ["a", "b", "a"], "c": pa.array(["u", "v", "u"]).dictionary_encode(), "y": [1, 2, 3]}
    )
    assert data.from_table(table, "y", client="s").feature_names == ("c[v]",)


def test_a_folder_with_a_file_per_client(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", "x,w,y\n1,0.5,1\n2,1,0\n")
    write(tmp_path / "a.csv", "y,w,x\n1,7,3\n")
    parquet.write_table(pa.table({"x": [9], "y": [0], "w": [None]}), tmp_path / "c.parquet")
    with pytest.raises(fx.InputError, match=r"client 'c' has no complete row .*w in 1"):
        data.from_folder(tmp_path, "y")
    federation = data.from_folder(tmp_path, "y", features=["x"])
    assert federation.names == ("a", "b", "c")
    assert [X.tolist() for X, _ in federation.clients] == [[[3]], [[1], [2]], [[9]]]


def test_a_libsvm_folder_and_a_partitioned_libsvm_file(tmp_path: Path) -> None:
    write(tmp_path / "one.svm", "1 1:2 3:4\n-1 2:1\n")
    write(tmp_path / "two.svm", "1 1:5\n")
    federation = data.from_libsvm(tmp_path)
    assert federation.feature_names == ("x1", "x2", "x3")
    assert [X.tolist() for X, _ in federation.clients] == [[[2, 0, 4], [0, 1, 0]], [[5, 0, 0]]]
    assert federation.clients[0][1].tolist() == [1, -1]
    split = data.from_libsvm(tmp_path / "one.svm", partition=data.Iid(2), n_features=4)
    assert split.n_rows.tolist() == [1, 1]
    assert split.clients[0][0].shape == (1, 4)
    event = data.from_libsvm(tmp_path, target=Target("y", above=0))
    assert event.clients[0][1].tolist() == [1, 0]


def sparse_file(path: Path, X: Any, y: np.ndarray) -> Path:
    lines = []
    for i, target in enumerate(y.tolist()):
        row = slice(X.indptr[i], X.indptr[i + 1])
        cells = zip(X.indices[row].tolist(), X.data[row].tolist(), strict=True)
        lines.append(" ".join([f"{target:g}", *(f"{j + 1}:{value!r}" for j, value in cells)]))
    return write(path, "\n".join(lines) + "\n")


def sparse_rows(n: int = 60, p: int = 400) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    X: Any = scipy.sparse.random_array((n, p), density=0.02, rng=rng, format="csr")
    X.sort_indices()
    return X, rng.integers(0, 2, n).astype(float)


def test_a_libsvm_file_with_few_nonzeros_stays_sparse(tmp_path: Path) -> None:
    X, y = sparse_rows()
    path = sparse_file(tmp_path / "rows.svm", X, y)
    partition = data.ByQuantity(5, power=1.0, seed=1)
    federation = data.from_libsvm(path, partition=partition, n_features=400)
    parts = partition.split(y)
    for (X_k, y_k), part in zip(federation.clients, parts, strict=True):
        assert isinstance(X_k, scipy.sparse.csr_array)
        np.testing.assert_array_equal(X_k.toarray(), X[part].toarray())
        np.testing.assert_array_equal(y_k, y[part])
    assert federation.rows.X.nnz == X.nnz
    assert "the rows are kept sparse: 2 % nonzeros" in federation.notes
    np.testing.assert_allclose(federation.moments.mean, X.toarray().mean(axis=0), atol=1e-16)
    np.testing.assert_allclose(federation.moments.sd, X.toarray().std(axis=0), rtol=1e-13)


def test_a_folder_of_sparse_libsvm_files(tmp_path: Path) -> None:
    X, y = sparse_rows()
    for k, part in enumerate(np.array_split(np.arange(60), 3)):
        sparse_file(tmp_path / f"site{k}.svm", X[part], y[part])
    federation = data.from_libsvm(tmp_path, n_features=400)
    assert federation.names == ("site0", "site1", "site2")
    assert federation.n_rows.tolist() == [20, 20, 20]
    np.testing.assert_array_equal(federation.rows.X.toarray(), X.toarray())


def test_large_or_sparse_is_the_rule_for_libsvm_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenth = write(tmp_path / "tenth.svm", "1 10:2\n0 1:4\n")
    less = write(tmp_path / "less.svm", "1 11:2\n0 1:4\n")

    def dense(path: Path) -> bool:
        return isinstance(data.from_libsvm(path, partition=data.Iid(2)).rows.X, np.ndarray)

    assert dense(tenth)
    assert not dense(less)
    monkeypatch.setattr("fedexact.data.libsvm.MAX_CELLS", 19)
    assert not dense(tenth)


def test_sparse_rows_are_scaled_and_never_moved(tmp_path: Path) -> None:
    X, y = sparse_rows(600, 40)
    path = sparse_file(tmp_path / "rows.svm", X, y)
    settings: dict[str, Any] = {"partition": data.Iid(3), "n_features": 40}
    for moved in (True, ["x1"]):
        with pytest.raises(fx.InputError, match=r"fill the zeros.*standardize = 'scale'"):
            data.from_libsvm(path, standardize=moved, **settings)
    raw = data.from_libsvm(path, **settings)
    scaled = data.from_libsvm(path, standardize="scale", **settings)
    Z = scaled.rows.X
    assert Z.nnz == raw.rows.X.nnz
    np.testing.assert_allclose(Z.toarray().std(axis=0), 1.0, rtol=1e-12)
    x = np.random.default_rng(0).normal(size=41)
    for intercept in (True, False):
        original = scaled.moments.to_original(intercept) @ x[not intercept :]
        back = raw.rows.X @ original[int(intercept) :] + (original[0] if intercept else 0.0)
        np.testing.assert_allclose(back, Z @ x[1:] + (x[0] if intercept else 0.0), rtol=1e-10)
    with pytest.raises(fx.InputError, match=r"standardize: unknown value 'scal'.*'scale'"):
        data.from_libsvm(path, standardize="scal", **settings)


def test_dense_rows_can_be_scaled_only() -> None:
    scaled, raw = heart(standardize="scale"), heart()
    for (Z, _), (X, _) in zip(scaled.clients, raw.clients, strict=True):
        np.testing.assert_allclose(Z, X / raw.moments.sd[None, :], rtol=1e-14)


@pytest.mark.slow
def test_a_sparse_problem_is_the_dense_one(tmp_path: Path) -> None:
    X, y = sparse_rows(90, 60)
    path = sparse_file(tmp_path / "rows.svm", X, y)
    federation = data.from_libsvm(path, partition=data.Iid(3), n_features=60)
    settings: dict[str, Any] = {"loss": "logistic", "l2": 0.1}
    sparse = federation.problem(**settings)
    dense = fx.Problem([(X.toarray(), y) for X, y in federation.clients], **settings)
    x = np.random.default_rng(1).normal(size=60)
    assert sparse.value(x) == pytest.approx(dense.value(x), rel=1e-13)
    np.testing.assert_allclose(sparse.grad(x), dense.grad(x), rtol=1e-12, atol=1e-15)
    assert sparse.names == ["client 0", "client 1", "client 2"]


def test_sparse_rows_from_an_experiment(tmp_path: Path) -> None:
    sparse_file(tmp_path / "rows.svm", *sparse_rows(90, 60))
    table = {
        "rounds": 5,
        "data": {
            "libsvm": "rows.svm",
            "standardize": "scale",
            "n_features": 60,
            "partition": {"name": "iid", "clients": 3},
        },
        "problem": {"loss": "logistic", "l2": 0.1},
        "algorithms": [{"name": "FedAvg"}],
    }
    federation = parse(table, tmp_path).data.federation()
    assert scipy.sparse.issparse(federation.rows.X)
    sd = federation.rows.X.toarray().std(axis=0)
    varies = federation.moments.sd > 0.0
    np.testing.assert_allclose(sd[varies], 1.0, rtol=1e-12)
    assert not np.any(sd[~varies])  # columns without an entry are common, and no error
    assert 0 < np.count_nonzero(varies) < 60
    table["data"] |= {"standardize": "scales"}  # type: ignore[operator]
    with pytest.raises(fx.InputError, match=r"data\.standardize.*'scale'.*'scales'"):
        parse(table, tmp_path)


def test_libsvm_without_scikit_learn_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    path = write(tmp_path / "one.svm", "1 1:2\n")
    with pytest.raises(fx.InputError, match=r"pip install 'fedexact\[libsvm\]'"):
        data.from_libsvm(path, partition=data.Iid(1))


# --- what is refused ------------------------------------------------------------------------------

BAD_TABLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "NaN": (
        TABLE.replace("A,70", "A,NaN"), {}, r"client 'A', row 3, column 'age': nan is not a finite"
    ),
    "infinity": (TABLE.replace("3.5", "inf"), {}, "client 'A', row 3, column 'y': inf"),
    "unknown column": (TABLE, {"features": ["agee"]}, "no column 'agee'.*did you mean 'age'"),
    "unknown client": (TABLE, {"client": "sit"}, "client: there is no column 'sit'.*'site'"),
    "missing": (
        TABLE, {"missing": "error"}, r"client 'B', row 4: column 'age' is missing \(1 missing"
    ),
    "missing choice": (TABLE, {"missing": "dorp"}, "missing: unknown value 'dorp'.*'drop'"),
    "blank client": (TABLE.replace("B,60", ",60"), {}, "client column 'site': row 2 is blank"),
    "text among numbers": (
        TABLE.replace("70", "seventy"), {}, "column 'age' was read as text: client 'A', row 3 has "
        "'seventy', other rows have numbers",
    ),
    "reference": (
        TABLE, {"features": Features(reference={"stage": "IV"})}, r"no level 'IV'.*levels: I, II"
    ),
    "one level": (
        TABLE.replace("III", "I").replace("II", "I"), {}, "'stage' has the single level 'I'"
    ),
    "date": (TABLE.replace("age", "born").replace("50", "2001-01-01").replace("60", "2001-01-01")
             .replace("70", "2001-01-01").replace("80", "2001-01-01"), {}, "'born' holds date32"),
    "twice": (TABLE.replace("smoker", "age"), {}, "two columns are called 'age'"),
    "ragged": (TABLE + "A,1\n", {}, "not a readable CSV file: .*5 columns"),
    "empty": ("", {}, "not a readable CSV file: .*mpty"),
    "no rows": ("site,age,y\n", {}, "has no rows"),
    "no split": (TABLE, {"client": None}, "which column is the client"),
    "both": (TABLE, {"partition": data.Iid(2)}, "'site' and a partition exclude each other"),
    "constant": (
        TABLE.replace("50", "60").replace("70", "60").replace("80", "60"), {"standardize": True},
        "'age' cannot be standardised: its mean is 60 and its computed standard deviation 0 in 4",
    ),
    "too large to be squared": (
        TABLE.replace("A,70", "A,7e200"), {"standardize": True},
        r"client 'A', row 3, column 'age': 7e\+200 is larger than 1e\+100 .* rescale the column",
    ),
    "target too large": (
        TABLE.replace("3.5", "-1e101"), {}, r"client 'A', row 3, column 'y': -1e\+101 is larger"
    ),
    "standardize": (TABLE, {"standardize": ["ages"]}, "standardize: unknown value 'ages'.*'age'"),
    "target among features": (TABLE, {"features": ["age", "y"]}, "'y' is the target or client"),
    "not a feature": (
        TABLE, {"features": Features(("age",), categorical=("stage",))}, "'stage' .* not a feature"
    ),
    "event on text": (TABLE, {"target": Target("stage", above=1)}, "target.above.*holds text"),
    "event that never is": (
        TABLE, {"target": Target("stage", equals="IIII")}, "no row has stage = 'IIII'; did you mean"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_with_place_and_value(case: str, tmp_path: Path) -> None:
    text, settings, message = BAD_TABLES[case]
    with pytest.raises(fx.InputError, match=message):
        data.from_csv(csv(tmp_path, text), **{"target": "y", "client": "site", **settings})


@pytest.mark.parametrize("scale", [1e-200, 1e-150])
def test_a_tiny_column_that_varies_is_not_called_constant(scale: float) -> None:
    """Its squares underflow, to 0 or to numbers of a few digits."""
    sums = [data.client_sums(scale * np.arange(6.0)[:, None])]
    with pytest.raises(
        fx.InputError, match=r"'a' cannot be standardised.*else rescale it"
    ) as caught:
        data.pooled_moments(sums, ["a"])
    assert "in all" not in str(caught.value)
    assert data.pooled_moments(sums, ["a"], standardize=False).count == 6


def test_the_smallest_column_that_is_standardised_is_standardised_well() -> None:
    X = 1e-139 * np.arange(6.0)[:, None]
    moments = data.pooled_moments([data.client_sums(X)], ["a"])
    np.testing.assert_allclose(moments.apply(X).std(), 1.0, rtol=1e-12)


def test_an_identifier_is_no_feature() -> None:
    names = [f"patient {i}" for i in range(30)]
    table = pa.table({"s": ["a"] * 30, "who": names, "y": list(range(30))})
    with pytest.raises(fx.InputError, match=r"'who' has 30 levels in 30 rows.*identifier"):
        data.from_table(table, "y", client="s")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"}, "b.csv lacks 'y' and has 'z' in addition"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\nlow,2\n"}, "'x'.*number in a.csv, text in b.csv"),
        ({"a.csv": "x,y\n1,2\n", "a.parquet": ""}, "both for client 'a'"),
        ({"a.txt": "x,y\n1,2\n"}, "no files of clients"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\nNaN,2\n"}, "client 'b', row 1, column 'x': nan"),
    ],
)
def test_a_bad_folder_is_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(fx.InputError, match=message):
        data.from_folder(tmp_path, "y")


def test_missing_files_are_named_with_the_nearest(tmp_path: Path) -> None:
    csv(tmp_path, TABLE)
    with pytest.raises(fx.InputError, match=r"tabel.csv: no such file; did you mean 'table.csv'"):
        data.from_csv(tmp_path / "tabel.csv", "y", client="site")
    with pytest.raises(fx.InputError, match="no such folder"):
        data.from_folder(tmp_path / "nowhere", "y")
    with pytest.raises(fx.InputError, match="'heart_disease_uci'"):
        data.bundled("heart_disease", "num")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:2\n1 x:3\n", "not a readable LIBSVM"),
        ("1 1:2\n0 2:nan\n", "row 2, column x2: nan"),
        ("1 1:2\n0 2:1e200\n", r"row 2, column x2: 1e\+200 is larger than 1e\+100"),
        ("1 1:2\n1e200 2:1\n", r"row 2, column 'y': 1e\+200 is larger than 1e\+100"),
        ("# nothing\n", "no rows"),
    ],
)
def test_a_bad_libsvm_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.svm", text)
    with pytest.raises(fx.InputError, match=message):
        data.from_libsvm(path, partition=data.Iid(1))


# --- many clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
def test_clients_are_grouped_as_one_by_one(shuffled: bool) -> None:
    """The clients, what is missing, dropped and noted, against a loop over rows."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(40), rng.integers(2, 25, 40))
    if shuffled:
        rng.shuffle(owner)
    a, b = rng.normal(size=len(owner)).round(3), rng.integers(0, 2, len(owner)).astype(float)
    largest = int(np.argmax(np.bincount(owner)))
    a[owner == largest] = 7.0
    missing = rng.random(len(owner)) < 0.05
    missing[np.unique(owner, return_index=True)[1]] = False  # somebody has a row left
    cells = [None if gone else value for value, gone in zip(a.tolist(), missing, strict=True)]
    table = pa.table({"site": owner, "a": cells, "b": b, "y": np.arange(len(owner))})
    federation = data.from_table(table, "y", client="site", standardize=["b"])
    rows: dict[str, list[tuple[float, float, float]]] = {}
    gone: dict[str, int] = {}
    for k, a_i, b_i, y_i in zip(owner.tolist(), cells, b.tolist(), range(len(b)), strict=True):
        mine = rows.setdefault(str(k), [])
        gone.setdefault(str(k), 0)
        if a_i is None:
            gone[str(k)] += 1
        else:
            mine.append((a_i, b_i, float(y_i)))
    pooled = np.array([row for mine in rows.values() for row in mine])
    assert federation.names == tuple(rows)
    assert federation.dropped == tuple(gone.values())
    assert federation.missing == {k: {"a": n} if n else {} for k, n in gone.items()}
    for (X, y), mine in zip(federation.clients, rows.values(), strict=True):
        expected = np.array(mine)
        np.testing.assert_array_equal(X[:, 0], expected[:, 0])
        np.testing.assert_array_equal(y, expected[:, 2])
        scaled = (expected[:, 1] - pooled[:, 1].mean()) / pooled[:, 1].std()
        np.testing.assert_allclose(X[:, 1], scaled, rtol=1e-12)
    n = len(rows[str(largest)])
    assert federation.notes == (f"a is 7 in all {n} rows of {largest}",)


def test_moments_of_stacked_clients_are_those_of_one_after_the_other() -> None:
    n_rows = np.array([1, 5, 2, 30])
    X = 1e3 + np.random.default_rng(0).normal(size=(38, 3))
    stacked = pooled_moments(data.sums_of_clients(X, n_rows), ["a", "b", "c"])
    single = [client_sums(part) for part in np.split(X, np.cumsum(n_rows)[:-1])]
    each = pooled_moments(single, ["a", "b", "c"])
    np.testing.assert_allclose(stacked.mean, each.mean, rtol=1e-15)
    np.testing.assert_allclose(stacked.sd, each.sd, rtol=1e-13)


@pytest.mark.slow
def test_a_hundred_thousand_clients_in_a_table_and_on_the_disk(tmp_path: Path) -> None:
    N = 100_000
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(N), 3)
    rows = pa.table({"k": [f"c{k}" for k in owner], "x": owner + 0.5, "y": rng.normal(size=3 * N)})
    federation = data.from_table(rows, "y", client="k")
    parquet.write_table(rows.take(rng.permutation(3 * N)), tmp_path / "rows.parquet")
    mapped = data.memory_map(tmp_path / "rows.parquet", "y", client="k")
    assert len(federation.names) == len(mapped.names) == N
    for clients in (federation.rows, mapped):
        assert (clients.n_rows == 3).all()
        first = np.array([int(name[1:]) for name in clients.names])
        np.testing.assert_array_equal(clients.X[:, 0], np.repeat(first + 0.5, 3))
    assert mapped.y.sum() == pytest.approx(federation.rows.y.sum(), abs=1e-9)


# --- partitions -----------------------------------------------------------------------------------

LABELS = np.repeat([0.0, 1.0, 2.0], [50, 30, 20])

PARTITIONS: dict[str, Callable[[int], data.Partition]] = {
    "iid": lambda seed: data.Iid(7, seed=seed),
    "dirichlet": lambda seed: Dirichlet(4, alpha=2.0, seed=seed),
    "by_label": lambda seed: data.ByLabel(6, labels_per_client=2, seed=seed),
    "by_quantity": lambda seed: data.ByQuantity(5, power=1.5, seed=seed),
    "sizes": lambda seed: data.ByQuantity(sizes=(10, 20, 70), seed=seed),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_deal_every_row_out_once_and_replay(name: str) -> None:
    partition = PARTITIONS[name](3)
    parts = partition.split(LABELS)
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))
    again = PARTITIONS[name](3).split(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = PARTITIONS[name](4).split(LABELS)
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    record = partition.record(LABELS, parts)
    assert record.sizes.tolist() == [len(part) for part in parts]
    assert record.labels == (0.0, 1.0, 2.0)
    assert record.label_counts.sum(axis=0).tolist() == [50, 30, 20]
    assert record.label_counts.sum(axis=1).tolist() == record.sizes.tolist()


def test_what_each_partition_promises() -> None:
    sizes = [len(part) for part in PARTITIONS["iid"](0).split(LABELS)]
    assert sorted(sizes) == [14, 14, 14, 14, 14, 15, 15]
    parts = PARTITIONS["by_label"](0).split(LABELS)
    assert [sorted(set(LABELS[part])) for part in parts] == [[0, 1], [0, 2], [1, 2]] * 2
    power = [len(part) for part in PARTITIONS["by_quantity"](0).split(LABELS)]
    shares = np.arange(1, 6) ** -1.5
    assert np.all(np.abs(power - 100 * shares / shares.sum()) < 1)
    assert [len(part) for part in PARTITIONS["sizes"](0).split(LABELS)] == [10, 20, 70]


def test_dirichlet_goes_from_even_to_skewed() -> None:
    y = np.repeat([0.0, 1.0], 500)
    even = Dirichlet(4, alpha=1e6).record(y, Dirichlet(4, alpha=1e6).split(y)).label_counts
    assert np.all(np.abs(even - 125) <= 3)
    skewed = Dirichlet(4, alpha=0.2, seed=0)
    counts = skewed.record(y, skewed.split(y)).label_counts
    assert np.max(counts) > 400


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_dirichlet_shares_are_those_drawn(seed: int, clients: int) -> None:
    """Class by class, each client gets its share to within one row: nothing is left over."""
    partition = Dirichlet(clients, alpha=5.0, seed=seed)
    y = np.zeros(400)
    rng = np.random.default_rng(seed)
    rng.permutation(400)
    shares = rng.dirichlet(np.full(clients, 5.0))
    sizes = [len(part) for part in partition.split(y)]
    assert np.all(np.abs(sizes - 400 * shares) < 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.Iid(101).split(LABELS), "101 clients .* need 101 rows, the table has 100"),
        (lambda: data.Iid(0), "iid: clients must be an integer >= 1, got 0"),
        (lambda: Dirichlet(3, alpha=-1.0), "dirichlet: alpha must be a positive"),
        (lambda: Dirichlet(30, alpha=0.01).split(LABELS), "client .* gets 0 .*raise alpha"),
        (lambda: data.ByLabel(2).split(LABELS), "2 clients with 1 .*cannot hold all 3 classes"),
        (lambda: data.ByLabel(9, 4).split(LABELS), "labels_per_client = 4.*only 3 classes"),
        (lambda: data.ByLabel(4).split(np.arange(200.0)), "200 distinct values"),
        (lambda: data.ByQuantity(50, power=3.0).split(LABELS), "gets 0 .*smaller power"),
        (lambda: data.ByQuantity(sizes=(1, 2)).split(LABELS), "sizes add up to 3.*has 100"),
        (lambda: data.ByQuantity(), "clients .or sizes. must be an integer"),
        (lambda: data.ByQuantity(3, power=1.0, sizes=(1,)), "either sizes, or clients"),
        (lambda: data.Iid(3, seed=-1), "seed must be an integer >= 0"),
        (lambda: data.Iid(30, min_rows=4).split(LABELS), "at least 4 .*need 120 rows"),
    ],
)
def test_impossible_partitions_fail_fast_with_the_reason(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(fx.InputError, match=message):
        make()


def test_a_partitioned_table_records_what_was_made(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i % 2}" for i in range(12)) + "\n,1\n"
    federation = data.from_csv(
        csv(tmp_path, "x,y\n" + rows), "y", partition=data.ByLabel(2), standardize=True
    )
    assert federation.partition is not None
    assert federation.partition.label_counts.tolist() == [[6, 0], [0, 6]]
    assert "by_label(clients=2" in federation.partition.description
    assert federation.names == ("client 0", "client 1")
    assert any(note.startswith("1 rows with a missing cell") for note in federation.notes)
    assert re.fullmatch(r".*table\.csv", federation.source)
