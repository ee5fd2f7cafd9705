"""``kiln openenv inspect`` on environments, and on what is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cli.conftest import Cli
from tests.server.running import Running
from tests.simulators.environment import Simulator, document, redirect

INSPECT = ("openenv", "inspect", "--environment")


@contextmanager
def web_server(status: int, body: bytes) -> Iterator[str]:
    """Serve one answer to everything: no OpenEnv server at all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Clients go away; that is theirs to do."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_identity_and_schemas_are_shown(cli: Cli, environment: Simulator) -> None:
    done = cli(*INSPECT, environment.url)
    lines = dict(line.split("  ", 1) for line in done.out.splitlines())
    shown = {name: value.strip() for name, value in lines.items()}
    assert shown["environment"] == "counter"
    assert shown["url"] == environment.url
    assert shown["discovery"].startswith("sha256:")
    assert shown["action schema"].startswith('{"additionalProperties":false')
    assert done.err == ""


def test_report_is_one_document(cli: Cli, environment: Simulator) -> None:
    report = cli(*INSPECT, environment.url, "--json").json
    assert report["schema"] == "kiln.openenv-inspection.v1"
    (found,) = report["environments"]
    assert found["identity"]["metadata"]["name"] == "counter"
    assert found["schema"].keys() == {"action", "observation", "state"}


def test_several_keep_their_order(cli: Cli, environment: Simulator) -> None:
    with Simulator().serving_in_thread() as other:
        other.change("/metadata", name="another")
        done = cli(*INSPECT, other.url, "--environment", environment.url, "--json")
    names = [e["identity"]["metadata"]["name"] for e in done.json["environments"]]
    assert names == ["another", "counter"]


def test_hostile_metadata_does_not_reach_the_terminal(
    cli: Cli, environment: Simulator
) -> None:
    environment.change("/metadata", description="nice\x1b[2J\x07\nurl  http://evil")
    done = cli(*INSPECT, environment.url)
    assert "\x1b" not in done.out
    assert "\x07" not in done.out
    assert "nice\\x1b[2J\\x07\\nurl  http://evil" in done.out


def refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_nothing_there_is_one_sentence(cli: Cli) -> None:
    url = f"http://127.0.0.1:{refused_port()}"
    done = cli(*INSPECT, url, code=2)
    assert done.out == ""
    assert done.err == (
        f"Error: {url}/health cannot be reached\n"
        "Hint: check that the server is running and the URL is right\n"
    )
    assert cli(*INSPECT, url, "--json", code=2).error["code"] == (
        "environment_unavailable"
    )


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"<html>hello</html>", "no OpenEnv server"),
        (200, b"{}", "what OpenEnv prescribes"),
        (200, b"[]", "what OpenEnv prescribes"),
        (200, b"", "no OpenEnv server"),
        (404, b"not here", "HTTP status 404"),
        (500, b"", "HTTP status 500"),
        (401, b"", "HTTP status 401"),
        (204, b"", "HTTP status 204"),
    ],
)
def test_other_web_server_is_told_apart(
    cli: Cli, status: int, body: bytes, reason: str
) -> None:
    with web_server(status, body) as url:
        error = cli(*INSPECT, url, "--json", code=2).error
    assert reason in error["message"]
    assert error["hint"]


def test_kiln_server_is_no_environment(cli: Cli, kiln: Running) -> None:
    error = cli(*INSPECT, kiln.url, "--json", code=2).error
    assert "no OpenEnv server" in error["message"]


@pytest.mark.parametrize("route", ["/metadata", "/schema"])
def test_missing_route_is_named(cli: Cli, environment: Simulator, route: str) -> None:
    del environment.documents[route]
    error = cli(*INSPECT, environment.url, "--json", code=2).error
    assert f"has no {route}, so it is no OpenEnv server" in error["message"]


