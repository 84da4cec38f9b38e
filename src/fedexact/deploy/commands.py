"""The commands `fedexact deploy ...`: a Flower app, keys, a supervised node, a local federation."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import tomli_w
import typer
from rich.console import Console
from rich.text import Text

import fedexact as fx
from fedexact import config, report
from fedexact.config.models import DeployTable
from fedexact.data import bundled_experiment
from fedexact.deploy.app import PROGRESS, write_app
from fedexact.deploy.app import init as init_app
from fedexact.deploy.certs import make_certs
from fedexact.deploy.coordinator import ROUNDS
from fedexact.deploy.local import LocalFederation, environment, executable
from fedexact.deploy.local_data import at_sites
from fedexact.deploy.site import SiteConfig
from fedexact.deploy.supervise import Supervisor, handled, supervise
from fedexact.errors import InputError
from fedexact.files import atomic_path

app = typer.Typer(
    name="deploy",
    help="Run an experiment as a real federation, with Flower between the machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130  # exit code after Ctrl-C

ExperimentFile = Annotated[
    Path, typer.Argument(help="A TOML file, or the name of a bundled experiment.")
]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    experiment: ExperimentFile = Path("heart"),
    out: Annotated[str, typer.Option(help="Output folder on the SuperLink's machine.")] = "results",
) -> None:
    """Write a ready Flower app: `flwr run DIR <connection>` runs it."""
    files = init_app(folder, _file(experiment), out)
    _print("written:", *(f"  {path}" for path in files))
    _print(f"next: read {folder / 'README.md'}")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the files go; none is overwritten.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address of the SuperLink; may be repeated."),
    ] = None,
    client: Annotated[list[str] | None, typer.Option(help="A client; may be repeated.")] = None,
) -> None:
    """Make a CA, the server's certificate and one key pair per client."""
    if not host and not client:
        raise InputError("give the SuperLink's --host, a --client, or both")
    _print(*make_certs(folder, host or [], client or []).notes)


