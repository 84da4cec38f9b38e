"""A whole federation on one machine: a SuperLink and a SuperNode per client, on the loopback.

Nothing leaves the machine: telemetry, update check and the installation of dependencies are off.
Every process has its own Flower home and log in the folder of the federation.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import tomli_w

from fedexact.deploy.app import FAILED, FINISHED
from fedexact.deploy.certs import CA, SERVER, SERVER_KEY, client_key, make_certs
from fedexact.deploy.supervise import Entry, Group, Supervisor, ignored
from fedexact.errors import FedexactError
from fedexact.files import write_atomic

HOST = "127.0.0.1"
CONNECTION = "local"  # the name of the SuperLink in Flower's config
START = 90.0  # seconds for the SuperLink to come up
COMMAND = 120.0  # seconds for a flwr command
LOOK = 0.2  # seconds between two looks at the progress log
ASK = 15.0  # seconds of silence before the SuperLink is asked for the run's status
NODE_PAUSE = 5.0  # seconds before a node that has ended is started again

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}


class ProcessError(FedexactError):
    """A process of the federation failed: says which, its last words, and where its log is."""


class LocalFederation:
    """The processes; a context manager that ends all of them, also after errors and Ctrl-C."""

    def __init__(
        self, folder: str | Path, clients: Mapping[str, Mapping[str, str]], tls: bool = False
    ) -> None:
        """`clients` maps a client to its node config; `tls` adds TLS and node authentication."""
        self.folder, self.tls = Path(folder).absolute(), tls
        self.clients = {name: dict(config) for name, config in clients.items()}
        self.home, self.logs = self.folder / "flower", self.folder / "logs"
        self._server_log = self.logs / "server-app.log"
        self._group: Group | None = None  # of the SuperLink
        self._nodes: dict[str, _Node] = {}
        self._folders = {name: f"node-{k}" for k, name in enumerate(self.clients, 1)}

    def __enter__(self) -> LocalFederation:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process that was started; another Ctrl-C does not keep it from that."""
        with ignored():
            for node in self._nodes.values():
                node.stop()
            if self._group is not None:
                self._group.end()
            for node in self._nodes.values():
                node.join()

    # --- the nodes ---

    def start_node(self, name: str) -> None:
        """Starts the client's SuperNode; it is started again when it exits by itself."""
        folder = self.folder / "nodes" / self._folders[name]
        config = folder / "node.toml"
        write_atomic(config, tomli_w.dumps(self.clients[name]))
        command = [
            *(executable("flower-supernode"), "--superlink", f"{HOST}:{self._port}"),
            *("--host", HOST, "--port", str(self._ports[name]), "--node-config", str(config)),
            *self._node_security(name),
        ]
        node = _Node(command, environment(folder / "flower"), self.log_of(name))
        self._nodes[name] = node

    def kill_node(self, name: str) -> None:
        """SIGKILL for the client's SuperNode and all its processes; it stays down."""
        self._nodes.pop(name).kill()

    def log_of(self, name: str) -> Path:
        """The log of a client's SuperNode."""
        return self.logs / f"{self._folders[name]}.log"

    # --- runs ---

    def submit(self, app: str | Path, run_config: Mapping[str, str | bool | float] = {}) -> str:
        """Submits the app; the id of the run. Raises ProcessError."""
        settings = self.folder / "run.toml"
        write_atomic(settings, tomli_w.dumps(dict(run_config)))
        answer = self._flwr("run", str(app), CONNECTION, "--run-config", str(settings))
        self._link.members()
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """pending, starting, running, or finished:completed, :failed, :stopped."""
        return str(self._run(run)["status"])

    def stop(self, run: str) -> None:
        """Stops the run."""
        self._flwr("stop", run, CONNECTION)

    def wait(self, run: str, timeout: float) -> str:
        """Waits for the end of the run; its status. Raises ProcessError after `timeout` s."""
        until = time.monotonic() + timeout
        while not (status := self.status(run)).startswith("finished"):
            self._check()
            if time.monotonic() > until:
                raise ProcessError(f"run {run} has not ended in {timeout:g} s; {self._where()}")
            time.sleep(1.0)
        return status

    def follow(self, run: str, progress: Path, start: int = 0) -> Iterator[str]:
        """The lines that the ServerApp adds to its progress log from byte `start` on, as they come.

        Ends with the run. Raises ProcessError when it failed or a process died.
        """
        heard = time.monotonic()
        for line in _tail(progress, start):
            if line is None:
                self._check()
                if time.monotonic() - heard > ASK:
                    self._check_run(run)
                    heard = time.monotonic()
                continue
            heard = time.monotonic()
            if line == FINISHED:
                return
            if line.startswith(FAILED):
                raise ProcessError(f"the run {line}\n{self._log_of_run(run)}")
            yield line

    def kill_server_app(self) -> None:
        """SIGKILL for the ServerApp that runs."""
        for entry in self._server_apps():
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)

    def processes(self) -> list[Entry]:
        """All processes of the federation that run."""
        groups = [self._link, *(node.group for node in self._nodes.values())]
        return [entry for group in groups if group is not None for entry in group.members()]

    # --- details ---

    def _start(self) -> None:
        self._port, *ports = free_ports(1 + len(self.clients))
        self._ports = dict(zip(self.clients, ports, strict=True))
        self.certs = self.folder / "certs"
        if self.tls:
            shutil.rmtree(self.certs, ignore_errors=True)
            make_certs(self.certs, [HOST], list(self.clients))
        self._env = environment(self.home)
        write_atomic(self.home / "config.toml", tomli_w.dumps(self._connection()))
        command = [
            *(executable("flower-superlink"), "--host", HOST, "--port", str(self._port)),
            "--disable-runtime-dependency-installation",
            *self._link_security(),
        ]
        self._group = Group(command, env=self._env, log=self.logs / "superlink.log")
        self._await_link()
        if self.tls:
            self._register()
        for name in self.clients:
            self.start_node(name)

    @property
    def _link(self) -> Group:
        if self._group is None:
            raise ProcessError("the federation has not been started")
        return self._group

    def _await_link(self) -> None:
        until = time.monotonic() + START
        while True:
            with suppress(OSError), socket.create_connection((HOST, self._port), timeout=1.0):
                return
            self._check()
            if time.monotonic() > until:
                raise ProcessError(
                    f"the SuperLink does not answer after {START:g} s\n{self._where()}"
                )
            time.sleep(LOOK)

    def _register(self) -> None:
        for name in self.clients:
            private, public = client_key(self.certs, name)
            self._flwr("supernode", "register", str(public), CONNECTION, "--name", private.name)

    def _connection(self) -> dict[str, object]:
        security = {"root-certificates": str(self.certs / CA)} if self.tls else {"insecure": True}
        here = {"address": f"{HOST}:{self._port}", **security}
        return {"superlink": {"default": CONNECTION, CONNECTION: here}}

    def _link_security(self) -> list[str]:
        if not self.tls:
            return ["--insecure"]
        return [
            *("--ssl-ca-certfile", str(self.certs / CA)),
            *("--ssl-certfile", str(self.certs / SERVER)),
            *("--ssl-keyfile", str(self.certs / SERVER_KEY)),
            "--enable-supernode-auth",
        ]

    def _node_security(self, name: str) -> list[str]:
        if not self.tls:
            return ["--insecure"]
        private, _ = client_key(self.certs, name)
        return [
            *("--root-certificates", str(self.certs / CA)),
            *("--auth-supernode-private-key", str(private)),
        ]

    def _flwr(self, *arguments: str) -> dict:
        command = [executable("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND,
            check=False,
        )
        answer = _json(done.stdout)
        if done.returncode or not answer.get("success"):
            said = answer.get("error-message") or (done.stderr or done.stdout).strip()
            raise ProcessError(f"flwr {' '.join(arguments[:2])}: {said}\n{self._where()}")
        return answer

    def _check(self) -> None:
        """Raises ProcessError when a process has died."""
        if not self._link.running:
            raise ProcessError(_obituary("the SuperLink", self._link.last_lines(), self.logs))
        for name, node in self._nodes.items():
            if node.given_up:
                words = _obituary(f"the SuperNode of {name}", node.last_lines(), self.logs)
                raise ProcessError(words)

    def _check_run(self, run: str) -> None:
        """Raises ProcessError when the run has ended without having said so."""
        found = self._run(run)
        why = found.get("status-details") or found["status"]
        if found["status"] == "running" and not self._server_apps():
            why = "its ServerApp was killed"  # Flower notices after a minute
        elif not str(found["status"]).startswith("finished"):
            return
        raise ProcessError(f"the run has ended: {why}\n{self._log_of_run(run)}")

    def _server_apps(self) -> list[Entry]:
        return [entry for entry in self._link.members() if "flwr-serverapp" in entry.name]

    def _run(self, run: str) -> dict:
        return self._flwr("list", CONNECTION, "--run-id", run)["runs"][0]

    def _log_of_run(self, run: str) -> str:
        """Fetches what the ServerApp has printed, and says where the logs are."""
        command = [executable("flwr"), "log", run, CONNECTION, "--show"]
        with suppress(OSError, subprocess.SubprocessError), self._server_log.open("wb") as file:
            subprocess.run(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=COMMAND,
                check=False,
            )
        return self._where()

    def _where(self) -> str:
        return f"the logs are in {self.logs}"


class _Node:
    """A SuperNode under a supervisor, in a thread."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._supervisor = Supervisor(
            command, say=lambda line: None, env=env, log=log, pause=NODE_PAUSE
        )
        self._thread = threading.Thread(target=self._supervisor.run, daemon=True)
        self._stopped = False
        self._thread.start()

    @property
    def group(self) -> Group | None:
        return self._supervisor.group

    @property
    def given_up(self) -> bool:
        return not self._stopped and not self._thread.is_alive()

    def last_lines(self) -> list[str]:
        return self.group.last_lines() if self.group else []

    def kill(self) -> None:
        self._stopped = True
        self._supervisor.stop(kill=True)
        self._thread.join()

    def stop(self) -> None:
        self._stopped = True
        self._supervisor.stop()

    def join(self) -> None:
        self._thread.join()


def executable(name: str) -> str:
    """The path of a command of Flower's. Raises ProcessError."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise ProcessError(f'{name} is not installed: pip install "fedexact[flower]"')
    return found


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: their home, no telemetry, no proxy on the loopback."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), HOST, "localhost"]))
    own = {"FLWR_HOME": str(home), "PATH": path, "NO_PROXY": direct, "no_proxy": direct}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **SWITCHES, **own}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _tail(path: Path, position: int) -> Iterator[str | None]:
    """Complete lines added to the file from `position` on, and None whenever there is none."""
    rest = b""
    while True:
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        yield None
        time.sleep(LOOK)


def _json(text: str) -> dict:
    """The JSON object that the text ends with; {} if there is none."""
    start = text.find("{")
    with suppress(ValueError):
        found = json.loads(text[start:]) if start >= 0 else {}
        return found if isinstance(found, dict) else {}
    return {}


def _obituary(who: str, lines: Sequence[str], logs: Path) -> str:
    words = "\n".join(f"  {line}" for line in lines[-10:])
    return f"{who} has ended; its last lines:\n{words}\nthe logs are in {logs}"
