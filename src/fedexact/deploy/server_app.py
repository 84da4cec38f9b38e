"""The Flower ServerApp: runs the experiment of its app folder over the grid.

The run config names `experiment`, the TOML file, relative to the app folder, which travels with the
app to the SuperLink's machine; `out`, the output folder there; and `resume`, whether to go on from
what lies in it. What is said goes to the standard output (`flwr log`) and to `out/progress.log`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedexact import config, report
from fedexact.core import float64
from fedexact.deploy.app import FAILED, FINISHED, PROGRESS
from fedexact.deploy.coordinator import run_federation
from fedexact.deploy.flower import FlowerTransport
from fedexact.errors import InputError


def server_app(folder: str | Path) -> ServerApp:
    """The app whose experiment lies in `folder`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = context.run_config
        experiment, out = settings.get("experiment", ""), settings.get("out", "")
        if not isinstance(experiment, str) or not isinstance(out, str) or not experiment or not out:
            raise InputError("the run config must name experiment (a TOML file) and out (a folder)")
        run(grid, Path(folder) / experiment, Path(out).absolute(), bool(settings.get("resume")))

    return app


def run(grid: Grid, experiment: Path, out: Path, resume: bool) -> None:
    """Runs the experiment; the progress log ends with how it went. Raises what goes wrong."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / PROGRESS).open("a", encoding="utf-8") as log:
        say = _sayer(log)
        try:
            with float64():
                asked = config.load(experiment)
                outcome = run_federation(FlowerTransport(grid), asked, out, say, resume=resume)
        except BaseException as error:
            say(f"{FAILED}: {'; '.join(str(error).splitlines()) or type(error).__name__}")
            raise
        console = report.console()
        console.print(report.result_table(outcome, console.width))
        for run in outcome.runs:
            certificate = run.result.certificate
            if certificate is not None:
                print(f"{run.label}: {certificate}", flush=True)  # noqa: T201
                say(f"{run.label}: {certificate.verdict}: {certificate.reason}")
        say(FINISHED)


def _sayer(log: TextIO) -> Callable[[str], None]:
    def say(line: str) -> None:
        for file in (sys.stdout, log):
            print(line, file=file, flush=True)

    return say
