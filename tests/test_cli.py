"""The command: what it writes, that it can be interrupted at any time, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner
from typer.testing import Result as Done

import fedexact as fx
from fedexact import cli, config, data, report
from fedexact.config import runner
from fedexact.data import PARTITIONS
from fedexact.report import files
from fedexact.report.figure import FLOOR
from problems import THREE_SITES

FILES = ["experiment.toml", "figure.png", "figure.svg", "history.parquet", "result.json"]

TABLE = "site,age,dose,y\n" + "".join(
    f"{'ABC'[i % 3]},{40 + (7 * i) % 31},{(5 * i) % 8},{int((i * i) % 5 > 1)}\n" for i in range(36)
)

EXPERIMENT = 'title = "Three sites"\nrounds = 60\nrecord_every = 5\n' + THREE_SITES


@pytest.fixture(autouse=True)
def _ctrl_c_works() -> Iterator[None]:
    """Also where the tests run in the background of a script, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "three.toml").write_text(EXPERIMENT)
    return tmp_path


def command(*arguments: object) -> Done:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def run(folder: Path, *arguments: object, out: str = "out") -> Done:
    return command("run", folder / "three.toml", "--out", folder / out, *arguments)


def succeeded(done: Done) -> str:
    assert done.exit_code == 0, done.output
    return done.stdout


def edit(folder: Path, old: str, new: str, file: str = "three.toml") -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def same_results(one: Path, two: Path) -> None:
    assert (one / "result.json").read_text() == (two / "result.json").read_text()
    assert (one / "experiment.toml").read_text() == (two / "experiment.toml").read_text()
    tables = [parquet.read_table(out / "history.parquet") for out in (one, two)]
    assert tables[0].equals(tables[1])


# --- what a run writes and prints -----------------------------------------------------------------


def test_a_run_writes_its_files_and_a_table(folder: Path) -> None:
    printed = succeeded(run(folder))
    out = folder / "out"
    assert sorted(path.name for path in out.iterdir()) == [*FILES, "runs"]

    result = json.loads((out / "result.json").read_text())
    problem = config.prepare(config.load(folder / "three.toml")).problem
    pooled = np.array(list(result["pooled_solution"]["x"].values()))
    np.testing.assert_array_equal(pooled, fx.reference(problem))
    assert list(result["pooled_solution"]["x"]) == ["intercept", "age", "dose"]
    by_label = {entry["label"]: entry for entry in result["runs"]}
    x = np.array(list(by_label["FedAvg"]["x"].values()))
    assert by_label["FedAvg"]["distance"] == np.linalg.norm(x - pooled)
    assert by_label["FedAvg"]["exact_by_theory"] is False
    assert by_label["FOCUS"]["exact_by_theory"] is True
    clients = result["data"]["clients"]
    assert [client["rows"] for client in clients] == [12, 12, 12]
    assert [client["participation"] for client in clients] == [0.9, 0.5, 0.7]

    history = parquet.read_table(out / "history.parquet")
    assert history.column_names[:3] == ["algorithm", "seed", "round"]
    assert history.num_rows == 2 * 13
    last = history.to_pylist()[-1]
    assert (last["algorithm"], last["round"]) == ("FOCUS", 60)
    assert last["distance"] == by_label["FOCUS"]["distance"]
    assert last["distance_se"] == by_label["FOCUS"]["distance_se"]

    for words in ("Three sites", "rows used", "logistic loss, mean over 36 rows of 3 clients"):
        assert words in printed
    assert re.search(r"FedAvg +biased +60 .* not certified", printed)
    assert re.search(r"FOCUS +exact +60 ", printed)
    assert "chosen automatically: FedAvg: lr = " in printed
    assert str(out) in printed.replace("\n", "")


def test_the_original_scale_is_that_of_the_raw_columns(folder: Path) -> None:
    edit(folder, "l2 = 0.1\n", "")  # a ridge depends on the scale
    succeeded(run(folder))
    edit(folder, "standardize = true", "standardize = false")
    succeeded(run(folder, out="raw"))
    standardised, raw = (
        json.loads((folder / out / "result.json").read_text())["pooled_solution"]
        for out in ("out", "raw")
    )
    mapped, direct = standardised["original_scale"], raw["x"]
    assert raw["original_scale"] is None
    np.testing.assert_allclose(list(mapped.values()), list(direct.values()), rtol=1e-8)


