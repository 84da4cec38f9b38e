"""Where the time of a round of W1 goes: its pieces, each alone, in one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

import fedexact as fx
from benchmarks import c_loop
from benchmarks.cores import CORES
from benchmarks.data import Data
from benchmarks.limits import Limits
from benchmarks.result import Result, Table, number
from benchmarks.solving import interleaved, problem_of
from benchmarks.workloads import LOCAL_STEPS, WORKLOADS, bytes_per_round

ROUNDS, RECORD_EVERY = 200, 10
SUMS = 1000  # over devices, in one program
AXIS = "clients"


def main(name: str, quick: bool) -> Result:
    """Pieces of JAX on one core, halved where they run on several; the rest as it is."""
    data = WORKLOADS["W1"]()
    limits = Limits()
    with jax.enable_x64(True):
        pieces = {**solves(data), **kernels(data), **c_loops(data)}
        calls = {label: call for label, (call, _) in pieces.items()}
        calls["limits"] = limits.measure
        found = interleaved(calls, 3 if quick else 9)
    seconds = {label: min(times) for label, times in found.items()}
    ms = {label: 1e3 * seconds[label] / per for label, (_, per) in pieces.items()}
    return Result(
        name,
        "Profile: where the time of a round goes",
        _notes(data, ms, limits.medians()),
        [Table(("piece of a round of W1", "ms"), rows(ms))],
        data={"seconds": found, "ms": ms, "limits": limits.found},
    )


Piece = tuple[Callable[[], Any], float]  # a call, and how many rounds it is worth


def solves(data: Data) -> dict[str, Piece]:
    """`fx.solve` of two lengths, and its recording alone."""
    out: dict[str, Piece] = {}
    algorithm = fx.FedAvg(lr=data.info["lr"], local_steps=LOCAL_STEPS)
    for shards, word in ((None, "all devices"), (1, "1 device")):
        problem = problem_of(data, shards=shards)

        def solve(rounds: int, problem: fx.Problem = problem) -> fx.Result:
            return fx.solve(problem, algorithm, rounds=rounds, record_every=RECORD_EVERY)

        out[f"solve, {word}"] = partial(solve, ROUNDS), ROUNDS
        out[f"solve twice as long, {word}"] = partial(solve, 2 * ROUNDS), 2 * ROUNDS
        out[f"one recording, {word}"] = partial(problem.value_and_grad, np.ones(data.X.shape[1])), 1
    out["draw of the cohorts"] = partial(fx.Full().cohorts, data.n_clients, 0, RECORD_EVERY, 0), 10
    return out


def c_loops(data: Data) -> dict[str, Piece]:
    """The C loop, without and with its recording, which is every 10 rounds."""
    out: dict[str, Piece] = {}
    for threads in {CORES, 1}:
        run = c_loop.make(data, {"dtype": "float64", "threads": threads})
        out[f"C, {threads} threads"] = partial(run, ROUNDS), ROUNDS
    return out


def kernels(data: Data) -> dict[str, Piece]:
    """Parts of the local steps on one device, client after client, and the sum over devices."""
    X = jnp.asarray(data.X)
    y, z = jnp.asarray(data.y), jnp.ones(X.shape[1])
    size = int(data.first[1])
    parts = {
        "rows sliced and summed": _slice,
        "products X z": _forward,
        "products X z and X'r": _both,
        "products and sigmoid": _steps,
    }
    out: dict[str, Piece] = {}
    for label, part in parts.items():
        program = jax.jit(partial(_over_clients, part, size))
        out[label] = (lambda program=program: jax.block_until_ready(program(X, y, z))), 1
    if CORES > 1:
        sums = _sums()
        out["sum over the devices"] = (lambda: jax.block_until_ready(sums(z))), SUMS
    return out


Part = Callable[[Array, Array, Array], Array]


def _over_clients(part: Part, size: int, X: Array, y: Array, z: Array) -> Array:
    def visit(k: Array, total: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(X, k * size, size)
        return total + part(rows, lax.dynamic_slice_in_dim(y, k * size, size), z)

    return lax.fori_loop(0, X.shape[0] // size, visit, jnp.zeros_like(z))


def _slice(X: Array, y: Array, z: Array) -> Array:
    return jnp.sum(X, axis=0)


def _forward(X: Array, y: Array, z: Array) -> Array:
    def step(_: Array, z: Array) -> Array:
        return z + jnp.sum(X @ z) * 1e-9

    return lax.fori_loop(0, LOCAL_STEPS, step, z)


def _both(X: Array, y: Array, z: Array) -> Array:
    return lax.fori_loop(0, LOCAL_STEPS, lambda _, z: z - 1e-9 * ((X @ z - y) @ X), z)


def _steps(X: Array, y: Array, z: Array) -> Array:
    def step(_: Array, z: Array) -> Array:
        return z - 1e-3 * ((jax.nn.sigmoid(X @ z) - y) @ X / len(y) + 0.1 * z)

    return lax.fori_loop(0, LOCAL_STEPS, step, z)


def _sums() -> Callable[[Array], Array]:
    """SUMS sums of a vector over all devices, one after the other."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    whole = PartitionSpec()

    def program(z: Array) -> Array:
        return lax.fori_loop(0, SUMS, lambda _, z: lax.psum(z, AXIS) / CORES, z)

    return jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )


