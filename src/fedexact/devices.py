"""The JAX devices that the clients are spread over: what lies where, sums over all of them.

JAX fixes the number of its CPU devices when it starts. Nothing here changes a running JAX: it uses
what it finds, over all processes of a `jax.distributed` job, and says once when cores stay idle.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedexact.errors import IdleCoresWarning, InputError

AXIS = "clients"
SPLIT, WHOLE = PartitionSpec(AXIS), PartitionSpec()  # along the first axis; on every device
# Multiplications of a gradient over all rows; below, devices wait longer than they work.
WORTH_SHARDING = 200_000


PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
)


def wait_for_cores() -> None:
    """Lets devices wait an hour for each other, not 40 s, after which XLA ends the process: on a
    busy or sleeping machine a device may get no core for so long. Before JAX starts; flags that are
    set stay.
    """
    if "xla_cpu_collective" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}".strip()


def cache_programs(folder: str | Path) -> None:
    """Keeps compiled programs in a folder, for later processes on the same kind of machine.

    JAX's own compilation cache, for all programs of this process from now on. Raises InputError for
    a folder that cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        raise InputError(f"the folder {folder} for compiled programs: {error}") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def choose_shards(n_clients: int, work: int, shards: int | None) -> int:
    """Over how many devices to spread clients whose gradients take about so many multiplications in
    all.

    Raises InputError unless `shards` is None or possible.
    """
    available = len(jax.devices())
    if shards is None:
        worth = work >= WORTH_SHARDING and n_clients >= 2 * available
        if worth:
            _say_idle_cores()
        return available if worth or jax.process_count() > 1 else 1
    if not 1 <= shards <= available:
        raise InputError(f"shards must be between 1 and {available}, the number of JAX devices")
    if shards < available and jax.process_count() > 1:
        raise InputError(
            f"shards must be {available}, all devices of the {jax.process_count()} processes"
        )
    return shards


@functools.cache
def _say_idle_cores() -> None:
    """Warns where JAX's CPU devices are fewer than the cores of this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores, devices = len(affinity(0)) if affinity else os.cpu_count(), len(jax.local_devices())
    if jax.default_backend() == "cpu" and devices < (cores or 1):
        warnings.warn(
            f"JAX runs on {devices} of {cores} cores; to use all, put "
            f"jax.config.update('jax_num_cpu_devices', {cores}) before JAX's first computation",
            IdleCoresWarning,
            stacklevel=2,
        )


@functools.cache
def mesh_of(shards: int) -> Mesh | None:
    """The first so many devices; None for one alone."""
    return Mesh(np.array(jax.devices()[:shards]), (AXIS,)) if shards > 1 else None


def put(a: Any, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    """`a` on the device, or on those of the mesh; the same on every process."""
    if mesh is None:
        return jnp.asarray(a)
    if isinstance(a, jax.Array) and a.is_fully_addressable and jax.process_count() == 1:
        return jax.device_put(a, NamedSharding(mesh, spec))
    a = np.asarray(a)
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i: a[i])


def put_windows(windows: Sequence[np.ndarray], mesh: Mesh | None) -> jax.Array:
    """Equally long arrays, one per device of the mesh, as one array split along its first axis.

    Where an array is aligned to 64 bytes JAX uses its memory instead of a copy.
    """
    if mesh is None:
        return jax.device_put(windows[0])
    here = [
        jax.device_put(window, device)
        for window, device in zip(windows, mesh.devices.flat, strict=True)
        if device.process_index == jax.process_index()
    ]
    return joined(here, mesh)


def joined(here: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One array, split along its first axis, from the parts on this process's devices."""
    shape = (mesh.size * len(here[0]), *here[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, SPLIT), here)


def on_device(a: jax.Array, device: Any) -> jax.Array:
    """The part of an array that lies on a device of this process."""
    return next(part.data for part in a.addressable_shards if part.device == device)


def fetch(a: Any) -> np.ndarray:
    """The whole array as NumPy, also where other processes hold parts of it."""
    if isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(a, tiled=True))
    return np.asarray(a)


def over_shards(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn` run by every device on its slice; `fn` itself on one device."""
    if mesh is None:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def all_shards_sum(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the sum over the devices, of all leaves in one message."""
    if mesh is None:
        return tree
    flat, as_tree = ravel_pytree(tree)
    return as_tree(jax.lax.psum(flat, AXIS))
