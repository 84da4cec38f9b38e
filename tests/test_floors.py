"""A module imports only from its own floor or lower ones, and `import fedexact` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedexact

ROOT = Path(fedexact.__file__).parent

FLOORS = [
    ["core", "errors", "files"],
    ["losses", "regularizers"],
    ["oracles", "participation"],
    ["algorithms"],
    [
        "ahead",
        "clients",
        "devices",
        "streams",
        "layout",
        "parts",
        "objective",
        "problem",
        "engines",
    ],
    ["bounds", "certificate", "reference", "result", "solve", "theory"],
    ["data"],
    ["report", "config", "deploy", "cli", "__main__"],
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS, 1) for module in modules}

# Within a floor, only downwards in this order: these pairs (importer, imported) and no others.
SAME_FLOOR = {
    ("streams", "devices"),
    ("layout", "clients"),
    ("layout", "devices"),
    ("problem", "ahead"),
    ("problem", "clients"),
    ("problem", "devices"),
    ("problem", "layout"),
    ("parts", "clients"),
    ("parts", "devices"),
    ("parts", "layout"),
    ("parts", "streams"),
    ("problem", "objective"),
    ("problem", "parts"),
    ("problem", "streams"),
    ("engines", "parts"),
    ("engines", "devices"),
    ("engines", "layout"),
    ("engines", "problem"),
    ("engines", "streams"),
    ("result", "certificate"),
    ("certificate", "bounds"),
    ("solve", "bounds"),
    ("solve", "certificate"),
    ("solve", "result"),
    ("theory", "certificate"),
    ("theory", "reference"),
    ("theory", "result"),
    ("theory", "solve"),
    ("cli", "config"),
    ("cli", "report"),
    ("cli", "deploy"),
    ("deploy", "config"),
    ("deploy", "report"),
    ("report", "config"),
    ("__main__", "cli"),
}

HEAVY = ("torch", "flwr", "sklearn", "statsmodels", "pandas", "plotly", "matplotlib", "typer")


def imports(path: Path) -> set[str]:
    """First-level fedexact modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "fedexact":
                names = [f"fedexact.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("fedexact.")}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_downwards(path: Path) -> None:
    module = module_of(path)
    for imported in imports(path) - {module}:
        if imported not in FLOOR:
            assert module in FLOORS[-1]
            continue  # a name of the package itself, such as __version__
        same = FLOOR[imported] == FLOOR[module]
        assert FLOOR[imported] < FLOOR[module] or (same and (module, imported) in SAME_FLOOR), (
            f"{module} (floor {FLOOR[module]}) imports {imported} (floor {FLOOR[imported]})"
        )


def test_every_module_has_a_floor() -> None:
    assert {module_of(path) for path in FILES} <= set(FLOOR)


def test_import_is_light_and_leaves_jax_alone() -> None:
    code = (
        "import sys, jax, fedexact\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], jax.config.jax_enable_x64)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_computes_in_float64_where_jax_does_not() -> None:
    """JAX's default is float32, and truncation to it a warning: here an error."""
    code = (
        "import numpy as np, fedexact as fx, jax.numpy as jnp\n"
        "from fedexact import theory\n"
        "X = np.random.default_rng(0).normal(size=(3, 6, 2))\n"
        "problem = fx.Problem([(x, x @ [1.0, 2.0] + i) for i, x in enumerate(X)])\n"
        "result = fx.solve(problem, fx.VRFOCUS(), fx.Bernoulli(0.7), rounds=800)\n"
        "assert abs(result.x - fx.reference(problem)).max() < 1e-12\n"
        "said = theory.predict(fx.FedAvg(), problem)\n"
        "c = problem.constants()\n"
        "arrays = [c.L_k, c.row_L_k, c.l_k, said.limit.x, said.limit.bias]\n"
        "print({a.dtype.name for a in arrays}, jnp.ones(1).dtype)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{'float64'} float32", done.stderr