def rows(ms: dict[str, float]) -> list[tuple[str, str]]:
    """The pieces, in the order of a round."""
    out = [(label, ms[label]) for label in ("solve, all devices", "solve, 1 device")]
    out += [(f"C, {n} threads", ms[f"C, {n} threads"]) for n in sorted({CORES, 1}, reverse=True)]
    for word in ("all devices", "1 device"):
        fixed = 2 * ROUNDS * (ms[f"solve, {word}"] - ms[f"solve twice as long, {word}"])
        recording = ms[f"one recording, {word}"] / RECORD_EVERY
        out += [
            (f"{word}: what a call of solve costs once, per round", fixed / ROUNDS),
            (f"{word}: recording, a pass over all rows", recording),
        ]
    out.append(("drawing the cohorts", ms["draw of the cohorts"]))
    before = 0.0
    for label, words in (
        ("rows sliced and summed", "1 device: reading every client's rows once"),
        ("products X z", f"1 device: {LOCAL_STEPS} products X z"),
        ("products X z and X'r", f"1 device: {LOCAL_STEPS} products X'r on top"),
        ("products and sigmoid", "1 device: sigmoid, step and ridge on top"),
    ):
        out.append((words, ms[label] - before if "on top" in words else ms[label]))
        before = ms[label]
    if "sum over the devices" in ms:
        out.append(("the sum over the devices, once a round", ms["sum over the devices"]))
    return [(label, number(value)) for label, value in out]


def _notes(data: Data, ms: dict[str, float], speed: dict[str, float]) -> list[str]:
    size = bytes_per_round(data, 8) / 1e6
    c, one = ms[f"C, {CORES} threads"], ms["products X z and X'r"]
    return [
        f"Each piece alone, in one run, the least of its interleaved repeats. A "
        f"round's {LOCAL_STEPS} local steps go through "
        f"{size:.0f} MB of rows, 160 kB of a client at a time, which stay in L2 during its steps; "
        f"{size / LOCAL_STEPS:.0f} MB come from memory or the last cache.",
        f"Limits of all cores in this run: from memory {speed['gemv']:.1f} GB/s, that is "
        f"{size / LOCAL_STEPS / speed['gemv']:.2f} ms a round if rows were read once and computing "
        f"cost nothing; by matrix-vector products in L2 {speed['gemv in cache']:.1f} GB/s, that is "
        f"{size / speed['gemv in cache']:.2f} ms for one product of each local step. The C loop "
        f"takes {c:.2f} ms.",
        "What it would take to get closer: XLA computes X z and X'r as two passes over a client's "
        f"rows ({one:.2f} ms on one device for both), the C loop fuses them, so that a row is read "
        "from L2 once a step and from L1 the second time. A fused kernel (a custom call through "
        "JAX's foreign function interface) is the remaining factor. Recordings are made inside the "
        "program, so that the host takes no part in most rounds; the sum over the devices is small "
        "on W1, and matters on W2 and W3, where a device also waits for the one that got more of "
        "the round's clients.",
    ]
