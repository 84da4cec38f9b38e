"""Fresh processes that print JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.compare import ROOT, environment, peak_memory


def fresh(module: str, *arguments: Any) -> dict[str, Any]:
    """What `python -m benchmarks.MODULE ARGUMENTS` prints, and the seconds that it took."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    start = time.perf_counter()
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    ).stdout
    return json.loads(printed) | {"process": time.perf_counter() - start}


def own_peak() -> float:
    """MB at the peak of this process."""
    return peak_memory(os.getpid())
