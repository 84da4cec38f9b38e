"""Processes that start others: kept running, and ended with everything they started.

Flower's processes start more of their own, some in sessions of their own, and these stay behind
when only the first is ended. So a process is started as the leader of a new group, and what is
ended are the groups of all its descendants. Linux and macOS; on Linux they also end when the
process that started them is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

PAUSE = 10.0  # seconds between an exit and the next start
QUICK = 15.0  # a process that lives no longer has failed at once
ATTEMPTS = 20  # failures at once, one after the other, before giving up: more than three minutes
GRACE = 10.0  # seconds between asking a process to end and ending it
KEPT = 30  # last lines of its output
TICK = 0.1  # seconds

# Linux: whoever loses the parent, be it by SIGKILL, is asked to end; who has lost it before, ends.
_PR_SET_PDEATHSIG = 1
_BOUND = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 15);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Entry(NamedTuple):
    """A line of the process table."""

    pid: int
    parent: int
    group: int
    name: str  # the command line


class Group:
    """A process, its output, and everything it starts."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        """Starts `command`; its output goes to `log`, appended, and line by line to `echo`."""
        self.command, self._log, self._echo = list(command), log, echo
        self._last: deque[str] = deque(maxlen=KEPT)
        self.process = subprocess.Popen(
            _bound(self.command),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._groups = {self.process.pid}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the first process runs."""
        return self.process.poll() is None

    def last_lines(self) -> list[str]:
        """The last lines of its output."""
        if not self.running:
            self._reader.join(timeout=1.0)  # what is still in the pipe
        return list(self._last)

    def members(self) -> list[Entry]:
        """All processes that it started and that still run, itself included."""
        entries = process_table()
        self._groups |= {entry.group for entry in _descendants(entries, self.pid)}
        members = [entry for entry in entries if entry.group in self._groups]
        self._groups &= {entry.group for entry in members}  # numbers are used again
        return members

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the first process's group."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Ends everything at once."""
        until = time.monotonic() + GRACE
        while (members := self.members()) and time.monotonic() < until:
            for group in {entry.group for entry in members}:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._reap()
        self._reap()

    def end(self, grace: float = GRACE) -> None:
        """Asks the process to end, waits for `grace` seconds, then ends everything."""
        self.members()  # notes the groups of what would be orphans
        self.ask()
        until = time.monotonic() + grace
        while self.running and time.monotonic() < until:
            time.sleep(TICK)
        self.kill()

    def _reap(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        self._reader.join(timeout=TICK)

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        with _appended(self._log) as file, stream:
            for raw in iter(stream.readline, b""):
                if file is not None:
                    file.write(raw)
                line = raw.decode(errors="replace").rstrip("\n")
                self._last.append(line)
                if self._echo is not None:
                    self._echo(line)


class Supervisor:
    """Runs a command and starts it again whenever it exits, until it is stopped."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        say: Callable[[str], None],
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
        pause: float = PAUSE,
        quick: float = QUICK,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.command, self.say, self.env, self.log, self.echo = command, say, env, log, echo
        self.pause, self.quick, self.attempts = pause, quick, attempts
        self.group: Group | None = None
        self._stopped = threading.Event()

    def run(self) -> int:
        """Runs until `stop`, then 0; or gives up after `attempts` failures at once, then 1."""
        failures = 0
        while not self._stopped.is_set():
            lived, code = self._once()
            if self._stopped.is_set():
                break
            failures = failures + 1 if lived < self.quick else 0
            name = Path(self.command[0]).name
            if failures >= self.attempts:
                self.say(
                    f"{name} ended with code {code}, {failures} times at once; its last lines:"
                )
                for line in self.group.last_lines() if self.group else []:
                    self.say(f"  {line}")
                return 1
            self.say(f"{name} ended with code {code}; it is started again in {self.pause:g} s")
            self._stopped.wait(self.pause)
        return 0

    def stop(self, kill: bool = False) -> None:
        """Ends the command, with `kill` at once; from a signal handler or another thread."""
        self._stopped.set()
        if kill and self.group is not None:
            self.group.kill()

    def _once(self) -> tuple[float, int]:
        """One life of the command: seconds, exit code."""
        started = time.monotonic()
        self.group = Group(self.command, env=self.env, log=self.log, echo=self.echo)
        try:
            while self.group.running and not self._stopped.is_set():
                self._stopped.wait(TICK)
            lived = time.monotonic() - started
        finally:
            self.group.end()
        return lived, self.group.process.returncode


def supervise(supervisor: Supervisor) -> int:
    """Runs it in the foreground; SIGTERM, SIGINT and SIGHUP end it and the command."""
    with handled(lambda number: supervisor.stop()):
        return supervisor.run()


@contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP call `handler` inside the block. Main thread only."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: handler(number)) for n in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def ignored() -> Iterator[None]:
    """The same signals do nothing inside the block; no effect in other threads than the main."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled(lambda number: None):
        yield


def _bound(command: Sequence[str]) -> list[str]:
    """The command, ended with the thread that starts it."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command]


# --- the process table ----------------------------------------------------------------------------


def process_table() -> list[Entry]:
    """The processes that run; zombies are left out."""
    if Path("/proc/self/stat").exists():
        return _linux_table()
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat=,command="],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split(None, 4) for line in listed.stdout.splitlines()]
    return [
        Entry(int(r[0]), int(r[1]), int(r[2]), r[4])
        for r in rows
        if len(r) == 5 and not r[3].startswith("Z")
    ]


def _linux_table() -> list[Entry]:
    entries = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # gone meanwhile
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if fields[0] not in ("Z", "X"):
                entries.append(Entry(int(folder.name), int(fields[1]), int(fields[2]), name))
    return entries


def _descendants(entries: Sequence[Entry], root: int) -> list[Entry]:
    found, known = [], {root}
    grown = True
    while grown:
        new = [e for e in entries if e.pid not in known and e.parent in known]
        grown = bool(new)
        known |= {e.pid for e in new}
        found += new
    return found


@contextmanager
def _appended(path: Path | None) -> Iterator[IO[bytes] | None]:
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        yield file
