"""fedexact by its public interface: `fx.solve`, which records every 10 rounds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.c_loop import RECORD_EVERY
from benchmarks.data import Data
from benchmarks.mlp import layers
from benchmarks.solving import solved
from benchmarks.worker import Ran, Run, serve


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: shards (None lets fedexact choose), precision."""
    info = data.info
    problem = fx.Problem(
        data.clients(), loss=_loss(data), l2=info["l2"], weights="clients",
        shards=options.get("shards"),
    )  # fmt: skip
    algorithm = fx.FedAvg(
        lr=info["lr"], local_steps=info["local_steps"], batch_size=info["batch_size"]
    )
    who = fx.Full() if data.everybody else fx.Uniform(data.cohorts.shape[1])

    def run(rounds: int) -> Ran:
        result, seconds = solved(
            problem, algorithm, who, rounds=rounds, record_every=RECORD_EVERY, x0=data.x0,
            precision=options.get("precision", "double"),
        )  # fmt: skip
        return Ran(result.x, result.history["objective"].to_numpy(), seconds)

    return run


def _loss(data: Data) -> Any:
    if data.info["loss"] == "mlp":
        return fx.CustomLoss(cross_entropy, size=len(data.x0))
    return data.info["loss"]


def cross_entropy(x: jax.Array, rows: fx.Rows) -> jax.Array:
    """The MLP's loss of each row; x holds weights and biases of both layers."""
    W1, b1, W2, b2 = layers(x, jnp.split)
    logits = jax.nn.relu(rows.X @ W1 + b1[None, :]) @ W2 + b2[None, :]
    chosen = jnp.take_along_axis(logits, rows.y.astype(int)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


if __name__ == "__main__":
    serve(make, "fedexact", "jax", "numpy")
