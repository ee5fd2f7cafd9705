"""Every public report that Kiln answers to has a test that names it."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

REPORTS: dict[str, tuple[str, ...]] = {
    "F1 late reply taken as the next answer": ("huggingface/OpenEnv/issues/1143",),
    "F2 seed accepted and thrown away": (
        "huggingface/OpenEnv/issues/1102",
        "huggingface/OpenEnv/pull/1127",
    ),
    "F3 rewards that are not rewards": ("huggingface/OpenEnv/issues/1199",),
    "F4 one-session server, group of four": (
        "huggingface/OpenEnv/pull/517",
        "huggingface/OpenEnv/issues/194",
    ),
    "F5 socket dies while the model thinks": (
        "huggingface/OpenEnv/pull/362",
        "huggingface/OpenEnv/issues/875",
    ),
    "F6 infrastructure failure trained as reward 0": ("NVIDIA-NeMo/Gym/pull/2552",),
    "F7 retokenisation": (
        "huggingface/trl/issues/5224",
        "volcengine/verl/issues/3960",
        "huggingface/trl/pull/6250",
    ),
}


def docstrings() -> dict[str, str]:
    """Return the docstring of every test function that has one."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and node.name.startswith("test_"):
                    found[f"{path.name}::{node.name}"] = text
    return found


@pytest.mark.parametrize("report", REPORTS)
def test_report_has_a_test_that_links_it(report: str) -> None:
    texts = docstrings().values()
    for thread in REPORTS[report]:
        link = f"https://github.com/{thread}"
        assert any(link in text for text in texts), link
