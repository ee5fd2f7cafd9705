"""The documentation says what the code does: names, tables, commands and links."""

import argparse
import ast
import importlib
import json
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import kiln_cli
import kiln_core
import kiln_server
from examples.environments.__main__ import _parser as environments_parser
from examples.environments.registry import inventory
from kiln_cli.main import CONTEXT, exit_code, kiln
from kiln_core import (
    admission,
    contract,
    discovery,
    evidence,
    failure,
    grpo,
    lifecycle,
    limits,
    lineage,
    manifest,
    provenance,
    receipt,
    records,
    run,
    session,
    tasks,
    trace,
)
from kiln_core.canonical import compact, read_json
from kiln_core.chat import REFUSED
from kiln_core.completions import BATCH_REFUSED, COMPLETIONS_REFUSED
from kiln_core.drive import replay
from kiln_core.errors import KilnError
from kiln_core.verify import CHECKS
from kiln_server import problems, settings
from kiln_server.metrics import METRICS
from kiln_server.routes import adapters, chat, completions, health, training

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]
DOCS = "\n".join(page.read_text() for page in [ROOT / "README.md", *PAGES])

RECORDS = {
    "artifacts.md": (
        records.AgenticGroup,
        records.ChatMessage,
        records.ScoredRollout,
        records.TurnSegment,
        records.OpenEnvRolloutProvenance,
        provenance.BehaviorPolicyIdentity,
        trace.RolloutTrace,
        trace.TokenTrace,
        trace.SamplingTransform,
        trace.TurnTokens,
        manifest.OpenEnvReplayManifest,
        manifest.ReplayGroup,
        manifest.Observation,
        manifest.ReplayCandidate,
        manifest.ReplayExchange,
        manifest.ProtocolError,
        receipt.OpenEnvRolloutSummary,
        receipt.RolloutRecord,
        receipt.RolloutStats,
        receipt.OpenEnvTrainingSelection,
        discovery.EnvironmentIdentity,
        receipt.VerificationReport,
        receipt.VerificationOutcome,
        receipt.BundleContradiction,
        evidence.EnvironmentEvaluationReceipt,
        evidence.PolicyIdentity,
        evidence.EvaluationVerification,
        receipt.ReplayRunReport,
        replay.ReplayOutcome,
        replay.CandidateDrift,
    ),
    "protocol.md": (
        tasks.TaskCatalogReport,
        tasks.EnvironmentTasks,
        tasks.TaskCatalog,
    ),
    "training.md": (
        contract.PreflightRequest,
        contract.PreflightReceipt,
        contract.OpenEnvTrainingContract,
        lineage.OpenEnvTrainingData,
    ),
}
"""Records that a page tells field by field."""

OTHER_PROGRAMS = {"cat", "curl", "export"}
"""Programs in examples that are not ours and are not checked."""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def table(name: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, its head left out."""
    text = page(name)
    found = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert found, f"{name} has no heading {heading!r}"
    lines = text[found.end() :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def code(cell: str) -> str:
    """Return the first code span of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, f"no code in {cell!r}"
    return found.group(1)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(
    command: click.Command = kiln, path: tuple[str, ...] = ("kiln",)
) -> Iterator[tuple[str, click.Command]]:
    """Walk the tree of commands, plugins included."""
    yield " ".join(path), command
    if not isinstance(command, click.Group):
        return
    context = click.Context(command, info_name=path[-1], **CONTEXT)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from commands(child, (*path, name))


def leaf_commands() -> Iterator[tuple[str, click.Command]]:
    return (c for c in commands() if not isinstance(c[1], click.Group))


def error_classes() -> list[type[KilnError]]:
    for package in (kiln_core, kiln_cli, kiln_server):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found, waiting = [], [KilnError]
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        if error.__module__.startswith("kiln_"):
            found.append(error)
    return found


def check_names() -> set[str]:
    """Collect the names of verification checks from the source of the core.

    They are the first argument of a failure callback, the argument ``check``, the
    second argument of ``_invalid``, and the first member of the tuples of digests.
    """
    names: set[str] = set()
    for module in (ROOT / "kiln_core").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call):
                names |= _check_of_call(node)
            elif isinstance(node, ast.Tuple) and node.elts:
                first = _text(node.elts[0])
                names |= {first} if first.endswith("_digest") else set()
    return names - {""}


def _check_of_call(call: ast.Call) -> set[str]:
    named = {_text(k.value) for k in call.keywords if k.arg == "check"}
    called = call.func
    if isinstance(called, ast.Call):
        called = called.func
    name = called.id if isinstance(called, ast.Name) else ""
    name = called.attr if isinstance(called, ast.Attribute) else name
    if name in {"fail", "fail_in", "in_summary", "in_replay"} and (len(call.args) == 5):
        named.add(_text(call.args[0]))
    if name == "_invalid":
        named.add(_text(call.args[1]))
    return named


def _text(node: ast.expr) -> str:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text else ""


