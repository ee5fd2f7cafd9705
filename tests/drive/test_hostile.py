"""A hostile server, moment by moment: the exact failure, and never a file or a row.

Every row is a whole collection that would publish its bundle if it could. What is wrong
with a single frame or document is told finer in ``test_websocket.py`` and
``test_discovery_http.py``; here it must end the collection with the right class, within
its deadlines, leaving no session, no file and no part of a hostile text in the error.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from kiln_core import limits
from kiln_core.bundle import BundlePaths
from kiln_core.drive import recover as recovering
from kiln_core.drive.collect import collect
from kiln_core.drive.files import publish_bundle
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import (
    CapacityExhausted,
    CredentialReflected,
    EpisodeUnfit,
    HttpStatusError,
    IdentityDrift,
    InvalidActionSchema,
    KilnError,
    RemoteProtocolError,
    SessionLost,
    SessionRefused,
    TransportError,
)
from kiln_core.limits import RetainedBudget
from tests.drive.collection import Notes, SlowPolicy, adds, collection, thinks, verified
from tests.simulators.environment import (
    SCHEMA,
    Document,
    Handler,
    Peer,
    Script,
    Simulator,
    both,
    closes,
    document,
    drop,
    error,
    late,
    observation,
    plain,
    raw_observation,
    raw_server,
    redirect,
    refuses,
    says,
    silent,
    state,
)

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="
TIMES = SessionTimes(0.4, http_seconds=0.6, recovery_seconds=0.1)
LIMIT = limits.MAX_SERVER_MESSAGE_BYTES


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "PAUSE_SECONDS", 0.01)


class Row(NamedTuple):
    """One misbehaviour and the failure it must end in."""

    prepare: Callable[[Simulator], object]
    expected: type[KilnError]
    phrase: str
    token: str | None = None


def scripted(script: Script) -> Callable[[Simulator], object]:
    return lambda server: setattr(server, "script", script)


def at(moment: str, handler: Handler, phrase: str, expected: type[KilnError]) -> Row:
    return Row(scripted({moment: handler}), expected, phrase)


def broken(moment: str, handler: Handler, phrase: str) -> Row:
    return at(moment, handler, phrase, RemoteProtocolError)


def lost(moment: str, handler: Handler, phrase: str) -> Row:
    return at(moment, handler, phrase, SessionLost)


def serves(route: str, answer: Document, expected: type[KilnError], phrase: str) -> Row:
    return Row(
        lambda server: server.documents.__setitem__(route, answer), expected, phrase
    )


def reflects(prepare: Callable[[Simulator], object]) -> Row:
    return Row(prepare, CredentialReflected, "the bearer token it was sent", TOKEN)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in text)


# What a frame may be


async def binary(peer: Peer, answer: str) -> None:
    await peer.send_binary(answer.encode())


async def bomb(peer: Peer, answer: str) -> None:
    """An observation of 20 MB in some 20 kB, as real servers have sent."""
    packer = zlib.compressobj(wbits=-15)
    text = observation("x" * 20_000_000).encode()
    peer.write_compressed(packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)[:-4])


async def fragment_flood(peer: Peer, answer: str) -> None:
    peer.write(b"\x01\x01{")
    await peer.flood(b"\x00\x7d" + b"x" * 125, LIMIT // 12_500 + 2)


async def empty_fragments(peer: Peer, answer: str) -> None:
    peer.write(b"\x01\x01{")
    await peer.flood(b"\x00\x00", 100_000)


async def slow_frame(peer: Peer, answer: str) -> None:
    body = answer.encode()
    await peer.write_slowly(b"\x81" + bytes([len(body)]) + body, 0.02)


async def ping_flood(peer: Peer, answer: str) -> None:
    await peer.flood(b"\x89\x00", 100_000)


async def pong_flood(peer: Peer, answer: str) -> None:
    await peer.flood(b"\x8a\x00", 100_000)


async def oversized_ping(peer: Peer, answer: str) -> None:
    peer.write(b"\x89\x7e\x00\xff" + b"x" * 255)


async def different(peer: Peer, answer: str) -> None:
    await peer.send(observation({"total": 0, "draw": peer.index}))


async def reason_with_token(peer: Peer, answer: str) -> None:
    await peer.close(1011, f"Bearer {TOKEN}")


def reflecting(text: str) -> Handler:
    return says(observation("@").replace("@", text))


# What may change while it is collected


def redeploys(change: Callable[[Simulator], object]) -> Callable[[Simulator], object]:
    def prepare(server: Simulator) -> None:
        async def during(peer: Peer, answer: str) -> None:
            change(server)
            await plain(peer, answer)

        server.script = {"step 2": during}

    return prepare


def drift(change: Callable[[Simulator], object], changed: str) -> Row:
    return Row(redeploys(change), IdentityDrift, f"{changed} changed")


HUGE_HEADERS = {f"X-{i}": "y" for i in range(5_000)}
INVALID = "is not what OpenEnv prescribes"
SCHEMAS: dict[str, object] = {
    "remote reference": {"$ref": "http://127.0.0.1:9/x.json"},
    "file reference": {"$ref": "file:///etc/passwd"},
    "self reference": {"$ref": "#"},
    "slow pattern": {"properties": {"x": {"pattern": r"(a+)\1"}}},
    "deep": json.loads('{"not":' * 100 + "{}" + "}" * 100),
    "large": {"description": "x" * 300_000},
    "list": [],
}

ROWS: dict[str, Row] = {
    # frames
    "binary": broken("step", binary, "a binary frame"),
    "compressed": broken("step", bomb, "over 524288 bytes|breaks RFC 6455"),
    "oversized": broken("step", says(observation("x" * LIMIT)), "over 524288 bytes"),
    "fragment flood": broken("step", fragment_flood, "over 524288 bytes"),
    "oversized ping": broken("step", oversized_ping, "breaks RFC 6455"),
    "wrong type": broken("step", says(state({})), "a state frame while awaiting_step"),
    "state while resetting": broken("reset", says(state({})), "a state frame"),
    "unsolicited": broken("step", both(plain, plain), "nobody asked for"),
    "greeting": broken("open", says(observation(1)), "observation frame while fresh"),
    "truncated": broken("step", says(observation(1)[:-3]), "invalid frame"),
    "NaN": broken("step", says(raw_observation("NaN")), "invalid frame"),
    "1e400": broken("step", says(raw_observation("1e400")), "invalid frame"),
    "string reward": broken("step", says(raw_observation('"1"')), "invalid frame"),
    "duplicate keys": broken("step", says(raw_observation('1,"reward":2')), "invalid"),
    "lone surrogate": broken(
        "step", says(raw_observation("1", inner='"\\ud800"')), "invalid frame"
    ),
    "unknown code": broken("step", says(error("NO_SUCH")), "invalid frame"),
    "unknown member": broken("step", says(raw_observation('1,"info":{}')), "invalid"),
    "state refused": broken("state", refuses("EXECUTION_ERROR"), "answered state with"),
    # sessions
    "late": lost("step 1", late(0.8), "no answer in 0.4 s"),
    "silent": lost("reset", silent, "no answer in 0.4 s"),
    "slow frame": lost("step", slow_frame, "no answer in 0.4 s"),
    "ping flood": lost("step", ping_flood, "no answer in 0.4 s"),
    "pong flood": lost("step", pong_flood, "no answer in 0.4 s"),
    "empty fragments": lost("step", empty_fragments, "no answer in 0.4 s"),
    "reset by peer": lost("step", drop, "closed the session"),
    "close 1011": lost("step", closes(1011), "code 1011"),
    "close 1012": lost("step", closes(1012), "code 1012"),
    "close 1013 in an episode": lost("step", closes(1013), "code 1013"),
    "factory": at("open", refuses("FACTORY_ERROR"), "FACTORY_ERROR", SessionRefused),
    "reset refused": at(
        "reset", refuses("EXECUTION_ERROR"), "answered reset with", SessionRefused
    ),
    # episodes
    "done at reset": at(
        "reset", says(observation(1, done=True)), "done at reset", EpisodeUnfit
    ),
    "nondeterministic reset": at(
        "reset", different, "different reset observations for seed 0", EpisodeUnfit
    ),
    "overflowing return": at(
        "step", says(raw_observation("1e308")), "no finite return", EpisodeUnfit
    ),
    # capacity
    "always full": Row(
        lambda server: setattr(server, "max_sessions", 0),
        CapacityExhausted,
        "no free session within 1 s",
    ),
    "full after every reset": at(
        "reset", refuses("CAPACITY_REACHED"), "no free session", CapacityExhausted
    ),
    "closes 1013 at every reset": at(
        "reset", closes(1013), "no free session", CapacityExhausted
    ),
    "503 at the upgrade": serves(
        "/ws", Document(b"", 503), CapacityExhausted, "no free session"
    ),
    # HTTP
    "redirect": serves(
        "/schema", redirect("http://127.0.0.1:9/"), HttpStatusError, "status 307"
    ),
    "redirected health": serves(
        "/health", redirect("/elsewhere", 301), HttpStatusError, "status 301"
    ),
    "redirected upgrade": serves(
        "/ws", redirect("http://127.0.0.1:9/ws"), HttpStatusError, "status 307"
    ),
    "upgrade is a page": serves("/ws", document({}), HttpStatusError, "no WebSocket"),
    "gzip": serves(
        "/metadata",
        Document(gzip.compress(b"{}"), 200, {"Content-Encoding": "gzip"}),
        TransportError,
        "an encoding nobody asked for",
    ),
    "huge document": serves(
        "/openapi.json",
        Document(b'"' + b"x" * limits.MAX_DISCOVERY_BYTES + b'"'),
        TransportError,
        "more than 2097152 bytes",
    ),
    "many headers": serves(
        "/schema", Document(b"{}", 200, HUGE_HEADERS), TransportError, "not HTTP"
    ),
    "many headers at the upgrade": Row(
        lambda server: server.upgrade_headers.update(HUGE_HEADERS),  # type: ignore[attr-defined]  # a dict
        TransportError,
        "not HTTP",
    ),
    "slow document": serves(
        "/schema", Document(b"{}", seconds=5), TransportError, "timed out"
    ),
    "NaN in discovery": serves(
        "/openapi.json", Document(b'{"x":NaN}'), RemoteProtocolError, "openapi.json"
    ),
    "duplicate keys in discovery": serves(
        "/metadata",
        Document(b'{"name":"a","name":"b"}'),
        RemoteProtocolError,
        "duplicate key",
    ),
    "control characters in a name": serves(
        "/metadata",
        document({"name": "a\x1b[31m", "description": ""}),
        RemoteProtocolError,
        INVALID,
    ),
    # drift in each surface
    "metadata drifts": drift(
        lambda server: server.change("/metadata", author="x"),
        "identity.discovery_sha256",
    ),
    "schema drifts": drift(
        lambda server: server.change("/schema", action={}), "schema.action"
    ),
    "observation schema drifts": drift(
        lambda server: server.change("/schema", observation={}), "schema.observation"
    ),
    "openapi drifts": drift(
        lambda server: server.change("/openapi.json", x=1), "identity.discovery_sha256"
    ),
    "openapi version drifts": drift(
        lambda server: server.change("/openapi.json", info={"version": "9"}),
        "identity.openapi_version, identity.discovery_sha256",
    ),
    "openapi vanishes": drift(
        lambda server: server.documents.pop("/openapi.json", None),
        "identity.openapi_version, identity.discovery_sha256",
    ),
    "inventory drifts": drift(
        lambda server: server.documents.update(
            {"/list_environments": document(["counter", "more"])}
        ),
        "identity.environments, identity.discovery_sha256",
    ),
    "health fails at the end": Row(
        redeploys(
            lambda server: server.documents.update({"/health": document({}, 500)})
        ),
        HttpStatusError,
        "status 500",
    ),
    # reflection
    "token in a frame": reflects(scripted({"step": reflecting(TOKEN)})),
    "token in escapes": reflects(scripted({"step": reflecting(escaped(TOKEN))})),
    "token with an escaped solidus": reflects(
        scripted({"state": says(state("@").replace("@", TOKEN.replace("/", "\\/")))})
    ),
    "token as a key": reflects(scripted({"step": says(observation({TOKEN: 1}))})),
    "token in an error": reflects(
        scripted({"step": says(error("EXECUTION_ERROR", TOKEN))})
    ),
    "token unparsable": reflects(scripted({"reset": says("{" + TOKEN)})),
    "token in health": reflects(
        lambda server: server.documents.update({"/health": document({"x": TOKEN})})
    ),
    "token in a schema": reflects(
        lambda server: server.change("/schema", **{"x-echo": [TOKEN]})
    ),
    "token in a close reason": Row(
        scripted({"step": reason_with_token}), SessionLost, "code 1011", TOKEN
    ),
    "token in a redirect": Row(
        lambda server: server.documents.update(
            {"/schema": redirect(f"http://127.0.0.1:9/?t={TOKEN}")}
        ),
        HttpStatusError,
        "status 307",
        TOKEN,
    ),
    "token in an error page": Row(
        lambda server: server.documents.update(
            {"/schema": Document(TOKEN.encode(), 500)}
        ),
        HttpStatusError,
        "status 500",
        TOKEN,
    ),
    # action schemas
    **{
        f"schema: {name}": serves(
            "/schema",
            document({**SCHEMA, "action": schema}),
            InvalidActionSchema,
            "action schema",
        )
        for name, schema in SCHEMAS.items()
    },
}


async def published(server: Simulator, folder: Path, token: str | None) -> None:
    """Collect and publish; a small budget, since no row may cost much."""
    request = collection(
        server.url, token=token, capacity_wait_seconds=1, episode_retries=1
    )
    with anyio.fail_after(8):
        bundle = await collect(
            request, adds(1, 3), times=TIMES, budget=RetainedBudget(2 * LIMIT)
        )
    paths = BundlePaths(dataset=folder / "d", replay=folder / "r", summary=folder / "s")
    publish_bundle(bundle, paths)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ROWS)
async def test_misbehaviour_ends_in_its_error_and_publishes_nothing(
    name: str, tmp_path: Path
) -> None:
    row = ROWS[name]
    async with Simulator(upgrade_headers={}).serving() as server:
        row.prepare(server)
        with pytest.raises(KilnError, match=row.phrase) as caught:
            await published(server, tmp_path, row.token)
        assert await server.all_ended()
    assert type(caught.value) is row.expected
    assert caught.value.hint
    assert files_in(tmp_path) == []
    told = str(caught.value.document())
    assert TOKEN not in told
    assert "\x1b" not in told


async def test_table_would_notice_a_server_that_is_fine(tmp_path: Path) -> None:
    async with Simulator().serving() as server:
        await published(server, tmp_path, TOKEN)
    assert files_in(tmp_path) == ["d", "r", "s"]


# What a server may do without any harm


async def fragmented(peer: Peer, answer: str) -> None:
    """Send the answer in three frames, a ping between them (RFC 6455 5.4)."""
    body = answer.encode()
    cuts = (body[:10], body[10:20], body[20:])
    for index, part in enumerate(cuts):
        first, last = index == 0, index == len(cuts) - 1
        peer.write(bytes([(0x80 * last) | first]) + bytes([len(part)]) + part)
        if not last:
            peer.write(b"\x89\x02hi")


async def pings_and_answers(peer: Peer, answer: str) -> None:
    await peer.flood(b"\x89\x00", 20)
    await plain(peer, answer)


async def html(peer: Peer, answer: str) -> None:
    frame = json.loads(answer)
    frame["data"]["observation"]["note"] = "<script>alert(1)</script>\x1b[2J\u202e"
    await peer.send(json.JSONEncoder().encode(frame))


HARMLESS: dict[str, Script] = {
    "fragments": {"step": fragmented},
    "pings before every answer": {
        "step": pings_and_answers,
        "reset": pings_and_answers,
    },
    "html and terminal codes": {"step": html},
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_odd_but_legal_server_is_collected_from(name: str) -> None:
    async with Simulator(HARMLESS[name]).serving() as server:
        with anyio.fail_after(8):
            bundle = await collect(collection(server.url), adds(1, 3), times=TIMES)
    assert verified(bundle).summary.stats.done_count == 2


async def test_ping_flood_while_the_policy_thinks_does_no_harm() -> None:
    async def flooding(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        await peer.flood(b"\x89\x00", 30)

    async with Simulator({"reset": flooding}).serving() as server:
        with anyio.fail_after(8):
            bundle = await collect(
                collection(server.url), thinks(0.1, 1, 3), times=SessionTimes(2.0)
            )
    assert bundle.summary.stats.done_count == 2


async def test_compression_that_was_not_offered_is_not_negotiated() -> None:
    """A server that answers with an extension nobody offered; RSV1 then breaks."""
    extensions = {"Sec-WebSocket-Extensions": "permessage-deflate"}
    async with Simulator(
        {"step": bomb}, upgrade_headers=extensions
    ).serving() as server:
        with pytest.raises(RemoteProtocolError), anyio.fail_after(8):
            await collect(collection(server.url), adds(1, 3), times=TIMES)
        upgrades = [r for r in server.requests if r.path == "/ws"]
        assert all("Sec-WebSocket-Extensions" not in r.headers for r in upgrades)


async def test_interim_answers_without_end_are_given_up_in_time() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000
    async with raw_server(interim) as url:
        with pytest.raises(TransportError), anyio.fail_after(5):
            await collect(collection(url), adds(1), times=TIMES)


async def test_capacity_storm_loses_no_candidate() -> None:
    """Room comes and goes, and is denied in every way there is."""
    ways: tuple[Handler, ...] = (
        refuses("CAPACITY_REACHED"),
        closes(1013),
    )

    def script(session: int) -> Script:
        if session % 3 == 2:
            return {}
        return {("open", "reset")[session % 2]: ways[session // 2 % 2]}

    async with Simulator(script).serving() as server:
        notes = Notes()
        with anyio.fail_after(20):
            bundle = await collect(
                collection(server.url, group_size=4),
                adds(1, 3),
                observer=notes,
                times=TIMES,
            )
        assert await server.all_ended()
        refused = sum(peer.commands != COMPLETE for peer in server.peers)
    assert (bundle.summary.rollout_count, notes.warnings) == (4, [])
    assert bundle.summary.stats.capacity_retry_count == refused > 0
    assert verified(bundle).retried_rollouts == 0


COMPLETE = ["reset", "step", "step", "state", "close"]


async def test_hostile_candidate_does_not_taint_the_others() -> None:
    """A frame nobody asked for fails the whole: no group is ever shrunk."""

    async def wait(request: object) -> None:
        await asyncio.sleep(0.01)

    script = {"step 1": both(plain, says(observation(7, 100)))}
    async with Simulator(lambda n: script if n == 3 else {}).serving() as server:
        request = collection(server.url, groups=2, group_size=4, concurrency=8)
        with pytest.raises(RemoteProtocolError) as caught, anyio.fail_after(8):
            await collect(request, SlowPolicy(wait, 1, 3), times=TIMES)
        assert await server.all_ended()
    assert {
        "group_index",
        "candidate_index",
        "environment",
    } <= caught.value.details.keys()
