"""A Kiln server over a simulated engine: in a thread here, or a real ``kiln serve``.

Both are the production path: the socket of ``kiln_server.serve``, Hypercorn, the
application. In a thread, tests can hold the engine at a moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kiln_core.engine import EngineSettings
from kiln_server.serve import listen, serve
from kiln_server.settings import ServerSettings
from kiln_server.state import ServerState
from tests.simulators.engine import ENTRY_POINT, SimulatedEngine, entry_point

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
"""Nothing a test waits for takes longer."""


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The one sentence of an error."""
        error = self.json["error"]
        assert error.keys() == {"code", "message", "hint", "details"}
        assert error["message"]
        assert "\n" not in error["message"]
        return str(error["message"])


@dataclass
class Client:
    """Requests to one server, a connection each."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> Answer:
        """Send a request; a body of bytes goes as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()  # noqa: TID251 - as clients write it
        sent = {**self.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.request("POST", path, body, **headers)

    def metric(self, sample: str) -> float:
        """Return the value of a sample, such as ``name{label="value"}``."""
        text = self.get("/metrics").body.decode()
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, sample
        return float(found[1])


@dataclass
class Running(Client):
    """A server in a thread of this process."""

    state: ServerState = None  # type: ignore[assignment]  # always given
    engine: SimulatedEngine = None  # type: ignore[assignment]  # always given
    stop: Callable[[], None] = lambda: None

    def finished(self, job_id: str) -> Any:
        """Wait for a training job; return all about it."""
        return until(
            lambda: (
                detail
                if (detail := self.get(f"/v1/train/jobs/{job_id}").json)["status"][
                    "finished_unix_ms"
                ]
                else None
            )
        )


@contextmanager
def running(
    adapters: Path,
    *,
    thinking: bool = False,
    wait: bool = True,
    prepare: Callable[[SimulatedEngine], None] = lambda engine: None,
    slots: int = 4,
    context_tokens: int | None = None,
    engine: Any = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve in a thread; the thread has ended when this ends.

    Args:
        adapters: Where adapters live.
        thinking: Whether the model has a thinking mode.
        wait: Until it is ready.
        prepare: Called with the engine before anything starts.
        slots: Requests answered together.
        context_tokens: Longest prompt and action.
        engine: Serves instead of a simulated one.
        **settings: Of the server.
    """
    chosen = ServerSettings(port=0, adapter_dir=adapters, **settings)
    simulated = SimulatedEngine(
        EngineSettings(
            adapter_dir=adapters,
            slots=slots,
            context_tokens=context_tokens,
            max_queued_requests=8,
            served_model_id=chosen.served_model_id,
        ),
        thinking=thinking,
    )
    prepare(simulated)
    engine = engine or simulated
    listener = listen(chosen)
    port = listener.getsockname()[1]
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    state = ServerState(chosen, engine)
    thread = threading.Thread(
        target=loop.run_until_complete,
        args=(serve(state, listener, stopping),),
        name="kiln-server",
    )
    thread.start()

    def stop() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
        thread.join(SECONDS)
        assert not thread.is_alive()

    client = Running(port, state=state, engine=engine, stop=stop)
    try:
        if wait:
            until(lambda: engine.ready)
        yield client
    finally:
        simulated.answers.set()
        simulated.speaks.set()
        simulated.trains.set()
        simulated.starts.set()
        stop()
        loop.close()
        listener.close()


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait until something is true; return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
    return value


@dataclass
class Process(Client):
    """A ``kiln serve`` of its own."""

    process: subprocess.Popen[str] = None  # type: ignore[assignment]  # always given

    def end(self, number: int) -> tuple[int, str, str]:
        """Send a signal; return exit code, stdout and stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err

    def wait_until_ready(self) -> None:
        until(lambda: self.get("/health").status == 200)


def kiln_environment(tmp: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a process in which the simulated engine is found."""
    plugin = tmp / "plugin"
    if not plugin.exists():
        entry_point(plugin)
    kept = {name: v for name, v in os.environ.items() if not name.startswith("KILN_")}
    return {**kept, "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}", **variables}


@contextmanager
def process(
    tmp: Path, *flags: str, announced: bool = True, **variables: str
) -> Iterator[Process]:
    """Run ``kiln serve`` over the simulated engine; kill it if it did not end.

    Args:
        tmp: Its working directory.
        *flags: Of the command.
        announced: Wait until it says where it serves.
        **variables: Of its environment.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "kiln_cli", "serve", "--port", "0", *flags],
        cwd=tmp,
        env=kiln_environment(tmp, KILN_ENGINE=ENTRY_POINT, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port = 0
        if announced:
            assert child.stdout is not None
            port = int(child.stdout.readline().rpartition(":")[2])
        yield Process(port, process=child)
    finally:
        child.kill()
        child.communicate()
