"""``/v1/adapters``: listing, loading, unloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln_core.canonical import canonical_bytes
from tests.server.running import Running
from tests.simulators.engine import CONFIG, WEIGHTS

CHAT = "/v1/chat/completions"


def make_adapter(folder: Path, name: str, script: list[str] | None = None) -> None:
    """Write an adapter that says a script."""
    (folder / name).mkdir()
    config = canonical_bytes({"r": 16, "script": script or ["adapted"]})
    (folder / name / CONFIG).write_bytes(config)
    (folder / name / WEIGHTS).write_bytes(b"weights")


def say(kiln: Running, **who: str) -> str:
    answer = kiln.post(CHAT, {"messages": [{"role": "user", "content": "x"}], **who})
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def test_folder_is_listed_loaded_used_and_unloaded(
    kiln: Running, tmp_path: Path
) -> None:
    assert kiln.get("/v1/adapters").json == {
        "active": None,
        "loaded": [],
        "available": [],
    }
    make_adapter(tmp_path, "one")
    (info,) = kiln.get("/v1/adapters").json["available"]
    assert (info["name"], info["loaded"], info["problem"]) == ("one", False, None)
    assert (
        kiln.post(
            CHAT, {"messages": [{"role": "user", "content": "x"}], "adapter": "one"}
        ).status
        == 404
    )

    loaded = kiln.post("/v1/adapters/load", {"name": "one"})
    assert loaded.json["loaded"] is True
    assert kiln.get("/v1/adapters").json["loaded"] == ["one"]
    assert kiln.get("/health").json["adapters_loaded"] == ["one"]
    assert kiln.metric("kiln_adapters_loaded") == 1
    names = [model["id"] for model in kiln.get("/v1/models").json["data"]]
    assert names == ["simulated", "one"]
    assert say(kiln, adapter="one") == say(kiln, model="one") == "adapted"
    assert say(kiln, model="one", adapter="one") == "adapted"
    assert say(kiln) != "adapted"
    policy = kiln.get("/v1/policy?adapter=one").json["behavior_policy"]
    assert policy["adapter"] == {
        "name": "one",
        "content_sha256": loaded.json["content_sha256"],
    }

    assert kiln.post("/v1/adapters/unload", {"name": "one"}).json == {"unloaded": "one"}
    assert kiln.get("/v1/adapters").json["loaded"] == []
    assert (tmp_path / "one" / CONFIG).exists()
    assert kiln.get("/v1/policy?adapter=one").status == 404


@pytest.mark.parametrize(
    "name",
    [
        *("nobody", "", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", ".hidden"),
        *("é", "a b", "a\nb", "x" * 129, "%2e%2e"),
    ],
)
@pytest.mark.parametrize("what", ["load", "unload"])
def test_name_that_is_no_adapter_is_refused(
    kiln: Running, what: str, name: str
) -> None:
    answer = kiln.post(f"/v1/adapters/{what}", {"name": name})
    assert answer.status == (404 if (what, name) == ("unload", "nobody") else 400)
    assert answer.message


@pytest.mark.parametrize(
    "body", [{}, {"name": None}, {"name": 1}, {"name": "a", "b": 1}]
)
@pytest.mark.parametrize("what", ["load", "unload"])
def test_bad_body_is_refused(kiln: Running, what: str, body: object) -> None:
    assert kiln.post(f"/v1/adapters/{what}", body).status == 400


def test_broken_folder_is_listed_with_its_problem(
    kiln: Running, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG).write_text("{")
    (info,) = kiln.get("/v1/adapters").json["available"]
    assert info["content_sha256"] is None
    assert "cannot be loaded" in info["problem"]
    assert kiln.post("/v1/adapters/load", {"name": "broken"}).status == 400


def test_full_slots_say_so(kiln: Running, tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        make_adapter(tmp_path, name)
    for name in ("a", "b", "c"):
        assert kiln.post("/v1/adapters/load", {"name": name}).status == 200
    answer = kiln.post("/v1/adapters/load", {"name": "d"})
    assert answer.status == 503
    assert "slots are taken" in answer.message
