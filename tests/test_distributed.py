"""The clients spread over several processes: the same numbers as in one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("distributed_run.py")


def run(processes: int, out: Path) -> dict[str, np.ndarray]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(SCRIPT.parent)}
    jobs = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(processes), str(k), port, out],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(processes)
    ]
    try:
        for job in jobs:
            said, _ = job.communicate(timeout=600)
            assert job.returncode == 0, said
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run(1, tmp_path_factory.mktemp("alone") / "found.npz")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_compute_what_one_does(
    alone: dict[str, np.ndarray], processes: int, tmp_path: Path
) -> None:
    together = run(processes, tmp_path / "found.npz")
    assert together.keys() == alone.keys()
    for name, values in alone.items():
        assert np.linalg.norm(values) > 0, name
        np.testing.assert_allclose(together[name], values, rtol=1e-11, atol=1e-12, err_msg=name)
