"""A round of FedAvg on W1, W2 and W3: fedexact against a C loop, NumPy, PyTorch and others."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.c_loop import NoCompilerError
from benchmarks.compare import Measured, Program, compare
from benchmarks.data import Data, save
from benchmarks.limits import Limits
from benchmarks.peers.environments import NotInstalledError, python_of
from benchmarks.result import Result, Table, Target, number
from benchmarks.workloads import DESCRIPTIONS, WORKLOADS, bytes_per_round, objective

CORES = os.cpu_count() or 1
OURS, NARROW, C = "fedexact", "fedexact, float32", f"C, {CORES} cores, float64"
C_BY_ROW = f"C, row by row, {CORES} cores, float64"
PEERS = {"fedjax": "FedJAX", "pfl": "pfl", "fluke": "fluke", "flower": "Flower simulation"}
ROUNDS = {"fedjax": 5, "pfl": 5, "fluke": 4, "flower": 3}
SINGLE = 1e-4  # tolerance in single precision

Lower = tuple[str, str, float, bool]
TARGETS: dict[str, list[Lower]] = {  # who, against whom, ratio, and whether it is a least one
    "W1": [
        (OURS, C, 1.25, False),
        (OURS, "FedJAX", 30, True),
        (NARROW, "FedJAX", 30, True),
        (OURS, "pfl", 80, True),
        (OURS, "fluke", 80, True),
    ],
    "W2": [(OURS, C, 1.7, False)],
    "W3": [(NARROW, "FedJAX", 15, True)],
}


def main(name: str, quick: bool) -> Result:
    """Compares on one workload; `quick` leaves out the programs that need environments."""
    data = WORKLOADS[name]()
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder, "data.npz"), data)
        programs, missing = plan(data, path, quick)
        limits, between = _limits()
        found = compare(path, programs, partial(objective, data), between)
    found += missing
    return _result(name, data, found, limits)


def plan(data: Data, path: Path, quick: bool) -> tuple[list[Program], list[Measured]]:
    """What to compare, and what cannot be for want of an environment."""
    same = None if data.info["batch_size"] else SINGLE
    programs = [
        Program(OURS, "benchmarks.ours", rounds=200),
        Program(NARROW, "benchmarks.ours", {"precision": "single"}, 200, tolerance=same),
    ]
    if data.info["loss"] == "logistic":
        programs += _references()
    others, missing = [], []
    for environment in () if quick else ("torch", *PEERS):
        program = _other(environment, data, path)
        try:
            others.append(program(python=python_of(environment)))
        except NotInstalledError as error:
            missing.append(Measured(program(), missing=str(error)))
    return programs + others, missing


def _references() -> list[Program]:
    c = partial(Program, module="benchmarks.c_loop", rounds=200)
    return [
        Program("fedexact, 1 device", "benchmarks.ours", {"shards": 1}, 200),
        c(C, options={"dtype": "float64", "threads": CORES}),
        c("C, 1 core, float64", options={"dtype": "float64", "threads": 1}),
        c(
            C_BY_ROW,
            options={"dtype": "float64", "threads": CORES, "blocked": False},
        ),
        c(
            f"C, {CORES} cores, float32",
            options={"dtype": "float32", "threads": CORES},
            tolerance=SINGLE,
        ),
        c("C, 1 core, float32", options={"dtype": "float32", "threads": 1}, tolerance=SINGLE),
        Program("NumPy, loop", "benchmarks.numpy_loop", {"dtype": "float64"}, 20),
        Program("NumPy, batched", "benchmarks.numpy_batched", {"dtype": "float64"}, 20),
    ]


def _other(environment: str, data: Data, path: Path) -> partial[Program]:
    """The program of an environment, all but its interpreter."""
    own_draw = environment == "flower" and not data.everybody
    random = data.info["batch_size"] is not None or own_draw
    module = "torch_loop" if environment == "torch" else f"peers.{environment}_rounds"
    return partial(
        Program,
        PEERS.get(environment, "PyTorch, loop"),
        f"benchmarks.{module}",
        {"threads": 1, "path": str(path)},
        ROUNDS.get(environment, 5),
        tolerance=None if random else SINGLE,
        repeats=5,
        warm=environment != "flower",
    )


def _limits() -> tuple[Limits | None, list]:
    try:
        limits = Limits()
    except NoCompilerError:
        return None, []
    return limits, [limits.measure]


def _result(name: str, data: Data, found: list[Measured], limits: Limits | None) -> Result:
    ms = {m.program.label: m.median_ms for m in found if not m.missing}
    heading = (
        "program", "ms a round", "least", "ratio", "GB/s", "start s", "load s",
        "first 10 rounds s", "peak MB", "model off by", "objective",
    )  # fmt: skip
    rows = [_row(m, ms.get(OURS), data) for m in sorted(found, key=_order)]
    result = Result(name, f"{name}: {DESCRIPTIONS[name]}", _notes(data, limits))
    result.tables, result.targets = [Table(heading, rows)], _targets(name, ms)
    result.bars = ms
    result.data = {
        "programs": [m.row() for m in found],
        "limits": limits.found if limits else None,
        "info": data.info,
    }
    return result


def _order(measured: Measured) -> float:
    return float("inf") if measured.missing else measured.median_ms


def _row(m: Measured, ours: float | None, data: Data) -> tuple[str, ...]:
    label = f"**{OURS}**" if m.program.label == OURS else m.program.label
    if m.missing:
        return label, f"not measured: {m.missing}", *[""] * 9
    usual = "float64" if m.program.label.startswith(OURS) else "float32"
    usual = "float32" if m.program.label == NARROW else usual
    itemsize = np.dtype(m.program.options.get("dtype", usual)).itemsize
    speed = bytes_per_round(data, itemsize) / m.median_ms / 1e6
    return (
        label, number(m.median_ms), number(1e3 * min(m.seconds)),
        number(m.median_ms / ours) if ours else "–", number(speed, 2), number(m.start_up, 2),
        number(m.load, 2), number(m.first, 2), number(m.peak), number(m.off, 1),
        number(m.objective, 6),
    )  # fmt: skip


def _notes(data: Data, limits: Limits | None) -> list[str]:
    if data.info["loss"] == "mlp":
        return [
            f"fedexact takes {data.info['local_steps']} batches of {data.info['batch_size']} drawn "
            "with replacement, the mean number of an epoch; the others shuffle and go through an "
            "epoch, so that their models differ, and the objectives after 10 rounds are compared. "
            "fedexact is measured in both precisions, the others compute in float32."
        ]
    text = (
        "All compute the same model after 10 rounds, to 1e-9 in float64 and 1e-4 in float32 "
        "(PyTorch, FedJAX, pfl, fluke and Flower; where Flower draws its own cohorts, only the "
        "objectives can be compared). fedexact and C also record the objective and its gradient "
        "over all rows every 10 rounds, the others record nothing. GB/s counts the "
        "participants' rows once per local step. Targets are against the faster of the two float64 "
        "loops on all cores. A round of fedexact is the time between its first and its last "
        "recording; the certificate at the end comes once on top."
    )
    if limits is None:
        return [text, "No C compiler: no C loop and no limits of the machine."]
    found = limits.medians()
    return [
        text,
        f"The machine's limits in the same run, all cores: {found['copy']:.1f} GB/s copied (read "
        f"and written), {found['gemv']:.1f} GB/s read by matrix-vector products from memory, "
        f"{found['gemv in cache']:.1f} GB/s by those whose rows stay in L2.",
    ]


def _targets(name: str, ms: dict[str, float]) -> list[Target]:
    loops = [ms[label] for label in (C, C_BY_ROW) if label in ms]
    against = ms | ({C: min(loops)} if loops else {})
    out = []
    for mine, other, limit, faster in TARGETS[name]:
        known = other in against and mine in ms
        how = "times faster than" if faster else "time against"
        what = f"{name}{mine.removeprefix(OURS)}: {how} {other}"
        ratio = ms[mine] / against[other] if known else None
        out.append(Target(what, 1 / ratio if faster and ratio else ratio, limit, at_least=faster))
    return out
