"""One WebSocket session: the socket and the clock around ``kiln_core.session``.

A reader task sits in ``receive`` for the whole life of the socket, since aiohttp
answers pings only there, and since a frame that comes unasked must be seen at once.
While the policy thinks, a second task reads the state periodically so that servers
which expect application traffic keep the session.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from select import POLLIN, poll
from socket import SHUT_RDWR, socket
from typing import NamedTuple, TypeVar

import aiohttp
import anyio
import anyio.lowlevel

from kiln_core import limits
from kiln_core.discovery import websocket_url
from kiln_core.drive.concurrency import task_group
from kiln_core.drive.http import (
    CHECK_CREDENTIAL,
    EnvironmentClient,
    status_error,
    unreachable,
)
from kiln_core.errors import (
    CapacityAtUpgrade,
    HttpStatusError,
    KilnError,
    RemoteProtocolError,
    SessionLost,
    TransportError,
)
from kiln_core.manifest import ProtocolError
from kiln_core.session import (
    Close,
    Command,
    ErrorReceived,
    Event,
    ReadState,
    Session,
    SessionState,
    Step,
    binary_frame,
    oversized,
)

__all__ = ["EnvironmentSession", "SessionTimes", "open_session"]

T = TypeVar("T")

CLOSE_SECONDS = 2.0
"""Bound of saying goodbye."""
DRAIN_SECONDS = 1.0
"""How long a failed send waits for a frame that explains it."""
SETTLE_TURNS = 3
"""Turns of the event loop in which bytes that the kernel holds reach the machine."""
TAKEN_TURNS = 2
"""Turns in which bytes that the event loop has read reach it."""
IDLE_SHARE = 4
"""Looks at whether the policy thinks, per interval of the keep-alive."""
TRY_AGAIN_LATER = 1013
"""WebSocket close code (IANA registry) that counts as a full server."""


class SessionTimes:
    """The deadlines of a session, in seconds.

    Args:
        exchange_seconds: Of one command and its answer, and of connecting.
        http_seconds: Of one request of discovery, and of the health check.
        recovery_seconds: In which a lost environment may come back.
    """

    def __init__(
        self,
        exchange_seconds: float = limits.EXCHANGE_SECONDS,
        http_seconds: float = limits.HTTP_TOTAL_SECONDS,
        recovery_seconds: float = limits.RECOVERY_SECONDS,
    ) -> None:
        self.exchange_seconds = exchange_seconds
        self.http_seconds = http_seconds
        self.recovery_seconds = recovery_seconds
        self.keepalive_seconds = min(
            max(exchange_seconds / 4, limits.KEEPALIVE_MIN_SECONDS),
            limits.KEEPALIVE_MAX_SECONDS,
        )


class _Refresh(NamedTuple):
    """A read of the state while the policy thinks."""

    scope: anyio.CancelScope
    done: anyio.Event


class EnvironmentSession:
    """A live session; use `open_session`."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        machine: Session,
        times: SessionTimes,
        where: str,
    ) -> None:
        self._socket = socket
        self._raw_socket = socket.get_extra_info("socket")
        self._machine = machine
        self._times = times
        self._where = where
        self._answer: Event | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.create_future()
        """Done once the exchange under way has its answer, or can have none."""
        self._sending = False
        self._just_answered = False
        """Whether the event loop has read nothing since the last answer was taken."""
        self._pending = poll()
        if self._raw_socket is not None:
            self._pending.register(self._raw_socket.fileno(), POLLIN)
        self.scope = anyio.CancelScope()
        """Around all that is done in the session; ends a policy that still thinks."""
        self._thinking = False
        self._deadline = 0.0
        """When the exchange under way must have its answer."""
        self._clock: asyncio.Handle = self._loop.call_later(
            times.exchange_seconds, self._expire
        )
        self._due = 0.0
        """When the state is read next, if the policy still thinks then."""
        self._refresh: _Refresh | None = None
        """The read of the state that is under way."""
        self._failure: KilnError | None = None
        """Why no state can be read any more."""

    async def exchange(self, command: Command) -> Event:
        """Send a command and wait for its answer.

        A terminal error that came before the first command is the answer to it. An
        exchange that is cancelled poisons the session like one that timed out.

        Raises:
            SessionLost: The socket died or no answer came in time.
            RemoteProtocolError: The peer broke the protocol.
        """
        if self._refresh is not None:
            await self._refresh.done.wait()
        return await self._exchange(command)

    async def _exchange(self, command: Command) -> Event:
        await self._settle()
        early = self._early_answer(command)
        if early is not None:
            return early
        frame = self._machine.send(command)
        self._answer, self._arrived = None, self._loop.create_future()
        self._deadline = self._loop.time() + self._times.exchange_seconds
        try:
            await self._send(frame)
            await self._arrived
        finally:
            if self._machine.awaiting:
                self._machine.poisoned(self._unanswered())
        answer = self._received()
        if answer is None:
            raise self._machine.poisoned(self._unanswered())
        return answer

    async def _settle(self) -> None:
        """Let frames reach the machine that cannot be answers to the next command."""
        if self._machine.over:
            return
        if self._pending.poll(0):
            await _turns(SETTLE_TURNS)
        elif not self._just_answered:
            await _turns(TAKEN_TURNS)

    def _expire(self, turns: int = SETTLE_TURNS) -> None:
        """End an exchange whose time is over, though the peer may not even read.

        One timer for the session: no exchange that begins later than it was set has a
        deadline before it goes off, and a timer for every step would be much of one.
        """
        now = self._loop.time()
        due = now + self._times.exchange_seconds
        if self._machine.awaiting:
            due = self._deadline
        if now < due:
            self._clock = self._loop.call_at(due, self._expire)
            return
        if turns:
            # an answer that came while the loop was blocked is not late
            self._clock = self._loop.call_soon(self._expire, turns - 1)
            return
        self._machine.poisoned(self._unanswered())
        self._wake()
        if self._sending:
            self._shut_down()

    def _wake(self) -> None:
        if not self._arrived.done():
            self._arrived.set_result(None)

    def _received(self) -> Event | None:
        return self._answer

    def _unanswered(self) -> SessionLost:
        return self._lost(f"gave no answer in {self._times.exchange_seconds:g} s")

    async def pumped(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a policy while the session is kept alive.

        Raises:
            SessionLost: The session died meanwhile; the call is cancelled.
            RemoteProtocolError: A frame came unasked.
        """
        if self._machine.poison is not None:
            raise self._machine.poison
        self._due = self._loop.time() + self._times.keepalive_seconds
        self._thinking = True
        try:
            result = await call()
            if self._refresh is not None:
                await self._refresh.done.wait()
        except BaseException:
            if self._refresh is not None:
                self._refresh.scope.cancel()
            if self.scope.cancel_called:
                raise self.failure from None
            raise
        finally:
            self._thinking = False
        if self._failure or self._machine.poison:
            raise self.failure
        return result

    @property
    def failure(self) -> KilnError:
        """Why the session is over."""
        failure = self._failure or self._machine.poison
        assert failure is not None  # noqa: S101 - asked only then
        return failure

    def _interrupt(self) -> None:
        """End the policy's call; all that is awaited in the session ends with it."""
        if self._thinking:
            self.scope.cancel()

    async def keep_alive(self) -> None:
        """Read the state while the policy thinks; runs as a task of its own."""
        interval = self._times.keepalive_seconds
        while self._failure is None:
            rest = interval / IDLE_SHARE
            if self._thinking:
                rest = self._due - self._loop.time()
            if rest > 0:
                await anyio.sleep(rest)
                continue
            await self._read_state()
            self._due = self._loop.time() + interval

    async def _read_state(self) -> None:
        self._refresh = _Refresh(anyio.CancelScope(), anyio.Event())
        try:
            with self._refresh.scope:
                await self._exchange(ReadState())
        except KilnError as failure:
            self._failure = failure
            self._interrupt()
        finally:
            self._refresh.done.set()
            self._refresh = None

    async def close(self) -> None:
        """Say goodbye and close; best effort, bounded, never raises."""
        self._clock.cancel()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
            # a boundary: whatever fails here fails for a session that is over
            with suppress(Exception):
                if self._machine.state in {SessionState.READY, SessionState.FRESH}:
                    await self._socket.send_str(self._machine.send(Close()))
                await self._socket.close()
        if scope.cancelled_caught:
            self._shut_down()

    def _shut_down(self) -> None:
        """Give the socket up: a peer that reads nothing would keep unsent bytes."""
        if self._raw_socket is None:
            return
        # event loops wrap the socket, and not all wrappers can shut down
        with suppress(OSError):
            descriptor = os.dup(self._raw_socket.fileno())
            with socket(fileno=descriptor) as again:
                again.shutdown(SHUT_RDWR)

    async def read(self) -> None:
        """Receive frames until the socket ends; runs as a task of its own."""
        while not self._machine.over:
            try:
                self._take(await self._socket.receive())
            except KilnError as error:
                error.details.setdefault("environment", self._where)
                break
            except (aiohttp.ClientError, OSError):
                # what receive() raises when it cannot write a pong any more
                self._machine.poisoned(self._lost("closed the connection"))
                break
        self._wake()
        if self._machine.poison is not None:
            self._interrupt()

    def _early_answer(self, command: Command) -> Event | None:
        if self._machine.poison is not None:
            raise self._machine.poison
        if self._machine.state is not SessionState.ENDED:
            return None
        assert isinstance(self._answer, ErrorReceived)  # noqa: S101 - ENDED needs one
        if isinstance(command, Step | ReadState):
            code = self._answer.error.code
            raise RemoteProtocolError(
                f"{self._where} ended the session with {code} between two commands",
                hint="look at the log of the environment",
                environment=self._where,
                protocol_code=code,
            )
        return self._answer

    async def _send(self, frame: str) -> None:
        self._sending = True
        try:
            await self._socket.send_str(frame)
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            # The server may have said why before it closed: read that first.
            with anyio.move_on_after(DRAIN_SECONDS):
                await self._arrived
            if self._answer is None:
                raise self._machine.poisoned(
                    self._lost("closed the connection")
                ) from error
        finally:
            self._sending = False

    def _take(self, message: aiohttp.WSMessage) -> None:
        if message.type is aiohttp.WSMsgType.TEXT:
            self._answer = self._machine.receive(message.data)
            self._wake()
            # Whoever waits for the answer runs before this callback does, and the
            # loop reads from the socket after both.
            self._just_answered = True
            self._loop.call_soon(self._settled)
        elif message.type is aiohttp.WSMsgType.BINARY:
            raise self._machine.poisoned(binary_frame())
        else:
            self._take_end(message)

    def _settled(self) -> None:
        self._just_answered = False

    def _take_end(self, message: aiohttp.WSMessage) -> None:
        code = self._socket.close_code
        if code == TRY_AGAIN_LATER and self._machine.state in {
            SessionState.FRESH,
            SessionState.AWAITING_RESET,
        }:
            self._machine.state = SessionState.ENDED
            self._answer = full_server("the server closed with code 1013")
            return
        if isinstance(message.data, aiohttp.WebSocketError):
            raise self._machine.poisoned(_misframed(message.data))
        raise self._machine.poisoned(self._lost(f"closed the session (code {code})"))

    def _lost(self, what: str) -> SessionLost:
        return SessionLost(
            f"{self._where} {what}",
            hint="look at the log of the environment",
            environment=self._where,
        )


async def _turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def _misframed(error: aiohttp.WebSocketError) -> RemoteProtocolError:
    if error.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
        return oversized(limits.MAX_SERVER_MESSAGE_BYTES)
    return RemoteProtocolError(
        f"the environment sent a frame that breaks RFC 6455 (code {error.code:d})",
        hint="report it to the environment's authors",
    )


def full_server(message: str) -> ErrorReceived:
    """Return the event of a server that is full, however it said so."""
    return ErrorReceived(ProtocolError(code="CAPACITY_REACHED", message=message))


@asynccontextmanager
async def open_session(
    client: EnvironmentClient, times: SessionTimes | None = None
) -> AsyncIterator[EnvironmentSession]:
    """Open a session after a health check.

    Raises:
        CapacityAtUpgrade: The upgrade was refused because the server is full.
        TransportError: It cannot be reached, or refuses the upgrade.
    """
    times = times or SessionTimes()
    await client.health()
    socket = await _connect(client, times)
    secrets = () if client.credential is None else (client.credential.secret,)
    session = EnvironmentSession(
        socket, Session(secrets=secrets), times, client.base_url
    )
    try:
        async with task_group() as group:
            group.start_soon(session.read)
            group.start_soon(session.keep_alive)
            try:
                with session.scope:
                    yield session
            finally:
                await session.close()
                group.cancel_scope.cancel()
        if session.scope.cancelled_caught:
            raise session.failure
    finally:
        with anyio.move_on_after(CLOSE_SECONDS, shield=True), suppress(Exception):
            await socket.close()


async def _connect(
    client: EnvironmentClient, times: SessionTimes
) -> aiohttp.ClientWebSocketResponse:
    url = websocket_url(client.base_url)
    try:
        with anyio.fail_after(times.exchange_seconds):
            return await client.http.ws_connect(
                url,
                max_msg_size=limits.MAX_SERVER_MESSAGE_BYTES + 1,
                compress=0,
                autoclose=True,
                autoping=True,
            )
    except aiohttp.WSServerHandshakeError as error:
        raise _refused(client, url, error.status) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise unreachable(url, error) from error


def _refused(client: EnvironmentClient, url: str, status: int) -> TransportError:
    if status == 503:
        return CapacityAtUpgrade(
            f"{url} refused the session: it is full",
            hint="wait, or raise the session limit of the environment",
            environment=url,
        )
    if status == 403:
        remedy = "a protected environment needs --credential-env"
        if client.credential is not None:
            remedy = CHECK_CREDENTIAL
        return HttpStatusError(
            f"{url} refused the session with HTTP status 403",
            hint="the WebSocket path may be wrong, or the server refuses this client: "
            + remedy,
            environment=url,
            http_status=status,
        )
    if status < 300:
        return HttpStatusError(
            f"{url} is no WebSocket endpoint",
            hint="check the URL: it must be the base URL of an OpenEnv server",
            environment=url,
            http_status=status,
        )
    return status_error(url, status)
