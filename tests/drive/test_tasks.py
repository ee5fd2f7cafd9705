"""`kiln_core/drive/tasks.py`: task providers that are absent, old, odd or hostile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from kiln_core import limits
from kiln_core.drive.collect import collect
from kiln_core.drive.http import Credential, environment_client
from kiln_core.drive.tasks import TaskClient, task_catalog, task_catalogs
from kiln_core.errors import (
    CredentialReflected,
    HttpStatusError,
    KilnError,
    RemoteProtocolError,
    TaskApiUnsupported,
    TransportError,
    UsageError,
)
from kiln_core.tasks import TaskCatalog, task_selection
from tests.drive.collection import QUICK, adds, collection
from tests.drive.conftest import Real
from tests.simulators.environment import Document, Simulator, document, redirect
from tests.simulators.tasks import ROUTES, provided, rows

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="

CALLS: dict[str, Callable[[TaskClient], Awaitable[Any]]] = {
    "splits": lambda api: api.splits(),
    "num_tasks": lambda api: api.num_tasks("train"),
    "tasks": lambda api: api.tasks("train"),
    "task": lambda api: api.task("train", 7),
    "task_range": lambda api: api.task_range("train", 5, 8),
}


async def catalog(url: str, token: str | None = None, **selection: Any) -> TaskCatalog:
    with anyio.fail_after(5):
        async with environment_client(
            url, Credential(token) if token else None
        ) as client:
            return await task_catalog(client, task_selection(**selection))


async def call(url: str, route: str, token: str | None = None) -> Any:
    with anyio.fail_after(5):
        async with environment_client(
            url, Credential(token) if token else None
        ) as client:
            return await CALLS[route](TaskClient(client, "counter"))


async def failure(url: str, route: str, token: str | None = None) -> KilnError:
    with pytest.raises(KilnError) as caught:
        await call(url, route, token)
    error = caught.value
    assert error.hint
    assert (error.message + error.hint).isprintable()
    return error


# The five routes


async def test_every_route() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        found = {route: await call(server.url, route) for route in ROUTES}
    assert found == {
        "splits": provider.splits,
        "num_tasks": 120,
        "tasks": rows(120),
        "task": rows(8)[7],
        "task_range": rows(8)[5:],
    }
    assert provider.asked == [
        ("splits", {}),
        ("num_tasks", {"split": "train"}),
        ("task_range", {"split": "train", "start": 5, "stop": 8}),
        ("tasks", {"split": "train"}),
        ("task", {"split": "train", "index": 7}),
    ]
    posted = server.requests[1]
    assert posted.headers["Content-Type"] == "application/json"
    assert posted.headers["Accept-Encoding"] == "identity"


async def test_range_may_be_open() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        async with environment_client(server.url) as client:
            found = await TaskClient(client, "counter").task_range("train", 118)
    assert found == rows(120)[118:]
    assert provider.asked == [("task_range", {"split": "train", "start": 118})]


async def test_backward_bounds_are_refused_before_anything() -> None:
    async with Simulator().serving() as server:
        async with environment_client(server.url) as client:
            api = TaskClient(client, "counter")
            for wrong in (
                api.task("train", -1),
                api.task_range("train", -1),
                api.task_range("train", 2, 1),
            ):
                with pytest.raises(UsageError, match="must not be negative"):
                    await wrong
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("a/b c", "a%2Fb%20c"),
        ("hard/odd %", "hard%2Fodd%20%25"),
        ("?q#f", "%3Fq%23f"),
        ("ä+;", "%C3%A4%2B"),
        ("%2F%2e", "%252F%252e"),
        ("...", "..."),
    ],
)
async def test_name_travels_as_one_segment(name: str, segment: str) -> None:
    async with Simulator(base_path="/deep").serving() as server:
        async with environment_client(server.url) as client:
            for route, ask in CALLS.items():
                with pytest.raises(KilnError):
                    await ask(TaskClient(client, name))
                path = server.requests[-1].raw_path
                assert path.startswith(f"/deep/{segment}")
                assert path.count("/") == 3
                assert path.endswith(f"/{route}")


# What a server declines


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "answer",
    [
        document({"detail": "list_splits is not supported"}, 501),
        Document(b"<html>", 501),
        document({"detail": "Not Found"}, 404),
    ],
    ids=["501", "501 html", "old"],
)
async def test_absent_provider_is_told_apart(route: str, answer: Document) -> None:
    async with Simulator().serving() as server:
        provided(server, broken={route: answer})
        error = await failure(server.url, route)
    assert isinstance(error, TaskApiUnsupported)
    assert error.details["http_status"] == answer.status
    assert "nothing is wrong" in error.hint


HINTS = {
    400: "no row of that index",
    404: "does not know this environment",
    422: "of another version",
    500: "no such split",
    503: "log of the server",
    401: "check the credential",
    403: "check the credential",
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("status", HINTS)
async def test_status_has_the_hint_that_fits(route: str, status: int) -> None:
    hostile = document({"detail": "\x1b[2J secret detail"}, status)
    async with Simulator().serving() as server:
        provided(server, broken={route: hostile})
        error = await failure(server.url, route)
    assert isinstance(error, HttpStatusError)
    assert error.details["http_status"] == status
    assert error.details["environment"] == f"{server.url}/counter/{route}"
    assert HINTS[status] in error.hint
    assert "secret detail" not in str(error.document())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Not Found</html>",
        b'"Not Found"',
        b"[]",
        b'{"detail":["Not Found"]}',
        b'{"detail":"Not Found","detail":"Not Found"}',
        b'{"detail":"unknown environment \'counter\'"}',
    ],
)
async def test_other_404_is_an_unknown_environment(body: bytes) -> None:
    async with Simulator().serving() as server:
        provided(server, broken={"splits": Document(body, 404)})
        error = await failure(server.url, "splits")
    assert isinstance(error, HttpStatusError)


async def test_slash_in_a_name_is_not_called_unsupported() -> None:
    """FastAPI decodes %2F before it matches, so it has no such route for the name."""
    async with Simulator().serving() as server:
        server.documents["/list_environments"] = document(["a/b"])
        with pytest.raises(HttpStatusError) as caught:
            await catalog(server.url)
    assert "does not know this environment" in caught.value.hint
    assert caught.value.details["environment"] == f"{server.url}/a%2Fb/splits"


# What a server answers


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>hello</html>",
        b"{} {}",
        b'{"tasks":NaN}',
        b'{"tasks":[],"tasks":[]}',
        b'[{"name":"x","type":"y","name":"x"}]',
        b'{"num_tasks":1e999}',
        b'{"task":"\\ud800"}',
        b'"\xff"',
        b"\xef\xbb\xbf[]",
        b"[" * 200 + b"]" * 200,
        b"null",
        b"{}",
        b'"\\u001b[2J"',
        b'{"tasks":{},"num_tasks":"\\u001b","TASK":1}',
    ],
)
async def test_answer_of_another_shape(route: str, body: bytes) -> None:
    async with Simulator().serving() as server:
        provided(server, broken={route: Document(body)})
        error = await failure(server.url, route)
    assert isinstance(error, RemoteProtocolError)
    assert route in error.message


@pytest.mark.parametrize("route", ["tasks", "task_range"])
async def test_raw_collection_is_bounded(route: str) -> None:
    most = limits.MAX_TASK_COLLECTION
    async with Simulator().serving() as server:
        provider = provided(server)
        async with environment_client(server.url) as client:
            api = TaskClient(client, "counter")
            calls = {
                "tasks": lambda: api.tasks("train"),
                "task_range": lambda: api.task_range("train"),
            }
            provider.rows["train"] = [0] * most
            assert len(await calls[route]()) == most
            provider.rows["train"] = [0] * (most + 1)
            with pytest.raises(RemoteProtocolError, match="16385 rows"):
                await calls[route]()


@pytest.mark.parametrize("route", ROUTES)
async def test_oversized_answer_is_refused(route: str) -> None:
    async with Simulator().serving() as server:
        body = b'"' + b"x" * limits.MAX_DISCOVERY_BYTES + b'"'
        provided(server, broken={route: Document(body)})
        error = await failure(server.url, route)
    assert "more than 2097152 bytes" in error.message


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("status", [200, 404])
async def test_encoded_answer_is_refused(route: str, status: int) -> None:
    body = gzip.compress(b"[]")
    async with Simulator().serving() as server:
        answer = Document(body, status, {"Content-Encoding": "gzip"})
        provided(server, broken={route: answer})
        error = await failure(server.url, route)
    assert type(error) is TransportError
    assert "encoding" in error.message


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_refused(route: str, status: int) -> None:
    async with Simulator().serving() as target, Simulator().serving() as server:
        there = redirect(f"{target.url}/counter/{route}", status)
        provided(server, broken={route: there})
        error = await failure(server.url, route, TOKEN)
        assert target.requests == []
    assert error.details["http_status"] == status
    assert "redirects are not followed" in error.hint


async def test_slow_answer_ends_at_the_deadline() -> None:
    async with Simulator().serving() as server:
        provided(server, broken={"num_tasks": Document(b"{}", seconds=5)})
        async with environment_client(server.url, total_seconds=0.1) as client:
            with anyio.fail_after(2), pytest.raises(TransportError, match="timed out"):
                await TaskClient(client, "counter").num_tasks("train")


# Credentials


async def test_credential_goes_with_every_route() -> None:
    async with Simulator().serving() as server:
        provided(server)
        for route in ROUTES:
            await call(server.url, route, TOKEN)
    sent = {request.headers.get("Authorization") for request in server.requests}
    assert sent == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize(
    "shown",
    [TOKEN, TOKEN.replace("/", "\\/"), "".join(f"\\u{ord(c):04x}" for c in TOKEN)],
)
async def test_reflected_credential_is_refused(
    route: str, status: int, shown: str
) -> None:
    body = f'{{"detail":"you sent {shown}"}}'.encode()
    async with Simulator().serving() as server:
        provided(server, broken={route: Document(body, status)})
        error = await failure(server.url, route, TOKEN)
    assert isinstance(error, CredentialReflected)
    assert TOKEN not in str(error.document()) + repr(error)


# Catalogs


async def test_splits_alone() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        found = await catalog(server.url, start=5)
    assert found == TaskCatalog(
        environment_name="counter",
        task_api="available",
        splits=provider.splits,
        tasks=[],
    )
    assert provider.routes == ["splits"]


async def test_page_asks_for_its_rows_alone() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        found = await catalog(server.url, split="TRAIN", start=100, limit=25)
    assert found.selected_split == "train"
    assert (found.num_tasks, found.start, found.stop) == (120, 100, 120)
    assert found.tasks == rows(120)[100:]
    assert provider.routes == ["splits", "num_tasks", "task_range"]
    assert provider.asked[-1][1] == {"split": "train", "start": 100, "stop": 120}


async def test_split_is_asked_for_as_its_provider_spells_it() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        found = await catalog(
            server.url, split="hARD/oDD %", environment_name="COUNTER"
        )
    assert found.selected_split == "Hard/odd %"
    assert found.environment_name == "counter"
    assert {q["split"] for _, q in provider.asked[1:]} == {"Hard/odd %"}


@pytest.mark.parametrize("start", [120, 121, 2**63 - 1])
async def test_page_beyond_the_end_is_empty_without_a_call(start: int) -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        found = await catalog(server.url, split="train", start=start)
    assert (found.num_tasks, found.start, found.stop) == (120, start, 120)
    assert found.tasks == []
    assert provider.routes == ["splits", "num_tasks"]


async def test_provider_that_ignores_the_page_is_refused() -> None:
    """It would be the complete list, which is what a page must not fetch."""
    async with Simulator().serving() as server:
        provided(server, broken={"task_range": document({"tasks": rows(120)})})
        with pytest.raises(RemoteProtocolError, match="120 rows"):
            await catalog(server.url, split="train", limit=10)


async def test_provider_that_previews_is_shown_as_it_is() -> None:
    async with Simulator().serving() as server:
        provided(server, broken={"task_range": document({"tasks": [1]})})
        found = await catalog(server.url, split="train", limit=10)
    assert (found.stop, found.tasks) == (10, [1])


@pytest.mark.parametrize("split", [None, "train"])
async def test_unsupported_is_a_catalog(split: str | None) -> None:
    async with Simulator().serving() as server:
        found = await catalog(server.url, split=split)
    assert found == TaskCatalog(
        environment_name="counter", task_api="unsupported", splits=[], tasks=[]
    )


async def test_server_older_than_inventories_is_unsupported() -> None:
    async with Simulator().serving() as server:
        del server.documents["/list_environments"], server.documents["/openapi.json"]
        assert (await catalog(server.url)).task_api == "unsupported"


@pytest.mark.parametrize("route", ["num_tasks", "task_range"])
async def test_provider_of_splits_alone_is_unsupported(route: str) -> None:
    async with Simulator().serving() as server:
        provider = provided(server, broken={route: document({}, 501)})
        found = await catalog(server.url, split="train")
    assert (found.task_api, found.splits) == ("unsupported", provider.splits)
    assert (found.selected_split, found.tasks) == ("train", [])


async def test_unknown_names_are_usage() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        with pytest.raises(UsageError, match="it has 'counter'"):
            await catalog(server.url, environment_name="other")
        assert provider.asked == []
        with pytest.raises(UsageError, match="it has 'train', 'Hard/odd %'"):
            await catalog(server.url, split="other")
        server.documents["/list_environments"] = document(["counter", "other"])
        with pytest.raises(UsageError, match="advertises 2 environments"):
            await catalog(server.url)
        found = await catalog(server.url, environment_name="Counter")
    assert found.environment_name == "counter"


async def test_split_that_is_listed_and_raises_is_the_provider_s_fault() -> None:
    async with Simulator().serving() as server:
        provider = provided(server)
        del provider.rows["train"]
        with pytest.raises(HttpStatusError) as caught:
            await catalog(server.url, split="train")
    assert caught.value.details["http_status"] == 500
    assert "task provider raised" in caught.value.hint


async def test_several_environments_are_asked_at_once_and_keep_their_order() -> None:
    async with Simulator().serving() as one, Simulator().serving() as other:
        provided(one, broken={"splits": Document(b"[]", seconds=0.05)})
        async with (
            environment_client(one.url) as a,
            environment_client(other.url) as b,
        ):
            report = await task_catalogs([a, b], task_selection())
    assert report.schema == "kiln.openenv-task-catalog.v1"
    found = [(c.base_url, c.catalog.task_api) for c in report.catalogs]
    assert found == [(one.url, "available"), (other.url, "unsupported")]


async def test_one_failure_ends_all_as_a_single_error() -> None:
    async with Simulator().serving() as slow, Simulator().serving() as broken:
        provided(slow, broken={"splits": Document(b"[]", seconds=5)})
        provided(broken, broken={"splits": document({}, 500)})
        async with (
            environment_client(slow.url) as a,
            environment_client(broken.url) as b,
        ):
            with anyio.fail_after(2), pytest.raises(HttpStatusError):
                await task_catalogs([a, b], task_selection())


# A row goes nowhere


async def test_row_never_reaches_a_session_or_a_bundle() -> None:
    canary = "canary-4711"
    async with Simulator().serving() as server:
        secret = [{"id": canary, "prompt": f"say {canary}"} for _ in range(9)]
        splits = [{"name": "train", "type": "train", "about": canary}]
        provider = provided(server, splits=splits, rows={"train": secret})
        found = await catalog(server.url, split="train")
        assert canary in str(found.tasks)
        asked = len(provider.asked)
        request = collection(server.url, groups=2, template={"level": 2})
        bundle = await collect(request, adds(1, 3), times=QUICK)
    assert len(provider.asked) == asked
    for data in (bundle.dataset, bundle.replay, bundle.summary_bytes):
        assert data
        assert canary.encode() not in data
    frames = [text for peer in server.peers for text in peer.received]
    resets = [json.loads(text)["data"] for text in frames if '"reset"' in text]
    assert not [text for text in frames if canary in text]
    assert resets == [{"level": 2, "seed": seed} for seed in (0, 0, 1, 1)]


# The real server


async def test_real_provider(real: Real) -> None:
    found = await catalog(
        *(real.provider,), environment_name="COUNTER 100%", split="Train", start=118
    )
    assert found == TaskCatalog(
        environment_name="Counter 100%",
        task_api="available",
        splits=[
            {"name": "train", "type": "train"},
            {"level": 3, "name": "hard", "type": "curriculum"},
            {"name": "dev", "type": "validation"},
        ],
        selected_split="train",
        num_tasks=120,
        start=118,
        stop=120,
        tasks=[{"index": 118, "target": 4}, {"index": 119, "target": 4}],
    )


async def test_every_route_of_a_real_provider(real: Real) -> None:
    async with environment_client(real.provider) as client:
        api = TaskClient(client, "Counter 100%")
        assert await api.num_tasks("hard") == 3
        assert await api.tasks("hard") == ["only", 2, None]
        assert await api.task("hard", 1) == 2
        assert await api.task_range("hard", 1) == [2, None]
        assert await api.task_range("hard", 7, 9) == []


async def test_refusals_of_a_real_provider(real: Real) -> None:
    async with environment_client(real.provider) as client:
        api = TaskClient(client, "Counter 100%")
        statuses = {}
        for what, asked in {
            "index": api.task("hard", 3),
            "split": api.tasks("dev"),
            "name": TaskClient(client, "other").splits(),
            "slash": TaskClient(client, "a/b").splits(),
        }.items():
            with pytest.raises(HttpStatusError) as caught:
                await asked
            statuses[what] = caught.value.details["http_status"]
    assert statuses == {"index": 400, "split": 500, "name": 404, "slash": 404}


async def test_real_environment_without_a_provider(real: Real) -> None:
    found = await catalog(real.counter, split="train")
    assert (found.task_api, found.environment_name) == ("unsupported", "counter")
    await collect(collection(real.counter), adds(1, 3))


async def test_collecting_goes_on_beside_a_real_provider(real: Real) -> None:
    await catalog(real.provider, split="train")
    bundle = await collect(collection(real.provider), adds(1, 3))
    assert bundle.summary.stats.done_count == 2
