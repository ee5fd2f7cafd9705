"""Between two attempts of an episode: time for an environment to come back.

Every episode starts from ``reset``, so one that was lost can be played again in a fresh
session. A server that restarts needs seconds for it, and attempts that come faster than
that would all be spent on the same restart. So the next one waits until ``/health``
answers, with bounded backoff, and then says itself what is wrong if nothing came back.
"""

from __future__ import annotations

import anyio

from kiln_core.drive.http import EnvironmentClient
from kiln_core.errors import CredentialReflected, KilnError, TransportError

__all__ = ["is_lost", "recover"]

PAUSE_SECONDS = 0.25
"""Before the first look; doubles with every attempt and every look."""
PAUSE_MAX_SECONDS = 2.0


def is_lost(error: KilnError) -> bool:
    """Say whether an episode failed by transport, so that it may be played again."""
    return isinstance(error, TransportError) and not isinstance(
        error, CredentialReflected
    )


async def recover(client: EnvironmentClient, attempt: int, seconds: float) -> None:
    """Wait until an environment answers again, or not; never raises.

    Args:
        client: The environment.
        attempt: How many attempts have failed, at least 1.
        seconds: Bound of waiting for it to answer.
    """
    pause = min(PAUSE_SECONDS * 2 ** (attempt - 1), PAUSE_MAX_SECONDS)
    await anyio.sleep(pause)
    with anyio.move_on_after(seconds):
        while not await _is_up(client):
            await anyio.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_SECONDS)


async def _is_up(client: EnvironmentClient) -> bool:
    try:
        await client.health()
    except CredentialReflected:
        return True  # an answer; the next attempt ends with it
    except TransportError:
        return False
    return True
