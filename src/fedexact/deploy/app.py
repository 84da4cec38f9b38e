"""A Flower app for an experiment: the folder that `flwr run` takes.

The experiment's file lies in the app, so that it travels with it to the SuperLink's machine, where
the ServerApp reads it beside itself. Nodes run the ClientApp of their own installation.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w

import fedexact as fx
from fedexact import config
from fedexact.errors import InputError
from fedexact.files import write_together

EXPERIMENT = "experiment.toml"
PROGRESS = "progress.log"  # in the output folder: what the ServerApp says
FINISHED, FAILED = "finished", "failed"  # how its last line begins

_SERVER = '''"""The ServerApp: runs the experiment beside this file."""

from pathlib import Path

from fedexact.deploy.server_app import server_app

app = server_app(Path(__file__).parent)
'''

_README = """# {name}

A Flower app made by `fedexact deploy init`.

* `experiment.toml`: what is computed. Change it here; the next `flwr run` takes it along.
* `pyproject.toml`: `out`, the output folder on the SuperLink's machine; `resume`, whether a new run
  goes on from what lies in it.

Run it from the machine of the researcher, with the SuperLink's address in Flower's config.toml
(`flwr config list` shows where that is):

    flwr run {folder} <SuperLink connection>
    flwr log <run id> <SuperLink connection>

To start again from round 0: `flwr run {folder} <connection> --run-config 'resume=false'`.
The SuperLink's machine and every site need `pip install "fedexact[flower]=={version}"`.
"""


def init(folder: str | Path, experiment: str | Path, out: str | Path = "results") -> list[Path]:
    """Writes a ready Flower app for the experiment's file into `folder`; the files written.

    `out` is the output folder on the machine of the SuperLink. Raises InputError when the folder is
    not empty, its name is none for an app, or the experiment is not valid or names no clients.
    """
    asked = config.load(experiment)
    if asked.deploy is None or asked.deploy.clients is None:
        raise InputError(f"{experiment}: name the members in [deploy], clients = [...], in order")
    return write_app(folder, Path(experiment).read_text(encoding="utf-8"), asked.title, out)


def write_app(folder: str | Path, experiment: str, title: str, out: str | Path) -> list[Path]:
    """The same for an experiment that is at hand as text."""
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is not an empty folder; give another")
    name = app_name(folder.name)
    files = {
        "pyproject.toml": tomli_w.dumps(_project(name, title, str(out))),
        "server_app.py": _SERVER,
        EXPERIMENT: experiment,
        "README.md": _README.format(name=name, folder=folder.name, version=fx.__version__),
    }
    write_together(folder, {n: _writer(text) for n, text in files.items()})
    return [folder / n for n in files]


def app_name(name: str) -> str:
    """The name as Flower takes it: letters, digits, hyphens. InputError."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise InputError(
            f"{name!r}: the folder of a Flower app has a name of letters, digits and hyphens, "
            "32 at most, that begins with a letter"
        )
    return name


def _writer(text: str):
    return lambda path: path.write_text(text, encoding="utf-8")


def _project(name: str, title: str, out: str) -> dict:
    return {
        "project": {
            "name": name.lower(),
            "version": "1.0.0",
            "description": title or "A federation with fedexact",
            "license": "Apache-2.0",
            "dependencies": [f"fedexact[flower]=={fx.__version__}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedexact",
                    "components": {
                        "serverapp": "server_app:app",
                        "clientapp": "fedexact.deploy.client_app:app",
                    },
                    "config": {"experiment": EXPERIMENT, "out": out, "resume": True},
                }
            }
        },
    }
