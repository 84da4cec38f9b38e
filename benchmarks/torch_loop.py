"""A loop in PyTorch, one client after the other, as a researcher would write it."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.data import Data
from benchmarks.torch_model import build, epochs, tensors, vector
from benchmarks.worker import Ran, Run, serve


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: threads."""
    torch.set_num_threads(options["threads"])
    clients = tensors(data)
    n_epochs, batch_size = epochs(data)
    model, loss = build(data)

    def visit(X: torch.Tensor, y: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=data.info["lr"], weight_decay=data.info["l2"]
        )
        for _ in range(n_epochs):
            order = torch.randperm(len(y)) if batch_size else torch.arange(len(y))
            for rows in order.split(batch_size or len(y)):
                batch = (X[rows], y[rows]) if batch_size else (X, y)
                optimizer.zero_grad()
                loss(model(batch[0]), batch[1]).backward()
                optimizer.step()

    def run(rounds: int) -> Ran:
        x = nn.utils.parameters_to_vector(build(data)[0].parameters()).detach()
        for cohort in data.cohorts[:rounds]:
            total = torch.zeros_like(x)
            for k in cohort:
                nn.utils.vector_to_parameters(x.clone(), model.parameters())
                visit(*clients[k])
                total += nn.utils.parameters_to_vector(model.parameters()).detach()
            x = total / len(cohort)
        nn.utils.vector_to_parameters(x, model.parameters())
        return Ran(vector(model))

    return run


if __name__ == "__main__":
    serve(make, "torch")
