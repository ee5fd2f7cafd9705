"""What an import drags in, seen by a fresh interpreter."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kiln_core

ROOT = Path(kiln_core.__file__).parents[1]
HEAVY = (
    "anyio",
    "aiohttp",
    "click",
    "starlette",
    "hypercorn",
    "jax",
    "flax",
    "optax",
    "prometheus_client",
)
COMPILERS = ("fastjsonschema", "jsonschema_rs")
NETWORK = ("anyio", "aiohttp", "asyncio")
"""Not ``socket``, which the schema validator loads; import-linter forbids it to us."""
PURE = sorted(
    module.name
    for module in pkgutil.iter_modules(kiln_core.__path__)
    if module.name != "drive"
)


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a new interpreter."""
    return {name.partition(".")[0] for name in modules_after(statement)}


def modules_after(statement: str) -> set[str]:
    """Return every module that is loaded after a statement."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    return set(result.stdout.split())


def test_package_loads_no_library() -> None:
    """And so compiles no schema: both compilers are libraries."""
    loaded = loaded_by("import kiln_core")
    assert not loaded & {*HEAVY, *COMPILERS, "msgspec", "asyncio", "socket"}


def test_package_loads_none_of_its_modules() -> None:
    ours = {name for name in modules_after("import kiln_core") if "kiln_core" in name}
    assert ours == {"kiln_core"}


def test_pure_modules_load_no_io_library() -> None:
    statement = "; ".join(f"import kiln_core.{module}" for module in PURE)
    assert not loaded_by(statement) & {*HEAVY, *NETWORK}


def test_pure_names_come_without_io_libraries() -> None:
    names = ", ".join(
        name
        for module, names in kiln_core._HOMES.items()
        if not module.startswith("drive.")
        for name in names.split()
    )
    assert not loaded_by(f"from kiln_core import {names}") & {*HEAVY, *NETWORK}


def test_schemas_are_compiled_only_when_used() -> None:
    """The validator is imported with the module, but nothing is compiled by it."""
    statement = (
        "import jsonschema_rs; "
        "jsonschema_rs.validator_for = lambda *a, **k: sys.exit('compiled'); "
        + "; ".join(f"import kiln_core.{module}" for module in PURE)
    )
    assert "kiln_core" in loaded_by(statement)


def test_public_names_are_sorted_and_unique() -> None:
    assert kiln_core.__all__ == sorted(set(kiln_core.__all__))
    homes = [name for names in kiln_core._HOMES.values() for name in names.split()]
    assert sorted(homes) == kiln_core.__all__
    assert list(kiln_core._HOMES) == sorted(kiln_core._HOMES)


@pytest.mark.parametrize("name", kiln_core.__all__)
def test_public_name_is_that_of_its_home(name: str) -> None:
    home = next(m for m, names in kiln_core._HOMES.items() if name in names.split())
    module = __import__(f"kiln_core.{home}", fromlist=[name])
    assert getattr(kiln_core, name) is getattr(module, name)
    assert name in dir(kiln_core)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(kiln_core.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module or "").removeprefix("kiln_core."): {a.name for a in node.names}
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == {m: set(names.split()) for m, names in kiln_core._HOMES.items()}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kiln_core.nothing


def test_no_public_name_hides_a_module() -> None:
    assert not set(kiln_core.__all__) & {*PURE, "drive"}


@pytest.mark.parametrize("module", PURE)
def test_exported_names_of_a_module_exist_and_are_sorted(module: str) -> None:
    found = __import__(f"kiln_core.{module}", fromlist=["__all__"])
    exported = getattr(found, "__all__", [])
    assert sorted(exported, key=_order) == list(exported)
    assert all(hasattr(found, name) for name in exported)


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name."""
    if name.isupper():
        return 0, name
    return (1, name) if name[0].isupper() else (2, name)
