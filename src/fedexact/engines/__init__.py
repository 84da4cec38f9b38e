"""Engines: the same rounds, run in several ways.

An engine holds the state of a run, (server, clients), in a form of its own:

* `load(problem, server, clients)` makes it from states stacked in client order, (N, ...);
* `advance(algorithm, problem, state, cohorts, start, root, stops)` runs rounds with given
  participants and records the model, F and its gradient at `stops`;
* `clients(problem, state)` gives the client states stacked in client order, (N, ...).
"""

from fedexact.engines import compiled, loop, matrix
from fedexact.engines.state import Engine, State
from fedexact.errors import InputError, check_choice

__all__ = ["ENGINES", "Engine", "State", "engine_of"]

ENGINES: dict[str, Engine] = {
    "compiled": compiled.Compiled(),
    "loop": loop.Loop(),
    "matrix": matrix.Matrix(),
}
_SINGLE = compiled.Compiled(single=True)


def engine_of(name: str, precision: str) -> Engine:
    """By name; its rounds in "double" or "single" precision. InputError where there is none."""
    check_choice("engine", name, ENGINES)
    check_choice("precision", precision, ("double", "single"))
    if precision == "double":
        return ENGINES[name]
    if name != "compiled":
        raise InputError(f"engine = {name!r} computes in double precision only; use 'compiled'")
    return _SINGLE