@pytest.mark.parametrize("route", ["/list_environments", "/openapi.json"])
def test_old_server_without_a_route_is_inspected(
    cli: Cli, environment: Simulator, route: str
) -> None:
    del environment.documents[route]
    assert cli(*INSPECT, environment.url, "--json").json


def test_redirect_is_not_followed(cli: Cli, environment: Simulator) -> None:
    environment.documents["/schema"] = redirect("http://127.0.0.1:1/schema")
    error = cli(*INSPECT, environment.url, "--json", code=2).error
    assert "redirects are not followed" in error["hint"]


def test_schema_that_cannot_be_compiled_is_refused(
    cli: Cli, environment: Simulator
) -> None:
    environment.change("/schema", action={"$ref": "http://127.0.0.1:1/x"})
    error = cli(*INSPECT, environment.url, "--json", code=2).error
    assert error["code"] == "environment_action_schema_invalid"


def test_huge_document_is_refused(cli: Cli, environment: Simulator) -> None:
    environment.documents["/metadata"] = document({"name": "x" * 3_000_000})
    error = cli(*INSPECT, environment.url, "--json", code=2).error
    assert "more than 2097152 bytes" in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        *("", " ", "ftp://x", "http://", "http://:80", "http://u:p@x", "http://x?q"),
        *(
            "http://x#f",
            "http://x:port",
            "http://[",
            "http://x:99999",
            "http://" + "x" * 3000,
        ),
    ],
)
def test_wrong_url_is_refused_before_anything(cli: Cli, url: str) -> None:
    error = cli(*INSPECT, url, "--json", code=2).error
    assert error["code"] == "usage"


def test_scheme_may_be_left_out(cli: Cli, environment: Simulator) -> None:
    bare = environment.url.removeprefix("http://")
    report = cli(*INSPECT, f" {bare}/ ", "--json").json
    assert report["environments"][0]["identity"]["base_url"] == environment.url


# Credentials


def test_credential_is_sent_and_not_shown(
    cli: Cli, environment: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    done = cli(*INSPECT, environment.url, "--credential-env", "ENV_TOKEN", "--json")
    sent = {r.headers.get("Authorization") for r in environment.requests}
    assert sent == {"Bearer s3cret"}
    assert "s3cret" not in done.out
    assert done.json["environments"][0]["identity"]["authentication"] == "bearer"


def test_dash_means_no_credential(cli: Cli, environment: Simulator) -> None:
    cli(*INSPECT, environment.url, "--credential-env", "-")
    assert all("Authorization" not in r.headers for r in environment.requests)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["UNSET_VARIABLE"], "UNSET_VARIABLE is not set"),
        (["EMPTY"], "EMPTY is not set"),
        (["no-name"], "'no-name' is not the name"),
        (["s3cret token"], "is not the name"),
        (["SPACED"], "bearer token"),
        (["A", "B"], "2 --credential-env for 1 environments"),
    ],
)
def test_bad_credential_is_refused_before_anything(
    cli: Cli,
    environment: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    reason: str,
) -> None:
    monkeypatch.setenv("EMPTY", " ")
    monkeypatch.setenv("SPACED", "a b")
    flags = [part for name in names for part in ("--credential-env", name)]
    error = cli(*INSPECT, environment.url, *flags, "--json", code=2).error
    assert reason in error["message"]
    assert environment.requests == []


def test_reflected_credential_is_not_repeated(
    cli: Cli, environment: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    environment.change("/metadata", description="you sent s3cret")
    done = cli(
        *INSPECT, environment.url, "--credential-env", "ENV_TOKEN", "--json", code=2
    )
    assert done.error["code"] == "credential_reflected"
    assert "s3cret" not in done.out


def test_credential_does_not_travel_in_clear_text(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    done = cli(
        *(*INSPECT, "http://192.0.2.1", "--credential-env", "ENV_TOKEN", "--json"),
        code=2,
    )
    assert "clear text" in done.error["message"]
