"""`python -m benchmarks NAME [--write] [--quick]`: measures, prints, and keeps the result in
benchmarks/results/NAME.json; --write makes docs/benchmarks.md and its figure from all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module

from benchmarks import report
from benchmarks.result import Result

MODULES = {
    "W1": "rounds", "W2": "rounds", "W3": "rounds", "profile": "profile", "start": "start",
    "memory": "memory", "algorithms": "algorithms", "answer": "answer", "powerlaw": "powerlaw",
    "million": "million", "sparse": "sparse", "reference": "reference",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help=", ".join(MODULES))
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument(
        "--quick", action="store_true", help="smaller or fewer repeats; the result is not kept"
    )
    arguments = parser.parse_args()
    for name in arguments.name:
        if name not in MODULES:
            parser.error(f"there is no {name!r}, only {', '.join(MODULES)}")
    for name in arguments.name:
        result = benchmark(name)(arguments.quick)
        print(report.section(result))
        if not arguments.quick:
            result.save()
    if arguments.write:
        report.write()


def benchmark(name: str) -> Callable[[bool], Result]:
    """The function that measures `name`; its module starts JAX, so only that one is imported."""
    return partial(import_module(f"benchmarks.{MODULES[name]}").main, name)


if __name__ == "__main__":
    main()
