"""The models of the workloads in PyTorch. Needs NumPy and torch alone."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.data import Data
from benchmarks.mlp import layers


class Logistic(nn.Module):
    """Logits of a logistic regression without intercept."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, 1, bias=False)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.linear(X)[:, 0]


def build(data: Data) -> tuple[nn.Module, nn.Module]:
    """The model at x0 and its loss; the ridge is the optimiser's weight decay."""
    if data.info["loss"] == "mlp":
        model, loss = (
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            nn.CrossEntropyLoss(),
        )
    else:
        model, loss = Logistic(data.X.shape[1]), nn.BCEWithLogitsLoss()
    set_vector(model, data.x0)
    return model, loss


def set_vector(model: nn.Module, x: np.ndarray) -> None:
    """Copies the model's vector into its parameters."""
    parts = layers(x) if isinstance(model, nn.Sequential) else [x.reshape(-1, 1)]
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.copy_(torch.as_tensor(part.T.copy()))


def vector(model: nn.Module) -> np.ndarray:
    """The model as one vector."""
    return np.concatenate([p.detach().numpy().T.ravel() for p in model.parameters()])


def tensors(data: Data) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(X_k, y_k) of every client in single precision, labels as the loss wants them."""
    labels: Any = torch.long if data.info["loss"] == "mlp" else torch.float32
    return [
        (torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y, dtype=labels))
        for X, y in data.clients()
    ]


def epochs(data: Data) -> tuple[int, int | None]:
    """Local epochs and batch size: full-batch steps, or one epoch of batches."""
    batch = data.info["batch_size"]
    return (1, batch) if batch else (data.info["local_steps"], None)
