"""One process of a `jax.distributed` job on the loopback: solves, and process 0 saves the models.

Called by test_distributed.py as: python distributed_run.py PROCESSES PROCESS PORT OUT
"""

from __future__ import annotations

import sys

import jax
import numpy as np


def main(processes: int, process: int, port: str, out: str) -> None:
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    import fedexact as fx
    from problems import ALGORITHMS, logistic

    problem = logistic(5, n_rows=(30, 4, 29, 30, 3, 4, 28, 4, 30, 3))  # two sizes of buckets
    assert problem.layout.shards == processes
    found = {"reference": fx.reference(problem), "L_k": problem.constants().L_k}
    algorithms = {name: ALGORITHMS[name]() for name in ("FOCUS 3", "FedDR", "FedAWE")}
    algorithms["SCAFFOLD batch"] = fx.SCAFFOLD(local_steps=3, batch_size=4)
    for name, algorithm in algorithms.items():
        result = fx.solve(problem, algorithm, fx.Bernoulli(0.6), rounds=60)
        found[name] = result.x
        found[f"{name} states"] = np.concatenate(
            [np.ravel(a) for a in (*result.server.values(), *result.clients.values())]
        )
        assert result.certificate is not None
        found[f"{name} bound"] = np.array(result.certificate.distance_bound)
    if process == 0:
        np.savez(out, allow_pickle=False, **found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