def console_lines() -> list[Any]:
    found = []
    for text in TEXTS:
        for block in blocks(text.read_text(), "console"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[-1] == "&":
                    words.pop()
                if words:
                    found.append(pytest.param(words, id=" ".join(words)[:60]))
    return found


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*c, id=c[0]) for c in commands()]
)
def test_command_is_documented(path, command):
    assert re.search(rf"\b{path}\b", DOCS), f"{path} is in no page"
    assert command.help


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*c, id=c[0]) for c in leaf_commands()]
)
def test_help_of_a_command_shows_an_example(path, command):
    context = click.Context(command, info_name=path, **CONTEXT)
    assert path in command.get_help(context).partition("Examples:")[2]


def test_every_option_is_documented():
    options = {
        option
        for _, command in leaf_commands()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    missing = {o for o in options if not re.search(rf"{o}(?![\w-])", DOCS)}
    assert not missing


def test_environments_table_is_true():
    told = [
        (code(row[0]), row[1], row[2].replace("`", ""), int(row[3]))
        for row in table("environments.md", "The pack")
    ]
    assert told == [
        (
            entry["name"],
            entry["kind"],
            ", ".join(f"{name} {kind}" for name, kind in entry["action"].items()),
            entry["steps"],
        )
        for entry in inventory()
    ]


def test_metrics_table_is_complete():
    rows = table("operations.md", "Metrics")
    assert [code(row[0]) for row in rows] == list(METRICS)


def test_settings_table_is_complete():
    rows = table("operations.md", "Settings")
    fields = {code(row[0]): row for row in rows}
    assert list(fields) == list(settings.VARIABLES)
    serve = dict(leaf_commands())["kiln serve"]
    flags = {p.name: p.opts[0] for p in serve.params}
    defaults = {f.encode_name: f.default for f in _fields(settings.ServerSettings)}
    for variable, field in settings.VARIABLES.items():
        flag, default = fields[variable][1:3]
        assert flag == (f"`{flags[field]}`" if field in flags else "")
        if defaults[field] is not None:
            assert default == f"`{defaults[field]}`"


def test_routes_table_is_complete():
    served = [
        f"{method} {route.path}"
        for module in (health, chat, completions, adapters, training)
        for route in module.ROUTES
        for method in sorted(route.methods - {"HEAD"})
    ]
    documented = [code(row[0]) for row in table("operations.md", "Routes")]
    assert sorted(documented) == sorted(served)


def test_refused_members_are_documented():
    refused = (*REFUSED, *COMPLETIONS_REFUSED, *BATCH_REFUSED)
    assert all(f"`{name}`" in page("operations.md") for name, _, _ in refused)


def test_errors_table_is_true():
    documented = {
        code(row[1]): (code(row[0]), row[2], row[3], row[4])
        for row in table("operations.md", "Errors")
    }
    actual = {
        error.__name__: (
            error.code,
            str(problems.status_of(error)),
            str(exit_code(error)),
            "yes" if error.retryable else "no",
        )
        for error in error_classes()
    }
    assert documented == actual


def test_limits_table_is_true():
    documented = {
        code(row[0]): read_json(row[1], "value")
        for row in table("protocol.md", "Limits")
    }
    units = {"KIB", "MIB"}
    actual = {k: v for k, v in vars(limits).items() if k.isupper() and k not in units}
    assert documented == actual


def test_checks_are_documented():
    text = page("artifacts.md")
    steps = re.findall(r"^\d+\. (.*)$", text[text.index("## Verification") :], re.M)
    assert steps == [title for title, _ in CHECKS]
    documented = re.findall(r"^\| `(\w+)` \| \d[\d, ]* \|", text, re.MULTILINE)
    assert len(check_names()) >= 20
    assert sorted(documented) == sorted(check_names())


@pytest.mark.parametrize(
    ("name", "record"),
    [
        pytest.param(name, record, id=record.__name__)
        for name, listed in RECORDS.items()
        for record in listed
    ],
)
def test_record_is_documented_field_by_field(name, record):
    rows = table(name, f"`{record.__name__}`")
    documented = [code(row[0]) for row in rows]
    optional = [row[0].endswith("?") for row in rows]
    assert documented == [field.encode_name for field in _fields(record)]
    assert optional == [field.default is msgspec.UNSET for field in _fields(record)]


def test_grpo_table_is_true():
    rows = table("training.md", "`GrpoConfig`")
    documented = {code(row[0]): code(row[1]) for row in rows}
    default = msgspec.to_builtins(grpo.GrpoConfig())
    assert documented == {
        name: compact(value).decode() for name, value in default.items()
    }


def test_distillation_is_refused():
    """The one member of the configuration that only ever is null."""
    with pytest.raises(KilnError, match="opd"):
        _config('{"loss": {"opd": {}}}')


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("`train_receipt.json`", "receipt"),
        ("`adapter_manifest.json`", "write_evidence"),
    ],
)
def test_evidence_is_documented(heading, function):
    source = ast.parse((ROOT / "kiln_train_jax" / "receipt.py").read_text())
    body = next(
        node
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    document = max(
        (node for node in ast.walk(body) if isinstance(node, ast.Dict)),
        key=lambda node: len(node.keys),
    )
    written = [_text(key) for key in document.keys if key is not None]
    assert [code(row[0]) for row in table("training.md", heading)] == written


@pytest.mark.parametrize(
    "word",
    [
        *(state.value for state in session.SessionState),
        *(ending.value for ending in records.EpisodeTermination),
        *manifest.ErrorCode.__args__,
    ],
)
def test_protocol_page_names(word):
    assert f"`{word}`" in page("protocol.md")


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=str(t.relative_to(ROOT))) for t in TEXTS]
)
def test_links_resolve(text):
    source = re.sub(r"^```.*?^```", "", text.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", source):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (text.parent / path).resolve() if path else text
        assert target.exists(), f"{text.name} links to {link}"
        if anchor:
            assert anchor in _anchors(target), f"{text.name} links to {link}"


def test_readme_reaches_every_page():
    linked = {
        (ROOT / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\((docs[^)\s]*)\)", (ROOT / "README.md").read_text())
    }
    assert all(p in linked or p.parent in linked for p in PAGES)


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=str(t.relative_to(ROOT))) for t in PAGES]
)
def test_page_starts_with_a_command(text):
    first = re.search(r"^```(\w+)", text.read_text(), re.MULTILINE)
    assert first is not None
    assert first.group(1) == "console"


