"""Measures programs against each other: repeats interleaved, so that a machine whose speed drifts
treats all alike."""

from __future__ import annotations

import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SAMPLED = 1.0  # seconds between two looks at the memory of a program that runs
PATIENCE = 60.0  # seconds that a program has to end
CHECKED = 10  # rounds after which models are compared
SAME_OBJECTIVE = 0.2  # relative, of random runs
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")


@dataclass(frozen=True)
class Program:
    """What is measured: a module that serves requests (see worker.py)."""

    label: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 100  # in a repeat
    repeats: int = 9
    python: Path = Path(sys.executable)
    tolerance: float | None = 1e-9  # of the model, relative; None: compare objectives
    warm: bool = True  # whether to run once more before the repeats, untimed


class FailedError(Exception):
    """The program ended or never answered; says why."""


class Worker:
    """A running program."""

    def __init__(self, program: Program, log: Path) -> None:
        self.program, self.log = program, log
        start = time.perf_counter()
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [program.python, "-m", program.module], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env=environment(),
            )  # fmt: skip
        self.peak = 0.0
        try:
            self.versions = self.answer()["versions"]
        except FailedError:
            self.close()
            raise
        self.start_up = time.perf_counter() - start

    def ask(self, **request: Any) -> dict[str, Any]:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise FailedError(self.last_words()) from None
        while not self.answered(SAMPLED):
            self.peak = max(self.peak, peak_memory(self.process.pid))
        self.peak = max(self.peak, peak_memory(self.process.pid))
        return self.answer()

    def answered(self, seconds: float) -> bool:
        """Whether an answer, or the end, comes within so many seconds."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise FailedError(self.last_words())
        return json.loads(line)

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]
        ended = f"ended with code {self.process.wait()}"
        return (errors or lines or [ended])[-1].strip()

    def close(self) -> None:
        """Lets the program end, and ends it if it does not."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment() -> dict[str, str]:
    """Variables of every program's process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def peak_memory(pid: int) -> float:
    """MB that the process and its descendants have held at their peaks, added up."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0.0
    peaks = [int(line.split()[1]) / 1e3 for line in status.splitlines() if "VmHWM" in line]
    return sum(peaks) + sum(peak_memory(int(child)) for child in children)


@dataclass
class Measured:
    """What was found about a program."""

    program: Program
    versions: dict[str, str] = field(default_factory=dict)
    start_up: float = 0.0  # s, from the start of the process until all is imported
    load: float = 0.0  # s, from the data in a file to a program ready to run
    first: float = 0.0  # s, the first 10 rounds
    seconds: list[float] = field(default_factory=list)  # per round, one per repeat
    off: float | None = None  # relative distance to the first program's model
    objective: float | None = None
    peak: float = 0.0  # MB
    missing: str = ""  # why it was not measured

    @property
    def median_ms(self) -> float:
        """Per round."""
        return 1e3 * statistics.median(self.seconds)

    def row(self) -> dict[str, Any]:
        """As JSON."""
        if self.missing:
            return {"label": self.program.label, "missing": self.missing}
        return {
            "label": self.program.label,
            "ms": self.median_ms,
            "repeats_ms": [1e3 * s for s in self.seconds],
            "rounds": self.program.rounds,
            "start_up_s": self.start_up,
            "load_s": self.load,
            "first_s": self.first,
            "peak_mb": self.peak,
            "off": self.off,
            "objective": self.objective,
            "versions": self.versions,
        }


def compare(
    data: Path,
    programs: Sequence[Program],
    objective: Callable[[np.ndarray], float],
    between: Sequence[Callable[[], None]] = (),
) -> list[Measured]:
    """Starts all programs, checks that they compute what the first one does, and takes
    interleaved times of each; `between` are called in each repeat.

    A program that fails is reported as missing with its last words.
    """
    found = [Measured(program) for program in programs]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        workers: dict[int, Worker] = {}
        models: dict[int, np.ndarray] = {}
        for i, measured in enumerate(found):
            with _reporting(measured):
                workers[i] = Worker(measured.program, Path(folder, f"{i}.log"))
                stack.callback(workers[i].close)
                models[i] = _prepare(measured, workers[i], data)
        _check(found, models, objective)
        for r in range(max(program.repeats for program in programs)):
            for call in between:
                call()
            for i, measured in enumerate(found):
                if not measured.missing and r < measured.program.repeats:
                    _repeat(measured, workers[i])
    return found


@contextmanager
def _reporting(measured: Measured) -> Iterator[None]:
    try:
        yield
    except FailedError as error:
        measured.missing = str(error)


def _prepare(measured: Measured, worker: Worker, data: Path) -> np.ndarray:
    """The model after CHECKED rounds, the first ever."""
    program = measured.program
    measured.versions, measured.start_up = worker.versions, worker.start_up
    measured.load = worker.ask(do="load", data=str(data), options=program.options)["seconds"]
    start = time.perf_counter()
    model = np.array(worker.ask(do="run", rounds=CHECKED)["x"])
    measured.first = time.perf_counter() - start
    if program.warm:
        worker.ask(do="run", rounds=program.rounds)
    return model


def _repeat(measured: Measured, worker: Worker) -> None:
    with _reporting(measured):
        answer = worker.ask(do="run", rounds=measured.program.rounds)
        measured.seconds.append(answer["seconds"])
        measured.peak = worker.peak


def _check(
    found: list[Measured], models: dict[int, np.ndarray], objective: Callable[[np.ndarray], float]
) -> None:
    """Each model, or its objective, against the first one's."""
    if not models:
        return
    first = min(models)
    for i, x in models.items():
        measured, reference = found[i], models[first]
        measured.off = float(np.linalg.norm(x - reference) / np.linalg.norm(reference))
        measured.objective = objective(x)
        expected, tolerance = found[first].objective, measured.program.tolerance
        if tolerance is not None and measured.off > tolerance:
            measured.missing = f"it computes another model, off by {measured.off:.1e}"
        elif expected and abs(measured.objective / expected - 1) > SAME_OBJECTIVE:
            measured.missing = f"its objective is {measured.objective:.3g}, not {expected:.3g}"
