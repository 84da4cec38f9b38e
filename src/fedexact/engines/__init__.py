"""Engines: the same rounds, run two ways.

An engine holds the state of a run, (server, clients), in a form of its own:

* `start(algorithm, problem, x0)` makes it, `load` makes it from `save`d arrays in client order;
* `advance(algorithm, problem, state, schedule, root)` runs the rounds of a schedule;
* `stacked(problem, state)` gives the client states stacked in client order, (N, ...).
"""

from fedexact.engines import compiled, loop
from fedexact.engines.state import Engine, State

__all__ = ["ENGINES", "Engine", "State"]

ENGINES: dict[str, Engine] = {"compiled": compiled.Compiled(), "loop": loop.Loop()}
