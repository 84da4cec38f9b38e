"""What a benchmark found, kept as JSON so that each can be run again alone."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")


@dataclass
class Table:
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Target:
    """What was aimed at: the measured value should be at most the limit, or at least."""

    what: str
    measured: float | None  # None: not measured
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass
class Result:
    name: str
    title: str
    notes: list[str] = field(default_factory=list)  # paragraphs in front of the tables
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    bars: dict[str, float] = field(default_factory=dict)  # for the figure: ms a round
    data: Any = None  # all that was measured
    made: str = ""
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path = FOLDER) -> Path:
        """Writes it under its name, replacing an earlier one."""
        self.made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.machine = machine()
        packages = ("fedexact", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "statsmodels")
        self.versions = {"Python": platform.python_version()}
        self.versions |= {name: version(name) for name in packages}
        folder.mkdir(exist_ok=True)
        path, new = folder / f"{self.name}.json", folder / f".{self.name}.new"
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(new, path)
        return path


def read(path: Path) -> Result:
    """The result in a file that `save` wrote."""
    fields = json.loads(path.read_text())
    fields["tables"] = [Table(**table) for table in fields["tables"]]
    fields["targets"] = [Target(**target) for target in fields["targets"]]
    return Result(**fields)


def machine() -> str:
    """Processor, cores, memory."""
    model = _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = _first("/proc/meminfo", "MemTotal")
    size = f", {int(memory.split()[0]) / 2**20:.0f} GiB" if memory else ""
    return f"{model}, {os.cpu_count()} cores{size}, {platform.system()} {platform.machine()}"


def _first(path: str, key: str) -> str:
    """The first value of `key` in a file of the kernel's; empty where there is none."""
    if not Path(path).exists():
        return ""
    lines = Path(path).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, without an exponent up to 10^6."""
    if value is None:
        return "–"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"