def test_the_resolved_experiment_gives_the_same_results(folder: Path) -> None:
    succeeded(run(folder))
    again = folder / "out" / "experiment.toml"
    succeeded(command("run", again, "--out", folder / "again"))
    one, two = (json.loads((folder / o / "result.json").read_text()) for o in ("out", "again"))
    for run_one, run_two in zip(one.pop("runs"), two.pop("runs"), strict=True):
        assert run_two.pop("chosen") == {}
        assert run_one.pop("chosen") != {}
        assert run_one == run_two
    assert one == two


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits_where_there_is_no_terminal(
    folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = succeeded(run(folder, "--seed", 1, "--seed", 2))
    assert max(map(len, printed.splitlines())) <= columns
    table = printed[printed.index("theory") :]
    assert "…" not in table
    assert "not certified" in table


def test_several_seeds_show_the_median_and_the_worst(folder: Path) -> None:
    printed = succeeded(run(folder, "--seed", 3, "--seed", 4, "--seed", 5))
    result = json.loads((folder / "out" / "result.json").read_text())
    assert [(entry["label"], entry["seed"]) for entry in result["runs"]] == [
        (label, seed) for label in ("FedAvg", "FOCUS") for seed in (3, 4, 5)
    ]
    distances = [entry["distance"] for entry in result["runs"] if entry["label"] == "FedAvg"]
    lines = printed.splitlines()
    row = next(i for i, line in enumerate(lines) if re.match(r" *FedAvg +biased", line))
    assert f"{np.median(distances):.3g}" in lines[row]
    assert f"{max(distances):.3g}" in lines[row + 1]


def test_quiet_prints_nothing(folder: Path) -> None:
    assert run(folder, "--quiet").output == ""
    assert (folder / "out" / "result.json").is_file()


def test_the_default_output_folder_is_named_after_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    succeeded(command("run", "three.toml"))
    assert (folder / "results" / "three" / "result.json").is_file()


def test_list_shows_every_entry_of_every_registry() -> None:
    lines = succeeded(command("list")).splitlines()
    registries = (
        fx.ALGORITHMS, fx.LOSSES, fx.REGULARIZERS, fx.PARTICIPATIONS, PARTITIONS, data.BUNDLED
    )  # fmt: skip
    for registry in registries:
        for name, entry in registry.items():
            start = " ".join(entry.summary.split()[:3])
            assert any(re.match(rf" +{name} +{re.escape(start)}", line) for line in lines), name


def test_version() -> None:
    assert succeeded(command("--version")) == f"fedexact {fx.__version__}\n"


# --- the figure -----------------------------------------------------------------------------------


def outcome(folder: Path, *seeds: int) -> config.Outcome:
    asked = config.load(folder / "three.toml").with_seeds(seeds or [0])
    store = config.Store(folder / "out", asked, resume=False)
    return config.run(config.prepare(asked), store, Silent())


class Silent:
    def begin(self, label: str, seed: int, rounds: int) -> None: ...
    def advance(self, progress: fx.Progress) -> None: ...
    def end(self, run: config.Run) -> None: ...


def test_the_figure_shows_every_run_against_rounds_and_bytes(folder: Path) -> None:
    found = outcome(folder, 0, 1)
    figure = report.convergence_figure(*report.curves(found), "Three sites")
    left, right = figure.axes
    assert (left.get_yscale(), right.get_yscale()) == ("log", "log")
    assert left.get_ylabel() == "distance to the pooled solution, standard errors"
    assert left.get_xlabel() == "rounds"
    for axes in (left, right):
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]  # pyright: ignore
        assert len(lines) == 4
        for line, run_ in zip(lines, found.runs, strict=True):
            table = run_.result.history
            x = table["round"].to_numpy()
            if axes is right:
                x = (table["bytes_up"].to_numpy() + table["bytes_down"].to_numpy()) / 1e6
            np.testing.assert_array_equal(line.get_xdata(), x)
            shown = np.maximum(table["distance_se"].to_numpy(), FLOOR)  # a log axis has no 0
            np.testing.assert_array_equal(line.get_ydata(), shown)
            assert line.get_linestyle() == ("-" if run_.label == "FOCUS" else "--")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "exact by theory", "FOCUS", "biased by theory", "FedAvg",
        "the pooled answer", "within 1e-8 SE",
    ]  # fmt: skip
    assert left.get_ylim()[0] <= 1e-10  # the region of 1e-8 standard errors is to be seen
    figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert not any(legend.get_window_extent().overlaps(box) for box in boxes)


def test_the_figure_files_are_images(folder: Path) -> None:
    from PIL import Image

    succeeded(run(folder))
    with Image.open(folder / "out" / "figure.png") as picture:
        picture.verify()
        assert picture.size[0] > 1500
    root = ElementTree.parse(folder / "out" / "figure.svg").getroot()
    assert root.tag.endswith("svg")
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"FedAvg", "FOCUS", "rounds", "exact by theory"} <= texts


def test_without_standard_errors_the_figure_shows_the_distance(folder: Path) -> None:
    edit(folder, '"logistic"', '{ name = "huber", delta = 1.0 }')
    figure = report.convergence_figure(*report.curves(outcome(folder)), "")
    assert figure.axes[0].get_ylabel().startswith("distance to the pooled solution, |x")


ODD_LABELS = ["_hidden", r"x $\foo$", "a [/] b", "exact by theory"]


def test_labels_and_titles_are_shown_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    title = r"_T $\foo$ [/] \$"
    tables = "".join(f"[[algorithms]]\nname = 'FOCUS'\nlabel = '{la}'\n" for la in ODD_LABELS)
    text = EXPERIMENT[: EXPERIMENT.index("[[algorithms]]")].replace('"Three sites"', f"'{title}'")
    (folder / "three.toml").write_text(text + tables)
    printed = succeeded(run(folder, "--seed", 1, "--seed", 2))
    for words in (title, *(f"{label}, seed 2: " for label in ODD_LABELS)):
        assert words in printed
    assert sorted(path.name for path in (folder / "out").iterdir()) == [*FILES, "runs"]
    root = ElementTree.parse(folder / "out" / "figure.svg").getroot()
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {title, *ODD_LABELS} <= texts

    terminal = Console(force_terminal=True, width=200, file=io.StringIO())
    monkeypatch.setattr(cli.report, "console", lambda quiet=False: terminal)
    succeeded(run(folder, out="terminal"))
    assert "a [/] b, seed 0: " in terminal.file.getvalue()  # pyright: ignore


@pytest.mark.parametrize("alone", [True, False])
def test_a_diverged_run_says_so_and_reports_its_kept_round(alone: bool, folder: Path) -> None:
    edit(folder, 'name = "FedAvg"', 'name = "FedAvg"\nlr = 1e6')
    edit(folder, "record_every = 5", "record_every = 1")
    if alone:
        edit(folder, '[[algorithms]]\nname = "FOCUS"\n', "")
    printed = succeeded(run(folder))
    assert re.search(r"FedAvg +biased .* diverged *\n", printed)

    result = json.loads((folder / "out" / "result.json").read_text())
    entry = result["runs"][0]
    rows = parquet.read_table(folder / "out" / "history.parquet").to_pylist()
    rows = [row for row in rows if row["algorithm"] == "FedAvg"]
    assert entry["status"] == "diverged"
    assert entry["stopped_at_round"] == rows[-1]["round"] > entry["rounds"]
    (kept,) = [row for row in rows if row["round"] == entry["rounds"]]
    for key in (*files.COUNTS, "distance", "distance_se"):
        assert entry[key] == kept[key], key

    found = outcome(folder)
    figure = report.convergence_figure(*report.curves(found), "")
    start = rows[0]["distance_se"]
    assert rows[-1]["distance_se"] > 1e4 * start
    bottom, top = figure.axes[0].get_ylim()
    assert top == pytest.approx(1e3 * start)
    assert bottom < start
    assert bottom > 1e-20
    (legend,) = figure.legends
    assert "FedAvg (diverged)" in [text.get_text() for text in legend.get_texts()]
    figure.draw_without_rendering()


def test_the_ticks_of_rounds_are_whole_and_those_of_bytes_few(folder: Path) -> None:
    edit(folder, "rounds = 60", "rounds = 2")
    left, right = report.convergence_figure(*report.curves(outcome(folder)), "").axes
    assert all(tick == round(tick) for tick in left.get_xticks())
    assert len(right.get_xticks()) <= 7


def test_the_clients_never_present_are_counted(folder: Path) -> None:
    rows = "".join(f"c{i:02d},{i % 7},{i % 5},{i % 2}\n" for i in range(15) for _ in range(2))
    (folder / "table.csv").write_text("site,age,dose,y\n" + rows)
    edit(folder, "p = [0.9, 0.5, 0.7]", f"p = {[1.0] + [0.0] * 14}")
    printed = succeeded(run(folder)).replace("\n", "")
    assert re.search(r"FedAvg, seed 0: never present: c01, .*c12 and 2 more", printed)


# --- interrupted and resumed ----------------------------------------------------------------------


def signal_at(label: str, round_: int, sent: signal.Signals) -> Callable[..., None]:
    """An `advance` that sends the process a signal at a round of one algorithm."""
    now = {}

    def begin(self: Any, label: str, seed: int, rounds: int) -> None:
        now["label"] = label

    def advance(self: Any, progress: fx.Progress) -> None:
        if (now["label"], progress.round) == (label, round_):
            os.kill(os.getpid(), sent)

    cli._Lines.begin, cli._Lines.advance = begin, advance  # type: ignore[method-assign]
    return advance


@pytest.mark.parametrize(("label", "round_"), [("FedAvg", 0), ("FOCUS", 25), ("FOCUS", 60)])
def test_ctrl_c_keeps_what_was_done_and_resume_gives_the_same(
    folder: Path, label: str, round_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded(run(folder, out="whole"))
    with monkeypatch.context() as patch:
        patch.setattr(cli._Lines, "begin", cli._Lines.begin)
        patch.setattr(cli._Lines, "advance", cli._Lines.advance)
        signal_at(label, round_, signal.SIGINT)
        done = run(folder)
    assert done.exit_code == 130
    assert "Traceback" not in done.output
    assert f"fedexact run {folder / 'three.toml'} --out {folder / 'out'} --resume" in done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == ["runs"]
    kept = fx.Result.load(next((folder / "out" / "runs").glob(f"*-{label}-seed0.npz")))
    assert (kept.status, kept.rounds) == ("interrupted", round_)

    solved = []
    real = runner.solve
    monkeypatch.setattr(
        runner, "solve", lambda *a, **k: (solved.append(a[1].name), real(*a, **k))[1]
    )
    succeeded(run(folder, "--resume"))
    assert solved == (["FedAvg", "FOCUS"] if label == "FedAvg" else ["FOCUS"])
    same_results(folder / "whole", folder / "out")


KILLED = """
import signal, sys
import test_cli
from fedexact.config import runner
runner.SAVE_EVERY = 0.0
test_cli.signal_at("FOCUS", 35, signal.SIGKILL)
print(test_cli.command(*sys.argv[1:]).output)
"""


@pytest.mark.slow
def test_a_killed_run_loses_at_most_what_came_after_its_last_checkpoint(folder: Path) -> None:
    succeeded(run(folder, out="whole"))
    arguments = ["run", str(folder / "three.toml"), "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], cwd=Path(__file__).parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert fx.Result.load(folder / "out" / "runs" / "02-FOCUS-seed0.npz").rounds == 30
    (folder / "out" / "runs" / ".02-FOCUS-seed0.part-1a2b3c4d.npz").write_text("half")
    succeeded(run(folder, "--resume"))
    same_results(folder / "whole", folder / "out")
    assert not list((folder / "out" / "runs").glob(".*"))


@pytest.mark.slow
def test_ctrl_c_in_a_shell(folder: Path) -> None:
    edit(folder, "rounds = 60", "rounds = 2000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedexact", "run", "three.toml"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    kept = folder / "results" / "three" / "runs"
    for _ in range(600):
        if list(kept.glob("*.npz")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == (
        "interrupted; what was done is kept in results/three\n"
        "to go on: fedexact run three.toml --out results/three --resume\n"
    )
    assert fx.Result.load(next(kept.glob("*.npz"))).status == "interrupted"


def test_resume_of_a_finished_run_writes_the_same_again(folder: Path) -> None:
    succeeded(run(folder))
    before = {name: (folder / "out" / name).read_bytes() for name in FILES}
    succeeded(run(folder, "--resume"))
    for name in FILES:
        assert (folder / "out" / name).read_bytes() == before[name], name


def test_resume_refuses_another_experiment(folder: Path) -> None:
    succeeded(run(folder))
    edit(folder, "rounds = 60", "rounds = 61")
    edit(folder, 'name = "FOCUS"', 'name = "FOCUS"\nlocal_steps = 2')
    done = run(folder, "--resume", "--seed", 9)
    assert done.exit_code == 2
    assert "is of another experiment" in done.stderr
    assert "rounds: 60 there, 61 here" in done.stderr
    assert "seeds: [0] there, [9] here" in done.stderr
    assert "algorithms.FOCUS.local_steps: 1 there, 2 here" in done.stderr


def test_resume_of_nothing_is_refused(folder: Path) -> None:
    done = run(folder, "--resume")
    assert done.exit_code == 2
    assert "holds no run that could be resumed" in done.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize(("old", "new"), [("A,40,0,0", "A,40,0,1"), ("C,", "D,")])
def test_resume_notices_that_the_data_have_changed(
    interrupted: bool, old: str, new: str, folder: Path
) -> None:
    """Other labels or another name, while a run is unfinished and when all are."""
    if interrupted:
        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(cli._Lines, "begin", cli._Lines.begin)
            patch.setattr(cli._Lines, "advance", cli._Lines.advance)
            signal_at("FedAvg", 10, signal.SIGINT)
            assert run(folder).exit_code == 130
    else:
        succeeded(run(folder))
    before = contents(folder / "out")
    edit(folder, old, new, "table.csv")
    refused(run(folder, "--resume"), "--resume: the rows or the clients have changed", "FedAvg")
    assert contents(folder / "out") == before


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def refused(done: Done, *words: str) -> None:
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --resume: ")
    for word in (*words, "leave --resume out to start again"):
        assert word in done.stderr


@pytest.mark.parametrize("damage", [b"rounds = = 3", b"\xff\xfe", b""])
def test_resume_with_a_damaged_experiment(damage: bytes, folder: Path) -> None:
    succeeded(run(folder))
    (folder / "out" / "runs" / "experiment.toml").write_bytes(damage)
    refused(run(folder, "--resume"), "experiment.toml" if damage else "another experiment")


def test_resume_with_a_damaged_checkpoint(folder: Path) -> None:
    """At every place of the file that is hit: one message, or nothing that matters was hit."""
    succeeded(run(folder))
    prepared = config.prepare(config.load(folder / "three.toml"))
    store = config.Store(folder / "out", prepared.experiment, resume=True)
    path = folder / "out" / "runs" / "02-FOCUS-seed0.npz"
    whole = path.read_bytes()
    kept = store.load("FOCUS", 0, prepared.problem)
    assert kept is not None
    messages = []
    for start in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:start] + b"\xa5" * 8 + whole[start + 8 :])
        try:
            hit = store.load("FOCUS", 0, prepared.problem)
        except fx.InputError as error:
            messages.append(str(error))
        else:
            assert hit is not None
            np.testing.assert_array_equal(hit.x, kept.x)
    assert len(messages) > 20
    for message in messages:
        assert f"delete {path} to run FOCUS, seed 0, anew" in message
    path.write_bytes(whole[:-100])
    refused(run(folder, "--resume"), f"delete {path}")
    path.unlink()
    succeeded(run(folder, "--resume"))
    again = store.load("FOCUS", 0, prepared.problem)
    assert again is not None
    np.testing.assert_array_equal(again.x, kept.x)


def test_old_results_are_replaced_as_a_whole_or_not_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded(run(folder))
    before = {name: (folder / "out" / name).read_bytes() for name in FILES}

    def full_disk(*arguments: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "image", full_disk)
    assert run(folder, "--seed", 1).exit_code != 0
    after = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}
    assert after == before


# --- what is refused ------------------------------------------------------------------------------


def zero_rows(folder: Path) -> None:
    (folder / "table.csv").write_text("site,age,dose,y\n")


def separated(folder: Path) -> None:
    edit(folder, "l2 = 0.1\n", "")
    rows = (f"{'ABC'[i % 3]},{40 + (7 * i) % 31},{i},{int(i > 17)}\n" for i in range(36))
    (folder / "table.csv").write_text("site,age,dose,y\n" + "".join(rows))


def lacking_column(folder: Path) -> None:
    sites = folder / "sites"
    sites.mkdir()
    (sites / "north.csv").write_text("age,dose,y\n50,1,0\n60,2,1\n")
    (sites / "south.csv").write_text("age,y\n50,0\n")
    edit(folder, 'csv = "table.csv"\nclient = "site"', 'folder = "sites"')


BAD: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "NaN": (
        lambda f: edit(f, "A,40,0,0", "A,NaN,0,0", "table.csv"), ["client 'A'", "'age'", "nan"]
    ),
    "too large": (
        lambda f: edit(f, "A,40,0,0", "A,4e200,0,0", "table.csv"), ["client 'A'", "'age'", "4e+200"]
    ),
    "different columns": (lacking_column, ["south.csv", "'dose'"]),
    "a short row": (lambda f: edit(f, "A,40,0,0", "A,40,0", "table.csv"), ["table.csv", "columns"]),
    "labels": (lambda f: edit(f, 'target = "y"\nfeatures = ["age", "dose"]',
                              'target = "dose"\nfeatures = ["age"]'), ["client 'A'", "7.0"]),
    "zero rows": (zero_rows, ["table.csv", "no rows"]),
    "negative step": (
        lambda f: edit(f, 'name = "FOCUS"', 'name = "FedProx"\nstep = -0.5'),
        ["FedProx", "step", "-0.5"],
    ),
    "unknown key": (lambda f: edit(f, "rounds", "ruonds"), ["ruonds", "'rounds'"]),
    "unknown name": (lambda f: edit(f, '"FOCUS"', '"FOCAS"'), ["'FOCAS'", "'FOCUS'", "SCAFFOLD"]),
    "unknown hyperparameter": (
        lambda f: edit(f, 'name = "FOCUS"', 'name = "FOCUS"\nlocal_step = 2'),
        ["FOCUS", "local_step", "'local_steps'"],
    ),
    "missing data file": (lambda f: edit(f, "table.csv", "tables.csv"), ["tables.csv", "no such"]),
    "missing experiment": (lambda f: (f / "three.toml").unlink(), ["three.toml", "no such file"]),
    "vector of the wrong length": (
        lambda f: edit(f, "[0.9, 0.5, 0.7]", "[0.9, 0.5]"), ["p has 2 entries", "3 clients", "A, B"]
    ),
    "no prox step": (
        lambda f: edit(f, "l2 = 0.1", 'regularizer = { name = "l1", strength = 0.1 }'),
        ["FedAvg", "L1", "FedDR"],
    ),
    "separation": (separated, ["dose", "finite"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_clear_message_and_writes_nothing(case: str, folder: Path) -> None:
    spoil, words = BAD[case]
    spoil(folder)
    before = sorted(folder.rglob("*"))
    done = run(folder)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_real_process_exits_with_2_and_prints_one_message(folder: Path) -> None:
    edit(folder, "rounds", "ruonds")
    done = subprocess.run(
        [sys.executable, "-m", "fedexact", "run", "three.toml"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "error: three.toml: ruonds = 60: unknown key; did you mean 'rounds'"
    )
    assert not (folder / "results").exists()


def test_an_output_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    done = run(folder, out="file/out")
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


def test_a_misspelt_bundled_experiment_is_refused(tmp_path: Path) -> None:
    done = command("run", "hart", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "'hart'; did you mean 'heart'" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["run", "--seed", "-1"], ["run", "--sede", "1"], ["fly"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert command(*arguments).exit_code == 2


# --- the main job ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_hospitals_exact_and_biased(tmp_path: Path) -> None:
    """The bundled experiment: who is within 1e-8 standard errors of the pooled fit, who is not."""
    succeeded(command("run", "--out", tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    for run_ in result["runs"]:
        verdict = run_["certificate"]["verdict"]
        if run_["label"] in ("FedAvg", "FedProx"):
            assert (run_["exact_by_theory"], verdict) == (False, "not certified")
            assert run_["distance_se"] > 0.5
        else:
            assert (run_["exact_by_theory"], verdict) == (True, "certified")
            assert run_["distance_se"] <= 1e-8
            assert run_["certificate"]["distance_bound_se"] >= run_["distance_se"]
    assert len(result["runs"]) == 6


@pytest.mark.slow
def test_four_hospitals_with_a_lasso(tmp_path: Path) -> None:
    succeeded(command("run", "heart_lasso", "--out", tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run_["certificate"]["verdict"] for run_ in result["runs"]] == ["certified"] * 3
    pooled = np.array(list(result["pooled_solution"]["x"].values()))
    assert np.sum(pooled == 0) > 0
    for run_ in result["runs"]:
        np.testing.assert_allclose(list(run_["x"].values()), pooled, rtol=0, atol=1e-10)


def test_the_pooled_fit_of_the_hospitals_is_that_of_statsmodels() -> None:
    import statsmodels.api as sm

    prepared = config.prepare(config.load(data.bundled_experiment("heart")))
    rows = np.concatenate([X for X, _ in prepared.data.clients])
    y = np.concatenate([y for _, y in prepared.data.clients])
    fit = sm.GLM(y, sm.add_constant(rows), family=sm.families.Binomial()).fit(tol=1e-14)
    assert prepared.reference is not None
    assert prepared.reference_se is not None
    np.testing.assert_allclose(prepared.reference, fit.params, rtol=0, atol=1e-8)
    np.testing.assert_allclose(prepared.reference_se, fit.bse, rtol=1e-8)
