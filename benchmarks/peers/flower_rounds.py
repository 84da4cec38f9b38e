"""Flower's simulation on Ray: a `ClientApp` in PyTorch under the strategy `FedAvg`, as in its
quickstart-pytorch, without evaluation.

A run starts Ray anew, so that the rounds are timed inside, the first one left out. Who takes part
is Flower's own draw.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.data import Data, load
from benchmarks.torch_model import build, epochs, tensors, vector
from benchmarks.worker import Ran, Run, serve

PATH = "FEDEXACT_BENCHMARK_DATA"  # tells Ray's processes the file

client_app = ClientApp()
_loaded: dict[str, Any] = {}  # per process


def loaded() -> tuple[Data, Any]:
    path = os.environ[PATH]
    if path not in _loaded:
        data = load(path)
        _loaded[path] = data, tensors(data)
    return _loaded[path]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data, clients = loaded()
    X, y = clients[int(context.node_config["partition-id"])]
    model, loss = build(data)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=data.info["lr"], weight_decay=data.info["l2"]
    )
    n_epochs, batch_size = epochs(data)
    for _ in range(n_epochs):
        order = torch.randperm(len(y)) if batch_size else torch.arange(len(y))
        for rows in order.split(batch_size or len(y)):
            optimizer.zero_grad()
            loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),  # every client alike
        }
    )
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """Notes when each round starts and ends."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.starts: list[float] = []
        self.seconds: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.starts.append(time.perf_counter())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        out = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.starts[-1])
        return out


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: path, of the data."""
    os.environ[PATH] = options["path"]
    N, m = data.n_clients, data.cohorts.shape[1]

    def run(rounds: int) -> Ran:
        strategy = Timed(
            fraction_train=m / N, fraction_evaluate=0.0, min_train_nodes=m, min_available_nodes=N
        )
        server_app, found = ServerApp(), []

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            start = ArrayRecord(build(data)[0].state_dict())
            result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
            found.append(result.arrays.to_torch_state_dict())

        run_simulation(
            server_app, client_app, num_supernodes=N,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )  # fmt: skip
        model = build(data)[0]
        model.load_state_dict(found[0])
        return Ran(vector(model), seconds=float(np.mean(strategy.seconds[1:])))

    return run


if __name__ == "__main__":
    serve(make, "flwr", "ray", "torch", "numpy")
