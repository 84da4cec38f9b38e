"""A virtual environment for each program, with pinned versions, made when first needed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.compare import ROOT

CACHE = ROOT / "build" / "benchmarks"

# What pip installs, in this order, into a new environment. torch comes first, so that pip never
# takes another build of it for a package that asks for any torch.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch==2.13.0 numpy==2.4.6",),
    # its last release calls jax.tree_map, which newer versions of JAX have not
    "fedjax": (
        "fedjax==0.0.17 jax==0.4.25 jaxlib==0.4.25 dm-haiku==0.0.12 optax==0.2.2 chex==0.1.86 "
        "numpy==1.26.4 scipy==1.12.0",
    ),
    "pfl": ("torch==2.13.0", "pfl==0.6.0 numpy==2.4.6"),
    "fluke": ("torch==2.14.1 torchvision==0.29.1", "fluke-fl==0.8.1 numpy==2.4.6"),
    "flower": ("torch==2.13.0", "flwr[simulation]==1.42.0 numpy==2.4.6"),
}


class NotInstalledError(Exception):
    """pip could not install the packages; says why."""


def python_of(name: str, cache: Path = CACHE) -> Path:
    """The interpreter of the environment; makes it if it is not there, in minutes."""
    digest = hashlib.sha256("\n".join(PACKAGES[name]).encode()).hexdigest()[:8]
    folder = cache / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {name} into {folder}", file=sys.stderr)
    _call([sys.executable, "-m", "venv", str(folder)])
    for requirements in PACKAGES[name]:
        _call([str(python), "-m", "pip", "install", "--quiet", *requirements.split()])
    (folder / "complete").touch()
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise NotInstalledError((errors or done.stderr.splitlines() or ["pip failed"])[-1])
