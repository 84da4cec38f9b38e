"""The command `fedexact`: thin over `config` (run), `theory` (predict), `report` (show, write)."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import fedexact as fx
from fedexact import config, report
from fedexact.data import BUNDLED, EXPERIMENTS, PARTITIONS, bundled_experiment
from fedexact.devices import wait_for_cores
from fedexact.errors import FedexactError, InputError
from fedexact.theory.observe import observe
from fedexact.theory.summary import Prediction, predict

INTERRUPTED = 130  # exit code after Ctrl-C

Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="FEDEXACT_CACHE",
        help="Keep compiled programs in this folder: the next run starts sooner.",
    ),
]

app = typer.Typer(
    name="fedexact",
    help="Federated optimisation that lands on the exact pooled answer, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    wait_for_cores()
    with suppress(RuntimeError):  # JAX has started already
        jax.config.update("jax_num_cpu_devices", _cores())
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            os._exit(INTERRUPTED)  # at once, without waiting for predictions in other threads
        raise


def _errors_in_words(command: Callable[..., None]) -> Callable[..., None]:
    """One message and exit code 2 for an error of the user's, INTERRUPTED after Ctrl-C."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (FedexactError, OSError) as error:
            _say(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt as interrupt:
            _say(escape(str(interrupt) or "interrupted; nothing was written"))
            raise typer.Exit(INTERRUPTED) from None

    return wrapper


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"fedexact {fx.__version__}")
        raise typer.Exit


