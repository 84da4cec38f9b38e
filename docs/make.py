"""Makes what README shows, docs/heart.png and its table: `python docs/make.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = run("run", "--out", folder)
        (ROOT / "docs" / "heart.png").write_bytes(Path(folder, "figure.png").read_bytes())
    insert(ROOT / "README.md", "heart", f"```text\n{table(printed)}\n```")


def run(*arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "fedexact", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def table(printed: str) -> str:
    """The part of the output between blank lines in which the algorithms stand."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return next(part for part in lines.split("\n\n") if "algorithm" in part and "verdict" in part)


def insert(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marks <!-- name: ... --> and <!-- /name --> of a page."""
    pattern = rf"(<!-- {name}:.*?-->\n).*?(<!-- /{name} -->)"
    page, count = re.subn(
        pattern, lambda m: f"{m[1]}{text}\n{m[2]}", path.read_text(), flags=re.DOTALL
    )
    assert count == 1, f"{path} has no mark {name}"
    path.write_text(page)


if __name__ == "__main__":
    main()
