"""Experiments as TOML files, and running them."""

from fedexact.config.models import Experiment, load, parse
from fedexact.config.runner import Observer, Outcome, Prepared, Run, Store, file_name, prepare, run

__all__ = [
    "Experiment",
    "Observer",
    "Outcome",
    "Prepared",
    "Run",
    "Store",
    "file_name",
    "load",
    "parse",
    "prepare",
    "run",
]