@app.command()
@_errors_in_words
def run(
    experiment: Annotated[
        Path, typer.Argument(help="A TOML file, or the name of a bundled experiment.")
    ] = Path("heart"),
    out: Annotated[
        Path | None, typer.Option(help="Output folder; results/<name of the file> if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in the output folder.")
    ] = False,
    seed: Annotated[
        list[int] | None,
        typer.Option(min=0, max=2**63 - 1, help="Instead of the file's seeds; may be repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    cache: Cache = None,
) -> None:
    """Run an experiment: a table of who lands on the pooled answer, a figure, the results."""
    if cache:
        fx.cache_programs(cache)
    asked = _asked(experiment, seed)
    folder = out or Path("results") / experiment.stem
    console = report.console(quiet)
    with _working(console, "reading the data, computing the pooled solution"):
        prepared = config.prepare(asked)
    console.print(report.data_summary(prepared))
    store = config.Store(folder, asked, resume)
    try:
        with _watching(console) as observer:
            outcome = config.run(prepared, store, observer)
        files = report.write_report(outcome, folder, fx.__version__)
    except KeyboardInterrupt:
        again = ["fedexact", "run", str(experiment)]
        again += ["--out", str(folder), "--resume", *(f"--seed={s}" for s in seed or ())]
        raise KeyboardInterrupt(
            f"interrupted; what was done is kept in {folder}\nto go on: {shlex.join(again)}"
        ) from None
    console.print(
        report.result_table(outcome, console.width), report.closing(outcome, str(folder), files)
    )


@app.command()
@_errors_in_words
def theory(
    experiment: Annotated[
        Path, typer.Argument(help="A TOML file, or the name of a bundled experiment.")
    ] = Path("heart"),
    run: Annotated[
        bool, typer.Option("--run", help="Run it too, and print what is observed beside.")
    ] = False,
    tol: Annotated[
        float, typer.Option(help="Rounds and bytes are those that shrink the error by this.")
    ] = 1e-8,
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.json and theory.parquet; none: neither.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(min=0, max=2**63 - 1, help="Instead of the file's seeds; may be repeated."),
    ] = None,
    cache: Cache = None,
) -> None:
    """Predict, without running: where each algorithm ends up, how fast, at what cost."""
    if not 0.0 < tol < 1.0:
        raise InputError(f"--tol must be between 0 and 1, got {tol:g}")
    if cache:
        fx.cache_programs(cache)
    asked = _asked(experiment, seed)
    console = report.console()
    with _working(console, "reading the data, computing the pooled solution"):
        prepared = config.prepare(asked)
    console.print(report.data_summary(prepared))
    with _working(console, "limits and rates"):
        predictions = _predictions(prepared, tol)
    console.print(
        report.prediction_table(predictions, console.width), report.prediction_notes(predictions)
    )
    observations = {}
    for label, prediction in predictions.items() if run else ():
        with _working(console, f"{label}: running"):
            observations[label] = observe(
                prediction, prepared.problem, prepared.participation,
                rounds=asked.rounds, tol=asked.tol, seeds=asked.seeds,
                pooled=prepared.reference, pooled_se=prepared.reference_se,
            )  # fmt: skip
    if observations:
        console.print(report.observation_table(predictions, observations, console.width))
    if out:
        files = report.write_theory(predictions, observations, out, fx.__version__)
        console.print(Text(f"written to {out}: {', '.join(files)}"))


@app.command(
    context_settings={
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []
    }
)  # fmt: skip
@_errors_in_words
def deploy(context: typer.Context) -> None:
    """Run an experiment as a real federation, with Flower between the machines."""
    if not all(importlib.util.find_spec(name) for name in ("flwr", "cryptography")):
        raise InputError('fedexact deploy needs Flower: pip install "fedexact[flower]"')
    from fedexact.deploy.commands import app as commands  # Flower is optional, and slow to import

    code = commands(context.args, prog_name="fedexact deploy", standalone_mode=False)
    if code:
        raise typer.Exit(code)


@app.command("list")
def list_() -> None:
    """List algorithms, losses, regularisers, participations, partitions and bundled data."""
    registries = {
        "algorithms": fx.ALGORITHMS,
        "losses": fx.LOSSES,
        "regularisers": fx.REGULARIZERS,
        "participations": fx.PARTICIPATIONS,
        "partitions": PARTITIONS,
        "bundled data": BUNDLED,
    }
    sections = {
        heading: {name: entry.summary for name, entry in registry.items()}
        for heading, registry in registries.items()
    }
    report.console().print(report.listing({**sections, "bundled experiments": EXPERIMENTS}))


def _predictions(prepared: config.Prepared, tol: float) -> dict[str, Prediction]:
    """By label, several at a time: most of the time goes into compiling."""
    pool = ThreadPoolExecutor(_cores())
    try:
        predicted = {
            label: pool.submit(predict, algorithm, prepared.problem, prepared.participation, tol)
            for label, algorithm in prepared.algorithms.items()
        }
        return {label: one.result() for label, one in predicted.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _asked(experiment: Path, seeds: list[int] | None) -> config.Experiment:
    """The experiment of a file or of a bundled name, with other seeds if given."""
    bundled = not experiment.suffix and not experiment.exists()
    asked = config.load(bundled_experiment(str(experiment)) if bundled else experiment)
    return asked.with_seeds(seeds) if seeds else asked


# --- the terminal ---------------------------------------------------------------------------------


class _Bars:
    """A progress bar for the run at hand; finished runs are printed above it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def begin(self, label: str, seed: int, rounds: int) -> None:
        self.task = self.progress.add_task(f"{label}, seed {seed}", total=rounds, mapping="")

    def advance(self, progress: fx.Progress) -> None:
        mapping = f"gradient mapping {progress.gradient_mapping:.1e}"
        self.progress.update(self.task, completed=progress.round, mapping=mapping)

    def end(self, run: config.Run) -> None:
        self.progress.remove_task(self.task)
        self.progress.console.print(Text(report.finished_line(run)))


class _Lines:
    """A line for every finished run, where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, label: str, seed: int, rounds: int) -> None: ...

    def advance(self, progress: fx.Progress) -> None: ...

    def end(self, run: config.Run) -> None:
        self.console.print(Text(report.finished_line(run)))


@contextmanager
def _watching(console: Console) -> Iterator[config.Observer]:
    if not console.is_terminal or console.quiet:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[mapping]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)


@contextmanager
def _working(console: Console, what: str) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _say(message: str) -> None:
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
