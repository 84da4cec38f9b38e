"""The peak of memory on W1."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.compare import Program, Worker, peak_memory
from benchmarks.data import save
from benchmarks.result import Result, Table, Target, number
from benchmarks.workloads import WORKLOADS

PLUS = 350  # MB


def main(name: str, quick: bool) -> Result:
    """A process that imports, loads the data, makes the problem and runs 200 rounds."""
    data = WORKLOADS["W1"]()
    size = (data.X.nbytes + data.y.nbytes) / 1e6
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder, "data.npz"), data)
        worker = Worker(Program("fedexact", "benchmarks.ours"), Path(folder, "log"))
        requests = {
            "import": {},
            "fx.Problem, with the file's arrays": {"do": "load", "data": str(path), "options": {}},
            "fx.solve, 10 rounds": {"do": "run", "rounds": 10},
            "fx.solve, 200 rounds": {"do": "run", "rounds": 200},
        }
        for label, request in requests.items():
            if request:
                worker.ask(**request)
            peaks[label] = peak_memory(worker.process.pid)
        worker.close()
    limit = 2 * size + PLUS
    return Result(
        name,
        "Memory: the peak on W1",
        [f"Peak resident memory of the process so far; the data are {size:.1f} MB."],
        [Table(("after", "MB"), [(label, number(peak)) for label, peak in peaks.items()])],
        [Target(f"peak memory on W1 in MB: 2 × data + {PLUS}", max(peaks.values()), limit)],
        data=peaks,
    )