@app.command()
def node(
    superlink: Annotated[str, typer.Option(help="The SuperLink's address, host:port.")],
    client_id: Annotated[str, typer.Option(help="The client's name in the experiment.")],
    state_dir: Annotated[Path, typer.Option(help="Folder of the client's state; keep it.")],
    data: Annotated[
        str | None, typer.Option(help="The client's rows: a file, or the URL of a database.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Table of the database.")] = None,
    query: Annotated[str | None, typer.Option(help="SQL query, instead of a table.")] = None,
    oracle: Annotated[
        str | None, typer.Option(help="Instead of data: the client's own computations.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="ca.crt of the federation; without it no TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The client's private key.")] = None,
    port: Annotated[int, typer.Option(help="A free port of the loopback.")] = 9094,
) -> None:
    """Run a client's SuperNode, and start it again whenever it ends. Ends with Ctrl-C."""
    if key is not None and root_certificates is None:
        raise InputError("--key goes with --root-certificates: nodes are authenticated over TLS")
    if data is not None and Path(data).exists():
        data = str(Path(data).absolute())
    given = {"data": data, "table": table, "query": query, "oracle": oracle}
    settings = {"client-id": client_id, "state-dir": str(state_dir.absolute())}
    settings |= {key: value for key, value in given.items() if value is not None}
    SiteConfig.from_mapping(settings)
    node_config = state_dir.absolute() / "node.toml"
    with atomic_path(node_config) as part:
        part.touch(mode=0o600)  # the URL of a database may hold a password
        part.write_text(tomli_w.dumps(settings), encoding="utf-8")
    command = [
        *(executable("flower-supernode"), "--superlink", superlink),
        *("--port", str(port), "--node-config", str(node_config)),
        *(["--root-certificates", str(root_certificates)] if root_certificates else ["--insecure"]),
        *(["--auth-supernode-private-key", str(key)] if key else []),
    ]
    supervisor = Supervisor(
        command, say=_print, echo=_print, env=environment(state_dir.absolute() / "flower")
    )
    if supervise(supervisor):
        raise typer.Exit(1)


@app.command()
def local(
    experiment: ExperimentFile = Path("heart"),
    out: Annotated[
        Path | None, typer.Option(help="Output folder; federations/<name of the file> if left out.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="At most; instead of the file's.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="With TLS and authenticated nodes.")] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="With secure summation of the uploads.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again instead of going on where it stopped.")
    ] = False,
) -> None:
    """Run an experiment on this machine: a SuperLink and a SuperNode per client, no internet."""
    folder = (out or Path("federations") / experiment.stem).absolute()
    here = folder / "federation"
    if fresh:
        shutil.rmtree(here, ignore_errors=True)
    asked = _deployed(config.load(_file(experiment)), rounds, secure)
    console = report.console()
    prepared = config.prepare(asked)
    console.print(report.data_summary(prepared))
    files, there = at_sites(asked, here / "clients")
    clients = {name: _site(here, k, name, path) for k, (name, path) in enumerate(files.items(), 1)}
    shutil.rmtree(here / "app", ignore_errors=True)
    write_app(here / "app", there.to_toml(), asked.title, folder)
    progress = folder / PROGRESS
    start = progress.stat().st_size if progress.exists() else 0
    try:
        with ended_by_signals(), LocalFederation(here, clients, tls) as federation:
            run = federation.submit(here / "app", {"out": str(folder), "resume": not fresh})
            for line in federation.follow(run, progress, start):
                console.print(Text(line))
    except KeyboardInterrupt:
        words = "interrupted; all processes are ended; the same command goes on where it stopped"
        typer.echo(words, err=True)
        raise typer.Exit(INTERRUPTED) from None
    _report(prepared, folder, console)


# --- the experiment -------------------------------------------------------------------------------


def _deployed(experiment: config.Experiment, rounds: int | None, secure: bool) -> config.Experiment:
    """The experiment as [deploy] and the command's options have it."""
    deploy = experiment.deploy or DeployTable()
    changed = {"rounds": rounds or deploy.rounds, "secure": secure or deploy.secure}
    deploy = deploy.model_copy(update=changed)
    return experiment.model_copy(update={"deploy": deploy}).deployed()


def _site(here: Path, number: int, name: str, data: Path) -> dict[str, str]:
    state = here / "nodes" / f"node-{number}" / "state"
    return {"client-id": name, "data": str(Path(data).absolute()), "state-dir": str(state)}


def _report(prepared: config.Prepared, folder: Path, console: Console) -> None:
    """The table of `fedexact run`, and what a round costs."""
    runs = []
    for i, label in enumerate(prepared.algorithms, 1):
        for path in sorted((folder / "runs").glob(f"{i:02d}-*.npz")):
            runs.append(config.Run(label, 0, fx.Result.load(path)))
    outcome = config.Outcome(prepared, tuple(runs))
    console.print(report.result_table(outcome, console.width))
    console.print(report.closing(outcome, str(folder), [ROUNDS, PROGRESS, "runs/"]))
    console.print(Text(pace(folder / ROUNDS), overflow="fold"))


def pace(path: Path) -> str:
    """How long a round takes, and why, in a line; from the round report."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    seconds = [float(json.loads(line)["seconds"]) for line in lines]
    if not seconds:
        return "no round was run"
    return (
        f"a round took {statistics.median(seconds):.1f} s (median of {len(seconds)}): Flower's "
        "processes look for messages every 3 s, and every message starts a Python process at its "
        "site; so choose algorithms that need few rounds"
    )


# --- the terminal ---------------------------------------------------------------------------------


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP are like Ctrl-C."""

    def interrupt(number: int) -> NoReturn:
        raise KeyboardInterrupt

    with handled(interrupt):
        yield


def _file(experiment: Path) -> Path:
    bundled = not experiment.suffix and not experiment.exists()
    return bundled_experiment(str(experiment)) if bundled else experiment


def _print(*lines: str) -> None:
    for line in lines:
        typer.echo(line)
