"""fluke: `FedAVG` on its own data loaders, as in its documentation; in memory, no evaluation."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.server import Server

from benchmarks.data import Data
from benchmarks.torch_model import build, epochs, tensors, vector
from benchmarks.worker import Ran, Run, serve


class Replayed(Server):
    """Its server with the cohorts of the file instead of random ones."""

    cohorts: Any = ()

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return [self.clients[k] for k in next(self.cohorts)]


class Replay(FedAVG):
    def get_server_class(self) -> type[Server]:
        return Replayed


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: threads."""
    torch.set_num_threads(options["threads"])
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    n_epochs, batch_size = epochs(data)
    n_labels = 10 if data.info["loss"] == "mlp" else 2
    loaders = [
        FastDataLoader(
            *rows, num_labels=n_labels, batch_size=batch_size or 0, shuffle=batch_size is not None,
            skip_singleton=False,
        )
        for rows in tensors(data)
    ]  # fmt: skip

    def run(rounds: int) -> Ran:
        model, loss = build(data)
        settings = {
            "client": {
                "batch_size": batch_size or 0,
                "local_epochs": n_epochs,
                "loss": type(loss),
                "optimizer": {
                    "name": "SGD",
                    "lr": data.info["lr"],
                    "weight_decay": data.info["l2"],
                },
                "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
                "persistency": False,
            },
            "server": {"weighted": False},
            "model": model,
        }
        container = DummyDataContainer(loaders, [None] * len(loaders), None, n_labels)
        algorithm = Replay(len(loaders), DataSplitter(container), DDict(settings))
        algorithm.server.cohorts = iter(data.cohorts[:rounds])
        algorithm.run(rounds, data.cohorts.shape[1] / len(loaders), finalize=False)
        return Ran(vector(model))

    return run


if __name__ == "__main__":
    serve(make, "fluke-fl", "torch", "numpy")
