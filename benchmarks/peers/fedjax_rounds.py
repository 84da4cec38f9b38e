"""FedJAX: `fedjax.algorithms.fed_avg` with clients handed over round by round, as in its
examples/emnist_fed_avg.py. Single precision, its default."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import Data
from benchmarks.mlp import layers
from benchmarks.worker import Ran, Run, serve


def make(data: Data, options: dict[str, Any]) -> Run:
    """No options."""
    info = data.info
    mlp = info["loss"] == "mlp"
    labels = np.int32 if mlp else np.float32
    clients = [
        fedjax.ClientDataset({"x": X, "y": y.astype(labels)}) for X, y in data.clients(np.float32)
    ]
    model = fedjax.Model(
        init=lambda rng: data.x0,
        apply_for_train=lambda x, batch, rng: (_mlp if mlp else _linear)(x, batch["x"]),
        apply_for_eval=lambda x, batch: (_mlp if mlp else _linear)(x, batch["x"]),
        train_loss=_cross_entropy if mlp else _log_loss,
        eval_metrics={},
    )
    grad_fn = fedjax.model_grad(model, lambda x: 0.5 * info["l2"] * jnp.vdot(x, x))
    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=info["batch_size"] or int(np.max(np.diff(data.first))),
        num_epochs=1 if info["batch_size"] else info["local_steps"],
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn, fedjax.optimizers.sgd(info["lr"]), fedjax.optimizers.sgd(1.0), batches
    )

    def run(rounds: int) -> Ran:
        state = algorithm.init(jnp.asarray(data.x0, jnp.float32))
        for r, cohort in enumerate(data.cohorts[:rounds]):
            keys = jax.random.split(jax.random.PRNGKey(r), len(cohort))
            here = [(b"%d" % k, clients[k], key) for k, key in zip(cohort, keys, strict=True)]
            state, _ = algorithm.apply(state, here)
        return Ran(np.asarray(state.params))

    return run


def _linear(x: jax.Array, X: jax.Array) -> jax.Array:
    return X @ x


def _log_loss(batch: Any, logits: jax.Array) -> jax.Array:
    return jax.nn.softplus(logits) - batch["y"] * logits


def _mlp(x: jax.Array, X: jax.Array) -> jax.Array:
    W1, b1, W2, b2 = layers(x, jnp.split)
    return jax.nn.relu(X @ W1 + b1) @ W2 + b2


def _cross_entropy(batch: Any, logits: jax.Array) -> jax.Array:
    return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)


if __name__ == "__main__":
    serve(make, "fedjax", "jax", "numpy")
