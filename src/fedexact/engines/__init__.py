"""Engines: the same rounds, run in several ways.

An engine holds the state of a run, (server, clients), in a form of its own:

* `load(problem, server, clients)` makes it from states stacked in client order, (N, ...);
* `advance(algorithm, problem, state, cohorts, start, root)` runs rounds with given participants;
* `clients(problem, state)` gives the client states stacked in client order, (N, ...).
"""

from fedexact.engines import compiled, loop, matrix
from fedexact.engines.state import Engine, State

__all__ = ["ENGINES", "Engine", "State"]

ENGINES: dict[str, Engine] = {
    "compiled": compiled.Compiled(),
    "loop": loop.Loop(),
    "matrix": matrix.Matrix(),
}
