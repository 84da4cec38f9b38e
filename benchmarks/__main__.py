"""`python -m benchmarks NAME [--write]`: a table; --write puts it into docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

from benchmarks import engine  # noqa: E402 - the devices must be set first

NAMES = {"engine": engine.main}
DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    text = NAMES[arguments.name]()
    print(text)
    if arguments.write:
        DOCS.write_text(text)


if __name__ == "__main__":
    main()
