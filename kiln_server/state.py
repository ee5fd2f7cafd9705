"""What the routes share: settings, engine, queue, metrics, clock."""

from __future__ import annotations

import time

from starlette.requests import Request

from kiln_core.engine import Engine
from kiln_core.errors import CapacityFull, Conflict
from kiln_server.jobs import TrainingQueueService
from kiln_server.metrics import Metrics
from kiln_server.settings import ServerSettings

__all__ = ["ServerState", "state_of"]


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

    @property
    def serves(self) -> bool:
        """Whether this profile answers inference requests."""
        return self.settings.serving_profile != "maintenance"

    @property
    def trains(self) -> bool:
        """Whether this profile accepts training jobs."""
        return self.settings.serving_profile != "stable"

    def require_ready(self) -> None:
        """Refuse while the engine compiles.

        Raises:
            CapacityFull: It is not ready yet.
        """
        if not self.engine.ready:
            raise CapacityFull(
                self.failure or "the model is still loading",
                hint="wait until /health says ready",
            )

    def require_serving(self) -> None:
        """Refuse inference in a profile without it.

        Raises:
            CapacityFull: The engine is not ready yet.
            Conflict: The profile only trains.
        """
        self.require_ready()
        if not self.serves:
            raise Conflict("this server runs in profile maintenance: no inference")

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
