"""Flower's real processes on the loopback: a SuperLink, SuperNodes, TLS, kills. Minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import numpy as np
import statsmodels.api as sm
from pyarrow import csv

import fedexact as fx
from fedexact import config
from fedexact.data import BUNDLED, tables
from fedexact.deploy import supervise
from fedexact.deploy.app import FINISHED, PROGRESS, write_app
from fedexact.deploy.coordinator import ROUNDS
from fedexact.deploy.local import LocalFederation, ProcessError
from fedexact.deploy.supervise import process_table

pytestmark = pytest.mark.slow

PYPROJECT = """\
[project]
name = "echo"
version = "1.0.0"
description = "Sends arrays there and back"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedexact"
[tool.flwr.app.components]
serverapp = "echo_server:app"
clientapp = "echo_client:app"
[tool.flwr.app.config]
out = ""
rounds = 0
"""

CLIENT = """\
from fedexact.deploy import client_app
from fedexact.deploy.messages import Content


class Echo:
    def __init__(self, config):
        self.client = config["client-id"]

    @staticmethod
    def from_mapping(settings):
        return settings

    def answer(self, content):
        return Content(content.kind, {**content.meta, "client": self.client}, content.arrays)


client_app.Site = client_app.SiteConfig = Echo
app = client_app.app
"""

SERVER = """\
import time
from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from fedexact.deploy.flower import FlowerTransport
from fedexact.deploy.messages import Content, Failure

ARRAYS = {"x": np.geomspace(1e-300, 1e300, 50), "scalar": np.array(-0.0), "none": np.zeros((0, 3)),
          "limbs": np.full((2, 3), 2**64 - 1, np.uint64)}
app = ServerApp()


@app.main()
def main(grid, context):
    transport = FlowerTransport(grid)
    out = Path(context.run_config["out"])
    out.mkdir(parents=True, exist_ok=True)
    with (out / "progress.log").open("a") as log:
        for number in range(context.run_config["rounds"]):
            while len(transport.nodes()) < 3:
                time.sleep(0.2)
            answered = one_round(transport, number)
            print(f"round {number}: {' '.join(answered)}", file=log, flush=True)
        print("finished", file=log, flush=True)


def one_round(transport, number):
    content = Content("train", {"round": number}, ARRAYS)
    waiting, answered = set(transport.send([(n, content) for n in transport.nodes()])), []
    until = time.monotonic() + 200
    while waiting and time.monotonic() < until:
        for reply in transport.receive(waiting):
            waiting.discard(reply.id)
            if isinstance(reply.content, Failure):
                answered.append(f"error-{reply.content.code}")
            elif all(reply.content.arrays[k].tobytes() == a.tobytes() and
                     reply.content.arrays[k].shape == a.shape for k, a in ARRAYS.items()):
                answered.append(reply.content.meta["client"])
        time.sleep(0.2)
    return sorted(answered)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """An app whose server sends arrays to three sites, which send them back."""
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "echo_client.py").write_text(CLIENT)
    (folder / "echo_server.py").write_text(SERVER)
    return folder


def of(folder: Path) -> list[str]:
    """The processes that have to do with a folder."""
    return [entry.name for entry in process_table() if str(folder) in entry.name]


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_killed_node_comes_back_and_nothing_stays_behind(tmp_path: Path, echo: Path) -> None:
    clients = {name: {"client-id": name} for name in ("A", "B", 'C "3"')}
    folder, out = tmp_path / "fed", tmp_path / "out"
    with LocalFederation(folder, clients, tls=True) as federation:
        run = federation.submit(echo, {"out": str(out), "rounds": 3})
        lines = []
        for line in federation.follow(run, out / PROGRESS):
            lines.append(line)
            if line.startswith("round 0"):
                federation.kill_node("B")
                # Not at once: while the dead node counts as online, the new one is refused (305).
                federation.start_node("B")
        assert lines[0] == 'round 0: A B C "3"'
        assert lines[1] in ('round 1: A C "3" error-5', 'round 1: A B C "3"')
        assert lines[-1] == 'round 2: A B C "3"'
        assert federation.wait(run, 60.0) == "finished:completed"
        seen = [entry.pid for entry in federation.processes()]
        assert len(seen) >= 8
    assert not [entry for entry in process_table() if entry.pid in seen]
    assert of(folder) == []