def test_no_page_names_a_machine_path():
    places = [
        (text.name, found.group())
        for text in TEXTS
        for found in re.finditer(
            r"(?<![\w.~-])/(home|root|tmp|usr|var|work|Users)/\S*", text.read_text()
        )
    ]
    assert not places


@pytest.mark.parametrize("words", console_lines())
def test_command_of_an_example_parses(words):
    program, *arguments = words
    if program == "kiln":
        _parse_kiln(arguments)
    elif program == "make":
        assert arguments[0] in _make_targets()
    elif program == "pip":
        _check_pip(arguments)
    elif program == "python":
        assert arguments[:2] == ["-m", "examples.environments"]
        assert isinstance(
            environments_parser().parse_args(arguments[2:]), argparse.Namespace
        )
    else:
        assert program in OTHER_PROGRAMS


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=str(t.relative_to(ROOT))) for t in TEXTS]
)
def test_json_examples_are_strict(text):
    for block in blocks(text.read_text(), "json"):
        value = read_json(block, text.name)
        if isinstance(value, dict) and "optimizer" in value:
            contract.read_training_config(value)


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=str(t.relative_to(ROOT))) for t in TEXTS]
)
def test_python_examples_use_the_public_api(text):
    for block in blocks(text.read_text(), "python"):
        tree = ast.parse(block)
        compile(tree, text.name, "exec")
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "kiln_core"
        }
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        }
        assert used <= set(getattr(kiln_core, "__all__", ()))
        assert all(hasattr(kiln_core, name) for name in used)


def test_demo_recipe_is_the_documented_one():
    source = ast.parse((ROOT / "examples" / "demo.py").read_text())
    recipe = next(
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TRAINING"
    )
    assert json.loads(blocks(page("training.md"), "json")[-1]) == recipe


def _fields(record: type) -> tuple[Any, ...]:
    return msgspec.structs.fields(record)


def _config(text: str) -> grpo.GrpoConfig:
    return contract.read_training_config(read_json(text, "an example"))


def _anchors(target: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def _parse_kiln(arguments: list[str]) -> None:
    context = click.Context(kiln, info_name="kiln", **CONTEXT)
    command: click.Command | None = kiln
    while isinstance(command, click.Group):
        name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None
        if not isinstance(command, click.Group):
            command.make_context(name, arguments, parent=context)
            return
        context = click.Context(command, parent=context, info_name=name)


def _make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in arguments[1:]:
        found = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", requirement)
        assert found is not None
        assert found.group(1) == project["name"]
        extras = set((found.group(2) or "").split(",")) - {""}
        assert extras <= set(project["optional-dependencies"])


def test_states_of_a_run_are_true():
    rows = table("operations.md", "Runs")
    told = {code(row[0]): set(re.findall("`(.*?)`", row[1])) for row in rows}
    ends = {run.RunState.FAILED, run.RunState.CANCELLED}
    assert told == {state: after - ends for state, after in lifecycle.EDGES.items()}
    stages = {code(row[0]): code(row[2]) for row in rows}
    assert stages == lifecycle.STAGES


def test_failures_of_a_run_are_true():
    words = {True: "yes", False: "no", None: "depends"}
    told = [(code(row[0]), row[1]) for row in table("operations.md", "Failures")]
    assert told == [(c, words[failure.RETRYABLE.get(c)]) for c in failure.FailureCode]
    row = next(r for r in table("operations.md", "Failures") if "depends" in r)
    assert set(map(int, re.findall(r"\d+", row[2]))) == failure.RETRYABLE_STATUSES


def test_bounds_of_runs_are_true():
    text = page("operations.md")
    bounds = admission.RunLimits()
    for name in ("max_active_runs", "max_tracked_runs"):
        assert re.search(rf"`{name}`\s+\({getattr(bounds, name)}\)", text)
    assert bounds.tracked_run_ttl_seconds == 7 * 24 * 3600
