"""Strict: float64 inside every test, no silent broadcasting of ranks, warnings are errors."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

from fedexact.core import float64
from fedexact.devices import wait_for_cores

wait_for_cores()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)  # so that sharding is tested; most tests use one

settings.register_profile("fedexact", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("fedexact")


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module() -> Iterator[None]:
    """Compiled programs are let go with the module that needed them: they take gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield
