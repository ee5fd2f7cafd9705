"""What the routes share: settings, engine, queue, metrics, clock."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request

from kiln_core.engine import Engine
from kiln_core.errors import CapacityFull, Conflict, KilnError
from kiln_server.jobs import TrainingQueueService
from kiln_server.metrics import Metrics
from kiln_server.settings import ServerSettings

__all__ = ["GRACEFUL_SECONDS", "ServerState", "state_of"]

GRACEFUL_SECONDS = 5.0
"""How long requests may go on once the server was told to stop."""
ANSWER_SECONDS = 3.0
"""How long completions may: less, so that their clients still get an answer."""


class ServerState:
    """The state of one server.

    Args:
        settings: How it runs.
        engine: Samples and trains; need not be ready yet.
    """

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.jobs = TrainingQueueService(
            engine,
            self.metrics,
            max_queued=settings.max_queued_jobs,
            max_tracked=settings.max_tracked_jobs,
        )
        self.started = time.monotonic()
        self.failure: str | None = None
        """Why the engine could not start."""
        self.was_ready = False
        """Whether it was started before the server was told to stop."""
        self.failed = asyncio.Event()
        """Set when it could not."""
        self.ending = asyncio.Event()
        """Set when the application ends, after its last connection."""
        self._stopped: float | None = None

    @property
    def serves(self) -> bool:
        """Whether this profile answers inference requests."""
        return self.settings.serving_profile != "maintenance"

    @property
    def trains(self) -> bool:
        """Whether this profile accepts training jobs."""
        return self.settings.serving_profile != "stable"

    @property
    def phase(self) -> str:
        """``starting``, ``ready``, ``stopping`` or ``failed``."""
        if self.failure is not None:
            return "failed"
        if self._stopped is not None:
            return "stopping"
        return "ready" if self.engine.ready else "starting"

    def stop_serving(self) -> None:
        """Note that the server was told to stop."""
        self._stopped = time.monotonic()

    def require_time(self) -> None:
        """Refuse to wait on once the server is stopping.

        Raises:
            CapacityFull: Completions have had their time.
        """
        stopped = self._stopped
        if stopped is not None and time.monotonic() - stopped > ANSWER_SECONDS:
            raise CapacityFull("the server is stopping")

    def require_ready(self) -> None:
        """Refuse while the engine compiles.

        Raises:
            CapacityFull: It is not ready yet.
            KilnError: It could not be started.
        """
        if self.failure is not None:
            raise KilnError(
                f"the engine cannot start: {self.failure}",
                hint="stop the server and look at its log",
            )
        if not self.engine.ready:
            raise CapacityFull(
                "the model is still loading", hint="wait until /health says ready"
            )

    def require_serving(self) -> None:
        """Refuse inference in a profile without it.

        Raises:
            CapacityFull: The engine is not ready yet.
            Conflict: The profile only trains.
        """
        self.require_ready()
        if not self.serves:
            raise Conflict(
                "this server runs in profile maintenance: no inference",
                hint="serve with --serving-profile experimental",
            )

    def require_training(self) -> None:
        """Refuse training in a profile without it.

        Raises:
            CapacityFull: The engine is not ready yet.
            Conflict: The profile only serves.
        """
        self.require_ready()
        if not self.trains:
            raise Conflict(
                "this server runs in profile stable: training is rejected",
                hint="serve with --serving-profile experimental",
            )


def state_of(request: Request) -> ServerState:
    """Return the state of the server that answers a request."""
    state: ServerState = request.app.state.kiln
    return state
