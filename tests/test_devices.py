"""Cores that stay idle are said once; compiled programs are kept for the next process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedexact as fx
from fedexact.devices import choose_shards

PROGRAM = """
import sys, warnings
import numpy as np
import fedexact as fx

fx.cache_programs(sys.argv[1])
X = np.random.default_rng(0).normal(size=(40, 600, 10))
clients = [(A, A @ np.ones(10)) for A in X]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    problems = [fx.Problem(clients), fx.Problem(clients[:20]), fx.Problem(clients)]
    fx.solve(problems[0], fx.FedAvg(), rounds=2)
print([problem.layout.shards for problem in problems])
print([str(w.message) for w in said if w.category is fx.IdleCoresWarning])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_idle_cores_are_said_once_and_programs_kept(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    assert said[0] == "[1, 1, 1]"
    assert said[1].count("JAX runs on 1 of") == 1
    assert f"'jax_num_cpu_devices', {cores}" in said[1]
    assert len(list(folder.glob("*"))) > 5


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fx.InputError, match="file/programs"):
        fx.cache_programs(tmp_path / "file" / "programs")


def test_shards_are_chosen_by_work_and_clients() -> None:
    assert choose_shards(100, 10_000_000, None) == 2
    assert choose_shards(100, 1_000, None) == 1
    assert choose_shards(3, 10_000_000, None) == 1
    assert choose_shards(100, 1_000, 2) == 2
    for shards in (0, 3):
        with pytest.raises(fx.InputError, match="between 1 and 2"):
            choose_shards(100, 1_000, shards)