def test_a_killed_server_app_is_noticed_and_a_new_run_goes_on(tmp_path: Path, echo: Path) -> None:
    clients = {name: {"client-id": name} for name in "ABC"}
    folder, out = tmp_path / "fed", tmp_path / "out"
    with LocalFederation(folder, clients) as federation:
        run = federation.submit(echo, {"out": str(out), "rounds": 100})
        wait_for(lambda: (out / PROGRESS).exists() and "round 0" in (out / PROGRESS).read_text())
        federation.kill_server_app()
        position = (out / PROGRESS).stat().st_size
        with pytest.raises(ProcessError, match=r"its ServerApp was killed\nthe logs are in"):
            list(federation.follow(run, out / PROGRESS, position))
        again = federation.submit(echo, {"out": str(out), "rounds": 1})
        assert list(federation.follow(again, out / PROGRESS, position)) == ["round 0: A B C"]
        assert FINISHED in (out / PROGRESS).read_text()
    assert of(folder) == []


INTERRUPTED = """
import time
from fedexact.deploy.commands import ended_by_signals
from fedexact.deploy.local import LocalFederation

with ended_by_signals(), LocalFederation({folder!r}, {{"A": {{"client-id": "A"}}}}):
    print("up", flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_whole_federation(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "fed"
    script = INTERRUPTED.format(folder=str(folder))
    command = [sys.executable, "-W", "ignore", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            wait_for(lambda: len(of(folder)) >= 2, 60.0)  # the script itself, and the node
            process.send_signal(number)
            assert process.wait(timeout=60.0) != 0
        finally:
            process.kill()
    if number == signal.SIGKILL:  # nobody waits for the others to end
        wait_for(lambda: of(folder) == [], 60.0)
    assert of(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is bound to its parent")
def test_a_process_whose_parent_ended_before_it_was_bound_ends() -> None:
    """It would never be told: the parent was killed between starting and binding it."""
    command = supervise._bound(["sleep", "60"])
    here = command.index(str(os.getpid()))
    assert subprocess.run(supervise._bound(["true"]), timeout=30, check=False).returncode == 0
    command[here] = str(os.getpid() + 1)
    assert subprocess.run(command, timeout=30, check=False).returncode == 1


HOSPITALS = """\
rounds = 30
tol = 1e-11
[data]
folder = "sites"
standardize = true
[data.target]
column = "num"
above = 0
[data.features]
columns = ["age", "sex", "cp", "trestbps", "chol", "thalch", "exang", "oldpeak"]
reference = { sex = "Female", cp = "asymptomatic" }
[problem]
loss = "logistic"
fit_intercept = true
[deploy]
clients = ["Cleveland", "Hungary", "Switzerland", "VA Long Beach"]
deadline = 40.0
quorum = 3
[[algorithms]]
name = "PushNewton"
"""


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, dict[str, str]]:
    """The node configs of the four hospitals, each with a CSV file of its own."""
    table = tables.read_csv_table(BUNDLED["heart_disease_uci"].path)
    owners = table.column("dataset").to_pylist()
    nodes = {}
    (tmp_path / "sites").mkdir()
    for name in dict.fromkeys(owners):
        rows = table.take([i for i, owner in enumerate(owners) if owner == name])
        file = tmp_path / "sites" / f"{name}.csv"
        csv.write_csv(rows.drop_columns(["dataset"]), file)
        state = str(tmp_path / "state" / name)
        nodes[name] = {"client-id": name, "data": str(file), "state-dir": state}
    return nodes


def test_four_hospitals_survive_kills_and_land_on_the_pooled_answer(
    tmp_path: Path, hospitals: dict[str, dict[str, str]]
) -> None:
    (tmp_path / "hospitals.toml").write_text(HOSPITALS)
    asked = config.load(tmp_path / "hospitals.toml")
    write_app(tmp_path / "app", asked.to_toml(), "Four hospitals", tmp_path / "out")
    out = tmp_path / "out"

    def rounds() -> int:
        path = out / ROUNDS
        return len(path.read_text().splitlines()) if path.exists() else 0

    with LocalFederation(tmp_path / "fed", hospitals, tls=True) as federation:
        federation.submit(tmp_path / "app")
        wait_for(lambda: rounds() >= 2)
        federation.kill_node("Hungary")
        federation.start_node("Hungary")
        wait_for(lambda: rounds() >= 4)
        federation.kill_server_app()
        position = (out / PROGRESS).stat().st_size
        again = federation.submit(tmp_path / "app")
        said = list(federation.follow(again, out / PROGRESS, position))
        assert any("goes on from round" in line for line in said)
    assert of(tmp_path) == []
    (saved,) = (out / "runs").glob("01-*.npz")
    result = fx.Result.load(saved)
    federation = config.prepare(asked).federation
    assert federation is not None
    X, y = (np.concatenate(parts) for parts in zip(*federation.clients, strict=True))
    fit = sm.Logit(y, sm.add_constant(X)).fit(disp=0, method="newton", tol=1e-14)
    np.testing.assert_allclose(result.x, fit.params, rtol=0, atol=1e-8)
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"
    assert result.certificate.clients == tuple(hospitals)
