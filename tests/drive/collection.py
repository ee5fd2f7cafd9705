"""What the tests of the edge share: requests, policies, a verified bundle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from kiln_core.bundle import Bundle
from kiln_core.drive.collect import CollectionRequest, EnvironmentTarget
from kiln_core.drive.http import Credential
from kiln_core.drive.websocket import SessionTimes
from kiln_core.plan import CollectionControls
from kiln_core.ports import PolicyReply, PolicyRequest
from kiln_core.scripted import ScriptedPolicy
from kiln_core.verify import BundleBytes, VerifiedBundle, verify_bundle

QUICK = SessionTimes(exchange_seconds=1.0, recovery_seconds=0.3)
"""Deadlines for tests in which nothing is slow on purpose."""


def collection(
    *urls: str,
    template: dict[str, Any] | None = None,
    token: str | None = None,
    guided: bool = False,
    **controls: Any,
) -> CollectionRequest:
    """Return a small request: one group of two, three steps, thinking off."""
    chosen = {
        "groups": max(1, len(urls)),
        "group_size": 2,
        "max_steps": 3,
        "concurrency": 4,
        "thinking": False,
        "capacity_wait_seconds": 5,
        **controls,
    }
    return CollectionRequest(
        environments=tuple(
            EnvironmentTarget(
                base_url=url, credential=Credential(token) if token else None
            )
            for url in urls
        ),
        controls=CollectionControls(**chosen),
        reset_templates=tuple(template or {} for _ in urls),
        guided=guided,
    )


def adds(*amounts: int) -> ScriptedPolicy:
    """Return a policy that adds these amounts, one a turn."""
    return ScriptedPolicy([[f'{{"amount": {amount}}}'] for amount in amounts])


class SlowPolicy(ScriptedPolicy):
    """Does something before every answer."""

    def __init__(
        self, before: Callable[[PolicyRequest], Awaitable[None]], *amounts: int
    ) -> None:
        super().__init__(adds(*amounts).turns)
        self.before = before
        self.asked = 0

    async def complete(self, request: PolicyRequest) -> PolicyReply:
        self.asked += 1
        await self.before(request)
        return await super().complete(request)


def thinks(seconds: float, *amounts: int) -> SlowPolicy:
    """Return a policy that takes its time."""

    async def sleep(request: PolicyRequest) -> None:
        await anyio.sleep(seconds)

    return SlowPolicy(sleep, *amounts)


def files(bundle: Bundle) -> BundleBytes:
    return BundleBytes(
        summary=bundle.summary_bytes, dataset=bundle.dataset, replay=bundle.replay
    )


def verified(bundle: Bundle) -> VerifiedBundle:
    """Check every claim of a bundle offline and return it."""
    return verify_bundle(files(bundle))


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.warnings: list[str] = []
        self.rollouts = 0

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        self.rollouts = completed

    def warning(self, text: str) -> None:
        self.warnings.append(text)
