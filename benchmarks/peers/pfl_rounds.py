"""Apple's pfl: `FederatedAveraging` on a `SimulatedBackend` with PyTorch, as in its
benchmarks/image_classification/pytorch/train.py, without evaluation and privacy."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

from benchmarks.data import Data
from benchmarks.torch_model import build, epochs, tensors, vector
from benchmarks.worker import Ran, Run, serve


class Module(torch.nn.Module):
    """The model with the two functions that pfl asks for."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.net, self.loss_of = build(data)

    def loss(self, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.net.train()
        return self.loss_of(self.net(X), y)

    def metrics(self, X: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {}


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: threads."""
    torch.set_num_threads(options["threads"])
    clients = dict(enumerate(tensors(data)))
    n_epochs, batch_size = epochs(data)

    def run(rounds: int) -> Ran:
        module = Module(data)
        model = PyTorchModel(
            model=module,
            local_optimizer_create=partial(torch.optim.SGD, weight_decay=data.info["l2"]),
            central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        )
        users = iter(data.cohorts[:rounds].ravel().tolist())  # the cohorts of the file
        backend = SimulatedBackend(
            training_data=FederatedDataset.from_slices(clients, lambda: next(users)),
            val_data=None,
            postprocessors=[WeightByUser()],
        )
        FederatedAveraging().run(
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=rounds + 1,
                train_cohort_size=data.cohorts.shape[1],
                val_cohort_size=0,
            ),
            backend=backend,
            model=model,
            model_train_params=NNTrainHyperParams(
                local_learning_rate=data.info["lr"],
                local_num_epochs=n_epochs,
                local_batch_size=batch_size,
            ),
        )
        return Ran(vector(module.net))

    return run


if __name__ == "__main__":
    serve(make, "pfl", "torch", "numpy")
