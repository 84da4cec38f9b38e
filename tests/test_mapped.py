"""Parquet and Arrow files as arrays on the disk: the same clients, reused, never stale or half."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import fedexact as fx
from fedexact import data
from fedexact.clients import Clients
from fedexact.data import Target, mapped, memory_map


def table(n_rows: list[int], seed: int = 0, shuffled: bool = False) -> pa.Table:
    rng = np.random.default_rng(seed)
    n = sum(n_rows)
    owner = np.repeat(np.arange(len(n_rows)), n_rows)
    if shuffled:
        rng.shuffle(owner)
    return pa.table(
        {
            "who": [f"site {k}" for k in owner],
            "a": rng.normal(size=n),
            "b": rng.integers(0, 9, n),
            "c": rng.random(n) < 0.5,
            "y": rng.normal(size=n),
        }
    )


def write(path: Path, rows: pa.Table, **settings: Any) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(rows, path, **settings)
    else:
        with pa.ipc.new_file(path, rows.schema) as file:
            file.write_table(rows, **settings)
    return path


def check_same(clients: Clients, federation: data.Federation) -> None:
    """The same rows, bit for bit."""
    assert clients.names == list(federation.names)
    assert clients.feature_names == list(federation.feature_names)
    np.testing.assert_array_equal(clients.n_rows, federation.n_rows)
    np.testing.assert_array_equal(clients.X, federation.rows.X)
    np.testing.assert_array_equal(clients.y, federation.rows.y)


def lies_on_the_disk(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    return base is not None


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_the_clients_are_those_of_the_table(
    suffix: str, shuffled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table([5, 1, 8, 3, 30], shuffled=shuffled)
    size = {"row_group_size": 6} if suffix == ".parquet" else {"max_chunksize": 6}
    path = write(tmp_path / f"table{suffix}", rows, **size)
    monkeypatch.setattr(mapped, "_CELLS", 16)  # batches of four rows
    clients = memory_map(path, "y", client="who")
    check_same(clients, data.from_table(rows, "y", client="who"))
    assert lies_on_the_disk(clients.X)
    assert lies_on_the_disk(clients.y)
    problem = fx.Problem(clients, l2=0.1)
    np.testing.assert_allclose(
        problem.grad(np.ones(3)),
        data.from_table(rows, "y", client="who").problem(l2=0.1).grad(np.ones(3)),
        rtol=1e-13,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    owner=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    cells=st.integers(4, 40),
)
def test_rows_keep_their_order_within_a_client_in_any_batches(
    owner: list[int], cells: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    monkeypatch.setattr(mapped, "_CELLS", cells)
    rows = pa.table({"k": owner, "x": np.arange(len(owner)), "y": np.zeros(len(owner))})
    path = write(tmp_path_factory.mktemp("any") / "t.arrow", rows)
    clients = memory_map(path, "y", client="k")
    assert clients.names == [str(k) for k in dict.fromkeys(owner)]
    for name, (X, _) in zip(clients.names, clients.pairs(), strict=True):
        assert X[:, 0].tolist() == [i for i, k in enumerate(owner) if str(k) == name]


def test_a_folder_of_parts_and_a_folder_of_clients(tmp_path: Path) -> None:
    rows = table([4, 6, 5], shuffled=True)
    for i in range(3):
        write(tmp_path / f"part{i}.parquet", rows.slice(5 * i, 5))
    clients = memory_map(tmp_path, "y", client="who", folder=tmp_path / "cache")
    check_same(clients, data.from_table(rows, "y", client="who"))
    clients = memory_map(tmp_path, "y", features=["a", "b"], folder=tmp_path / "cache")
    check_same(clients, data.from_folder(tmp_path, "y", features=["a", "b"]))
    assert clients.names == ["part0", "part1", "part2"]


@pytest.mark.parametrize(
    "target", [Target("b", above=4), Target("b", equals=3.0), Target("c"), Target("c", equals=True)]
)
def test_targets(target: Target, tmp_path: Path) -> None:
    rows = table([10, 7])
    path = write(tmp_path / "t.parquet", rows)
    clients = memory_map(path, target, client="who", features=["a"])
    check_same(clients, data.from_table(rows, target, client="who", features=["a"]))


def test_a_text_target_is_an_event(tmp_path: Path) -> None:
    rows = pa.table({"k": [1, 1, 2], "x": [1.0, 2.0, 3.0], "y": ["ill", "well", "ill"]})
    path = write(tmp_path / "t.parquet", rows)
    assert memory_map(path, Target("y", equals="ill"), client="k").y.tolist() == [1, 0, 1]
    with pytest.raises(fx.InputError, match=r"no row has y = il$"):
        memory_map(path, Target("y", equals="il"), client="k")
    with pytest.raises(fx.InputError, match=r"target 'y' holds text; give Target\('y', equals"):
        memory_map(path, "y", client="k")


# --- the cache ------------------------------------------------------------------------------------


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("the rows are read again")

    monkeypatch.setattr(mapped, "_batches", read)


def test_an_unchanged_source_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.parquet", table([3, 4]))
    first = memory_map(path, "y", client="who")
    forbid_reading(monkeypatch)
    again = memory_map(path, "y", client="who")
    np.testing.assert_array_equal(first.X, again.X)
    assert first.names == again.names
    with pytest.raises(AssertionError, match="read again"):
        memory_map(path, "y", client="who", features=["a"])


@pytest.mark.parametrize("change", ["time", "size"])
def test_a_changed_source_is_read_again_and_the_old_rows_removed(
    change: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.arrow", table([3, 4]))
    before = path.stat()
    old = memory_map(path, "y", client="who")
    rows = table([3, 4] if change == "time" else [3, 400], seed=1)
    write(path, rows)
    later = change == "time"
    assert (path.stat().st_size == before.st_size) == later
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    new = memory_map(path, "y", client="who")
    check_same(new, data.from_table(rows, "y", client="who"))
    assert not np.array_equal(old.X, new.X[:7])
    assert len(list((tmp_path / "t.arrow.clients").iterdir())) == 1


def test_what_a_killed_process_left_is_removed_after_some_days(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", table([3, 4]))
    now = time.time()
    for name, days in (("old", 4), ("young", 1)):
        part = tmp_path / "t.arrow.clients" / f".abc{mapped._PART}{name}"
        part.mkdir(parents=True)
        os.utime(part, (now, now - days * 86400))
    memory_map(path, "y", client="who")
    left = [p.name for p in (tmp_path / "t.arrow.clients").iterdir() if mapped._PART in p.name]
    assert left == [f".abc{mapped._PART}young"]


def test_nothing_half_written_is_left_or_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table([30, 40])
    path = write(tmp_path / "t.parquet", rows, row_group_size=10)
    real = mapped._places

    def stops(owner: np.ndarray, free: np.ndarray) -> Any:
        if free[0] > 0:
            raise KeyboardInterrupt
        return real(owner, free)

    monkeypatch.setattr(mapped, "_CELLS", 40)
    with monkeypatch.context() as patch:
        patch.setattr(mapped, "_places", stops)
        with pytest.raises(KeyboardInterrupt):
            memory_map(path, "y", client="who")
    assert list((tmp_path / "t.parquet.clients").iterdir()) == []
    check_same(memory_map(path, "y", client="who"), data.from_table(rows, "y", client="who"))


@pytest.mark.parametrize("name", ["X.npy", "y.npy", "n_rows.npy", "record.json"])
def test_a_damaged_cache_is_written_anew(name: str, tmp_path: Path) -> None:
    rows = table([3, 4])
    path = write(tmp_path / "t.parquet", rows)
    memory_map(path, "y", client="who")
    (file,) = (tmp_path / "t.parquet.clients").glob(f"*/{name}")
    os.truncate(file, file.stat().st_size - 9)
    check_same(memory_map(path, "y", client="who"), data.from_table(rows, "y", client="who"))


def test_a_source_that_changes_under_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.parquet", table([3, 4]))
    real = mapped._fill

    def fill(*args: Any) -> None:
        real(*args)
        os.utime(path, ns=(0, 0))

    monkeypatch.setattr(mapped, "_fill", fill)
    with pytest.raises(fx.InputError, match=r"t\.parquet: changed while it was read"):
        memory_map(path, "y", client="who")
    assert list((tmp_path / "t.parquet.clients").iterdir()) == []


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", table([3, 4]))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(fx.InputError, match=r"the rows need 0\.0 GB, the disk has 0\.0 GB left"):
        memory_map(path, "y", client="who")


def test_of_the_rows_a_batch_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n, p = 40_000, 20
    rng = np.random.default_rng(0)
    columns = {f"x{j}": rng.normal(size=n) for j in range(p)}
    rows = pa.table({"k": np.arange(n) // 100, **columns, "y": rng.normal(size=n)})
    path = write(tmp_path / "t.parquet", rows, row_group_size=1000)
    monkeypatch.setattr(mapped, "_CELLS", 21 * 1000)
    monkeypatch.setattr(mapped, "Clients", lambda *a: a)  # its check is not what is measured
    tracemalloc.start()
    memory_map(path, "y", client="k")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * p * 8 / 5


# --- what is refused ------------------------------------------------------------------------------

GOOD: dict[str, list[Any]] = {
    "k": ["A", "A", "B", "B"], "x": [1.0, 2.0, 3.0, 4.0], "y": [1.0, 0.0, 1.0, 0.0],
}  # fmt: skip
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": ({"x": [1.0, 2.0, None, 4.0]}, {}, "client 'B', row 3, column 'x': the cell is mis"),
    "missing target": ({"y": [1.0, None, 0.0, 0.0]}, {}, "client 'A', row 2, column 'y': the cell"),
    "nan": ({"x": [1.0, 2.0, 3.0, np.nan]}, {}, "client 'B', row 4, column 'x': nan is not a fin"),
    "huge": ({"y": [1.0, 2.0, 3.0, 1e200]}, {}, r"client 'B', row 4, column 'y': 1e\+200 is larg"),
    "no owner": ({"k": ["A", "A", None, "B"]}, {}, "client column 'k': row 3 is blank"),
    "nan owner": ({"k": [1.0, 1.0, 2.0, np.nan]}, {}, "client column 'k': row 4 is blank or not a"),
    "text": ({"x": ["1", "2", "3", "4"]}, {}, "column 'x' holds text; only numbers and true/false"),
    "categories": ({}, {"features": data.Features(categorical=("x",))}, "categories are not coded"),
    "client": ({}, {"client": "kk"}, "client: there is no column 'kk'.*did you mean 'k'"),
    "no client": ({}, {"client": None}, "say which column is the client"),
    "target": ({}, {"target": "z"}, "target: there is no column 'z'"),
    "event": ({}, {"target": Target("y", equals="1")}, "target 'y' holds numbers; give Target"),
    "no rows": (
        {"k": pa.array([], pa.string()), "x": pa.array([], pa.float64()),
         "y": pa.array([], pa.float64())}, {}, "there are no rows in it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused_with_place_and_value(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, given_, message = BAD[case]
    monkeypatch.setattr(mapped, "_CELLS", 4)  # batches of two rows
    path = write(tmp_path / "bad.parquet", pa.table({**GOOD, **columns}))
    with pytest.raises(fx.InputError, match=message) as caught:
        memory_map(path, **{"target": "y", "client": "k", **given_})
    assert "bad.parquet" in str(caught.value)
    assert not list(tmp_path.glob("*.clients/*"))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("x,y")
    (tmp_path / "text.arrow").write_text("x,y")
    for name in ("text.parquet", "text.arrow"):
        with pytest.raises(fx.InputError, match=f"{name}: not a readable Parquet or Arrow file"):
            memory_map(tmp_path / name, "y", client="k")
    (tmp_path / "text.csv").write_text("x,y")
    with pytest.raises(fx.InputError, match=r"text\.csv: not a Parquet or Arrow file by its name"):
        memory_map(tmp_path / "text.csv", "y", client="k")
    with pytest.raises(fx.InputError, match=r"nowhere\.parquet: no such file"):
        memory_map(tmp_path / "nowhere.parquet", "y", client="k")


def test_client_columns_of_two_types_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table(GOOD))
    write(tmp_path / "b.parquet", pa.table({**GOOD, "k": [1, 1, 2, 2]}))
    with pytest.raises(fx.InputError, match=r"'k' is of different types: text in a.*number in b"):
        memory_map(tmp_path, "y", client="k", folder=tmp_path / "cache")
