"""Every cause of the Troubleshooting section is the hint of the error it belongs to."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec
import pytest

from kiln_core.advice import collection_advice
from kiln_core.drive.collect import collect
from kiln_core.drive.replay import require_no_drift
from kiln_core.errors import KilnError
from kiln_core.grpo import GrpoConfig
from kiln_core.scripted import ScriptedPolicy
from kiln_core.selection import selector_for
from tests.drive.collection import QUICK, adds, collection, verified
from tests.drive.test_replay import again, capture
from tests.simulators.environment import (
    Document,
    Peer,
    Simulator,
    observation,
    plain,
    redirect,
    refuses,
)

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="
NOT_JSON = ScriptedPolicy([["no json"]])
BAD_SHAPE = ScriptedPolicy([['{"amount": 9}']])


async def hint_of(server: Simulator, token: str | None = None) -> str:
    """Return the class and hint of the error in which a collection ends."""
    request = collection(server.url, token=token, capacity_wait_seconds=1)
    with anyio.fail_after(10), pytest.raises(KilnError) as caught:
        await collect(request, adds(1, 3), times=QUICK)
    return f"{type(caught.value).__name__}: {caught.value.hint}"


async def advice_of(server: Simulator, policy: ScriptedPolicy, **controls: int) -> str:
    """Return the warnings about a collection that did end well."""
    request = collection(server.url, **controls)
    bundle = await collect(request, policy, times=QUICK)
    verified(bundle)
    return "\n".join(collection_advice(bundle.summary))


async def full(server: Simulator) -> str:
    server.max_sessions = 0
    return await hint_of(server)


async def spent_errors(server: Simulator) -> str:
    server.script = {"step": refuses("EXECUTION_ERROR", close=False)}
    return await advice_of(server, adds(1), max_recoverable_errors=0)


async def terminal_code(server: Simulator) -> str:
    server.script = {"step": refuses("SESSION_ERROR")}
    return await advice_of(server, adds(1))


async def replay_drift(server: Simulator) -> str:
    bundle = await capture(collection(server.url))
    server.script = {"reset": lambda peer, _: peer.send(observation({"total": 9}))}
    with pytest.raises(KilnError) as caught:
        require_no_drift(await again(bundle))
    return f"{type(caught.value).__name__}: {caught.value.hint}"


async def identity_drift(server: Simulator) -> str:
    async def redeploy(peer: Peer, answer: str) -> None:
        server.change("/openapi.json", **{"x-build": peer.index})
        await plain(peer, answer)

    server.script = {"step 2": redeploy}
    return await hint_of(server)


async def unauthenticated(server: Simulator) -> str:
    server.documents["/metadata"] = Document(b"", 401)
    return await hint_of(server, TOKEN)


def refused_upgrade(status: int) -> Callable[[Simulator], object]:
    async def refuse(server: Simulator) -> str:
        server.documents["/ws"] = Document(b"", status)
        return await hint_of(server, TOKEN)

    return refuse


async def different_prompts(server: Simulator) -> str:
    server.script = {
        "reset": lambda peer, _: peer.send(observation({"total": peer.index}))
    }
    return await hint_of(server)


async def not_json(server: Simulator) -> str:
    return await advice_of(server, NOT_JSON)


async def bad_shape(server: Simulator) -> str:
    return await advice_of(server, BAD_SHAPE)


async def no_variance(server: Simulator) -> str:
    return await advice_of(server, adds(1, 3))


async def no_variance_in_training(server: Simulator) -> str:
    selector = selector_for(msgspec.convert({}, GrpoConfig))
    return "\n".join(selector.record().warnings or [])


async def redirected(server: Simulator) -> str:
    server.documents["/health"] = redirect("https://elsewhere.example/health")
    return await hint_of(server)


async def redirected_upgrade(server: Simulator) -> str:
    server.documents["/ws"] = redirect("https://elsewhere.example/ws")
    return await hint_of(server)


CREDENTIAL = (
    *("HttpStatusError", "scheme, host and port", "environment variable"),
    *("set and not empty", "--credential-env given per environment", "replay"),
    *("one", "https"),
)
INVALID = (
    *("invalid_model_action", "INVALID_MODEL_ACTION", "not one JSON object"),
    *("ACTION_SCHEMA_VALIDATION_FAILED", "--max-action-tokens", "kiln train sft"),
    "--thinking false",
)
VARIANCE = ("no variance", "harder tasks", "sampling", "reward", "kiln train sft")
REDIRECT = ("HttpStatusError", "not followed", "canonical base URL directly")

CAUSES: dict[str, tuple[Callable[[Simulator], object], tuple[str, ...]]] = {
    "capacity": (
        full,
        (
            *("CapacityExhausted", "another client or a long candidate"),
            *("lower --concurrency", "--capacity-wait-seconds", "session limit"),
        ),
    ),
    "recoverable error": (
        spent_errors,
        ("EXECUTION_ERROR 2", "--max-recoverable-errors", "trajectory", "counters"),
    ),
    "terminal code": (
        terminal_code,
        ("SESSION_ERROR 2", "the code was terminal", "trajectory", "counters"),
    ),
    "replay drift": (
        replay_drift,
        (
            *("ReplayDrift", "same environment build", "task data", "reset semantics"),
            *("captured URL", "same schemas do not mean the same behaviour"),
        ),
    ),
    "identity drift": (
        identity_drift,
        (
            *("IdentityDrift", "pin or stabilise", "inspect it again", "new run"),
            *("new idempotency key", "nothing of this attempt is published"),
        ),
    ),
    "401": (unauthenticated, CREDENTIAL),
    "401 upgrade": (refused_upgrade(401), CREDENTIAL),
    "403 upgrade": (refused_upgrade(403), (*CREDENTIAL, "WebSocket path")),
    "different prompts": (
        different_prompts,
        ("EpisodeUnfit", "deterministic for the reset seed", "relative advantages"),
    ),
    "no json": (not_json, INVALID),
    "bad shape": (bad_shape, INVALID),
    "no variance": (no_variance, VARIANCE),
    "no variance in training": (no_variance_in_training, VARIANCE),
    "redirect": (redirected, REDIRECT),
    "redirected upgrade": (redirected_upgrade, REDIRECT),
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_cause_is_told_with_its_remedy(cause: str) -> None:
    provoke, phrases = CAUSES[cause]
    async with Simulator().serving() as server:
        told = await provoke(server)  # type: ignore[misc]  # a coroutine function
    assert [phrase for phrase in phrases if phrase not in told] == [], told
