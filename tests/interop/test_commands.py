"""The same with the public commands, each a process of its own.

Every command runs with proxy variables that lead nowhere: they must not be used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.conftest import OUTPUTS, files_in
from tests.interop.proxy import bearer_proxy
from tests.server.running import ROOT, Running, running

pytestmark = pytest.mark.anyio

TOKEN = "a-secret/of+this==test"
NOWHERE = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WS_PROXY", "WSS_PROXY", "http_proxy"),
    "http://127.0.0.1:9",
)
PLAN = (
    *("--groups", "2", "--group-size", "2", "--max-steps", "3"),
    *("--thinking", "false", "--capacity-wait-seconds", "20"),
)


@pytest.fixture(scope="module")
def kiln(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("adapters")) as kiln:
        yield kiln


@dataclass
class Commands:
    """Runs ``kiln openenv ... --json`` against one environment, in one folder."""

    folder: Path
    kiln_url: str
    url: str = ""
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    async def __call__(self, name: str, *arguments: str, code: int = 0) -> Any:
        """Return the one document it printed; there is nothing on stderr."""
        places = ("--environment", self.url) if name in {"inspect", "rollout"} else ()
        flags = () if name == "verify" else self.flags
        plan = PLAN if name == "rollout" else ()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KILN_")}
        done = await anyio.run_process(
            [
                *(sys.executable, "-m", "kiln_cli", "openenv", name),
                *(*places, *flags, *plan, *arguments, "--json"),
            ],
            cwd=self.folder,
            env={
                **(kept | NOWHERE | self.variables),
                "PYTHONPATH": str(ROOT),
                "KILN_URL": self.kiln_url,
            },
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, b""), done
        return json.loads(done.stdout)


@pytest.fixture
def commands(kiln: Running, tmp_path: Path) -> Commands:
    return Commands(tmp_path, kiln.url)


@pytest.fixture
async def reached(
    request: pytest.FixtureRequest,
    commands: Commands,
    peers: dict[str, str],
    certificates: Path,
) -> AsyncIterator[Commands]:
    """Commands that know how to reach the peer the test names."""
    commands.url = peers.get(request.param, "")
    if request.param == "tls":
        commands.variables["SSL_CERT_FILE"] = str(certificates / "authority.pem")
    if request.param != "bearer":
        yield commands
        return
    commands.flags = ("--credential-env", "SECRET_OF_TEST")
    commands.variables["SECRET_OF_TEST"] = TOKEN
    async with bearer_proxy(peers["counter"], TOKEN) as proxy:
        commands.url = proxy.url
        yield commands


@pytest.mark.parametrize("reached", ["tls", "bearer", "prefixed"], indirect=True)
async def test_inspect_rollout_verify_replay(reached: Commands) -> None:
    identity = (await reached("inspect"))["environments"][0]["identity"]
    assert identity["base_url"] == reached.url
    assert identity["websocket_url"] == f"ws{reached.url.removeprefix('http')}/ws"
    summary = await reached("rollout")
    report = await reached("verify")
    assert report["dataset_sha256"] == summary["dataset_sha256"]
    replay = await reached("replay")
    assert replay["rollouts"] == summary["rollout_count"] == 4
    assert replay["environment_exchanges"] == report["environment_exchanges"] > 0
    written = files_in(reached.folder)
    assert sorted(written) == sorted(OUTPUTS)
    for data in written.values():
        assert TOKEN.encode() not in data
        assert b"SECRET_OF_TEST" not in data
        assert b".pem" not in data


async def test_new_episode_id_is_drift_until_it_is_exempt(
    commands: Commands, peers: dict[str, str]
) -> None:
    commands.url = peers["words"]
    await commands("rollout")
    error = (await commands("replay", code=1))["error"]
    assert error["code"] == "replay_drift"
    pointer = error["details"]["pointer"]
    assert pointer == "/final_state/episode_id"
    assert error["details"]["drifted_candidates"] == 4
    assert f"--ignore-pointer {pointer}" in error["hint"]
    outcome = await commands("replay", "--ignore-pointer", pointer)
    assert (outcome["report"], outcome["first_drift"]) == (None, None)


UNTRUSTED = {
    "no authority": ("", "127.0.0.1", "certificate"),
    "another authority": ("other/authority.pem", "127.0.0.1", "certificate"),
    "another host": ("authority.pem", "localhost", "localhost"),
    "missing file": ("nowhere.pem", "127.0.0.1", "certificate"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
async def test_certificate_that_cannot_be_trusted_is_one_sentence(
    commands: Commands, peers: dict[str, str], certificates: Path, name: str
) -> None:
    file, host, told = UNTRUSTED[name]
    if file:
        commands.variables["SSL_CERT_FILE"] = str(certificates / file)
    commands.url = peers["tls"].replace("127.0.0.1", host)
    error = (await commands("inspect", code=2))["error"]
    assert error["code"] == "environment_unavailable"
    assert "has a certificate that cannot be trusted: " in error["message"]
    assert told in error["message"].partition("trusted: ")[2]
    assert "\n" not in error["message"]
    assert "SSL_CERT_FILE" in error["hint"]


async def test_https_of_a_plain_server_is_one_sentence(
    commands: Commands, peers: dict[str, str]
) -> None:
    commands.url = peers["counter"].replace("http", "https")
    error = (await commands("inspect", code=2))["error"]
    assert error["message"].endswith("does not speak the TLS of https")


@pytest.mark.parametrize("reached", ["bearer"], indirect=True)
async def test_missing_and_wrong_credentials(reached: Commands) -> None:
    reached.variables["SECRET_OF_TEST"] = "another"
    error = (await reached("inspect", code=2))["error"]
    assert (error["code"], error["details"]["http_status"]) == ("http_status", 401)
    reached.flags = ()
    error = (await reached("rollout", code=2))["error"]
    assert error["details"]["http_status"] == 401
    assert files_in(reached.folder) == {}
