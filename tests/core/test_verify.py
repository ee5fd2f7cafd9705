"""A good bundle verifies; a bundle with one thing changed never does."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kiln_core import verify as verification
from kiln_core.actions import ActionSchema
from kiln_core.canonical import compact, digest, pretty
from kiln_core.errors import InvalidBundle
from kiln_core.records import EpisodeTermination, OpenEnvRolloutProvenance
from kiln_core.transcript import RolloutSetting, _own_provenance
from kiln_core.verify import BundleBytes, read_summary
from tests.core.bundles import (
    DROP,
    VARIANTS,
    Collection,
    Parts,
    bytes_of,
    look,
    put,
    verify,
)
from tests.core.mutations import SINGLE, D, R, Row, S
from tests.simulators.pure import ADAPTER_POLICY, sha, toy_sample

NAMES = {
    D: "openenv.rollouts.jsonl",
    R: "openenv.replay.json",
    S: "openenv.rollout-summary.json",
}
GOOD = {name: bytes_of(make().bundle()) for name, make in VARIANTS.items()}
PLAIN = GOOD["plain"]


def changed(variant: str, where: str, pointer: str, value: Any) -> BundleBytes:
    parts = Parts(GOOD[variant])
    put(getattr(parts, where), pointer, value)
    keep: tuple[str, ...] = ()
    if where == S:
        keep = ("dataset_sha256", "dataset_bytes", "replay_sha256", "replay_bytes")
    return parts.seal(keep=keep)


def failure(files: BundleBytes) -> InvalidBundle:
    with pytest.raises(InvalidBundle) as caught:
        verify(files)
    details = caught.value.details
    assert details["check"]
    assert details["file"] in NAMES.values()
    assert len(str(caught.value)) < 1200
    compact(caught.value.document())
    return caught.value


@pytest.mark.parametrize("variant", VARIANTS)
def test_good_bundle_verifies(variant: str) -> None:
    verified = verify(GOOD[variant])
    summary = verified.summary
    assert verified.environment_exchanges == summary.stats.total_environment_steps
    assert (
        verified.retried_rollouts
        == sum(i % 2 for i in range(summary.group_size)) * summary.groups
    )
    traced = 0 if variant == "without tokens" else summary.rollout_count
    assert verified.traced_rollouts == traced
    assert len(verified.replay.groups) == summary.groups


def row_id(row: Row) -> str:
    return f"{row[0]}{row[1]}={'absent' if row[2] is DROP else repr(row[2])[:24]}"


@pytest.mark.parametrize("row", SINGLE, ids=row_id)
def test_single_change_is_noticed_where_it_is(row: Row) -> None:
    where, pointer, value, check, file, place = row
    error = failure(changed("plain", where, pointer, value))
    details = error.details
    assert (details["check"], details["file"], details["pointer"]) == (
        check,
        NAMES[file],
        place,
    )
    if file == D and place:
        assert details["line"] == (int(pointer.split("/")[1]) if where == D else 0) + 1


def test_table_is_large_and_names_every_check() -> None:
    assert len(SINGLE) > 150
    known = {row[3] for row in SINGLE}
    elsewhere = {"dataset_digest", "replay_digest", "dataset_canonical"}
    assert known | elsewhere | {"summary_contract"} == {
        "summary_record",
        "summary_schema",
        "summary_version",
        "summary_policy",
        "summary_contract",
        "summary_controls",
        "summary_identity",
        "dataset_digest",
        "replay_digest",
        "replay_record",
        "replay_link",
        "plan",
        "replay_episode",
        "replay_return",
        "dataset_record",
        "dataset_canonical",
        "dataset_groups",
        "dataset_prompt",
        "dataset_provenance",
        "dataset_trajectory",
        "dataset_trace",
        "summary_selection",
        "summary_rollouts",
        "summary_stats",
    }


def leaves(value: Any, at: str = "") -> Iterator[str]:
    """Yield the pointer of every scalar of a document."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{at}/{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from leaves(part, f"{at}/{index}")
    else:
        yield at


def other(value: Any) -> Any:
    """Return a nearby value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 0.3
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    return f"{value}x" if isinstance(value, str) else 0


UNBOUND = {
    "/kiln_url": "where it was asked",
    "/concurrency": "changes no episode",
    "/capacity_wait_seconds": "changes no episode",
    "/output_path": "a name that may be moved",
    "/replay_output_path": "a name that may be moved",
    "/summary_output_path": "a name that may be moved",
}
"""Members of a plain summary that stand in no other file."""


def test_every_member_of_a_summary_is_bound_but_these() -> None:
    free = set()
    for pointer in leaves(Parts(PLAIN).summary):
        if re.match(r"/rollouts/(?![03]/)", pointer):
            continue
        value = other(look(Parts(PLAIN).summary, pointer))
        try:
            verify(changed("plain", S, pointer, value))
        except InvalidBundle:
            continue
        free.add(pointer)
    assert free == set(UNBOUND)


def test_without_token_ids_two_more_controls_are_claims_alone() -> None:
    free = set()
    for name in ("temperature", "max_action_tokens", "max_recoverable_errors"):
        pointer = f"/{name}"
        value = other(look(Parts(PLAIN).summary, pointer))
        try:
            verify(changed("without tokens", S, pointer, value))
        except InvalidBundle:
            continue
        free.add(name)
    assert free == {"temperature", "max_action_tokens"}


def bound_in_replay(pointer: str) -> bool:
    """Say whether another file repeats a member of the manifest.

    None repeats a final state, nor what stands beside ``input_text``: the manifest's
    own digest binds them, and live replay checks them.
    """
    beside = r"/groups/[13]/.*observation/(reward|observation/(?!input_text))"
    return "/final_state/" not in pointer and not re.match(beside, pointer)


def test_every_member_of_a_replay_manifest_is_bound_but_these() -> None:
    parts = Parts(PLAIN)
    pointers = [p for p in leaves(parts.replay) if p.startswith("/groups/")]
    bound = [p for p in pointers if bound_in_replay(p)]
    free = [p for p in pointers if not bound_in_replay(p) and "step" not in p]
    rng = random.Random(1)
    for pointer in rng.sample(bound, 110):
        failure(changed("plain", R, pointer, other(look(parts.replay, pointer))))
    assert len(free) > 30
    verify(changed("plain", R, "/groups/1/reset_observation/observation/ticket", 5))
    verify(changed("plain", R, "/groups/1/candidates/0/final_state", None))


def test_manifest_must_name_its_dataset() -> None:
    parts = Parts(PLAIN)
    put(parts.replay, "/dataset_sha256", sha("7"))
    details = failure(parts.seal(keep=("replay.dataset_sha256",))).details
    assert (details["check"], details["pointer"]) == ("replay_link", "/dataset_sha256")


def free_in_dataset(pointer: str) -> bool:
    """Say whether only a tokenizer or a model could tell a value from another."""
    ids = "prompt_token_ids" in pointer or "action_token_ids" in pointer
    return ids or any(
        part in pointer
        for part in ("/logprobs/", "/observation_spans/", "/attempt", "/prompt_prefix")
    )


def test_every_member_of_a_dataset_is_bound_but_what_only_a_model_can_tell() -> None:
    """Token ids, log-probabilities and spans are for ``verify --recompute``."""
    parts = Parts(PLAIN)
    pointers = list(leaves(parts.dataset))
    text = [p for p in pointers if not free_in_dataset(p)]
    tokens = [p for p in pointers if free_in_dataset(p)]
    rng = random.Random(2)
    for pointer in rng.sample(text, 90):
        error = failure(
            changed("plain", D, pointer, other(look(parts.dataset, pointer)))
        )
        assert error.details["file"] == NAMES[D]
    free = set()
    for pointer in rng.sample(tokens, 30):
        try:
            verify(changed("plain", D, pointer, other(look(parts.dataset, pointer))))
        except InvalidBundle:
            continue
        free.add(pointer)
    assert free


def test_message_of_a_harness_error_is_free_but_its_shape_is_not() -> None:
    """Another implementation may word it otherwise; its code must be earned."""
    pointer = "/0/completions/4/trajectory/3"

    def with_content(document: Any) -> BundleBytes:
        parts = Parts(PLAIN)
        content = compact(document).decode()
        put(parts.dataset, f"{pointer}/content", content)
        put(parts.dataset, f"{pointer}/warning_prefix_len", len(content.encode()))
        return parts.seal()

    error = {"code": "INVALID_MODEL_ACTION", "message": "in other words"}
    verify(with_content({"openenv_harness_error": error, "done": True}))
    for bad in (
        {
            "openenv_harness_error": {**error, "code": "MODEL_ACTION_NO_OUTPUT"},
            "done": True,
        },
        {"openenv_harness_error": error, "done": False},
        {"openenv_harness_error": error, "done": 1},
        {"openenv_harness_error": error},
        {"openenv_harness_error": {**error, "extra": 1}, "done": True},
        {"openenv_harness_error": error, "done": True, "extra": 1},
        {"openenv_error": error, "done": True},
        "text",
    ):
        details = failure(with_content(bad)).details
        assert details["check"] == "dataset_trajectory"
        assert details["pointer"] == "/completions/4/trajectory/3/content"


def test_error_text_of_another_writer_is_compared_by_value() -> None:
    pointer = "/0/completions/1/trajectory/3"
    parts = Parts(PLAIN)
    told = msgspec.json.decode(look(parts.dataset, f"{pointer}/content"))
    content = pretty(dict(reversed(told.items()))).decode()
    put(parts.dataset, f"{pointer}/content", content)
    put(parts.dataset, f"{pointer}/warning_prefix_len", len(content.encode()))
    verify(parts.seal())
    put(parts.dataset, f"{pointer}/content", "not json")
    put(parts.dataset, f"{pointer}/warning_prefix_len", 8)
    assert failure(parts.seal()).details["check"] == "dataset_trajectory"


CONTRACT: list[tuple[str, Any, str]] = [
    ("/training_contract/behavior_policy", DROP, "/training_contract/behavior_policy"),
    (
        "/training_contract/behavior_policy/implementation",
        "x",
        "/training_contract/behavior_policy",
    ),
    (
        "/training_contract/effective_config/base_adapter",
        None,
        "/training_contract/effective_config/base_adapter",
    ),
    (
        "/training_contract/effective_config/behavior_policy",
        "recorded",
        "/training_contract/effective_config/behavior_policy",
    ),
    (
        "/training_contract/effective_config/output_name",
        None,
        "/training_contract/effective_config/output_name",
    ),
    (
        "/training_contract/effective_config/output_name",
        "../x",
        "/training_contract/effective_config",
    ),
    (
        "/training_contract/effective_config/lora_alpha",
        1000.0,
        "/training_contract/effective_config",
    ),
]


@pytest.mark.parametrize(("pointer", "value", "place"), CONTRACT)
def test_contract_must_be_that_of_the_collection(
    pointer: str, value: Any, place: str
) -> None:
    error = failure(changed("adapter with contract", S, pointer, value))
    assert error.details["check"] == "summary_contract"
    assert error.details["pointer"] == place


@pytest.mark.parametrize(
    "name",
    [
        "groups_submitted",
        "rollouts_submitted",
        "no_output_rollouts_discarded",
        "no_usable_output_groups_skipped",
        "no_reward_gradient_groups_skipped",
    ],
)
def test_recorded_selection_is_selected_again(name: str) -> None:
    pointer = f"/training_selection/{name}"
    value = look(Parts(GOOD["adapter with contract"]).summary, pointer) + 1
    error = failure(changed("adapter with contract", S, pointer, value))
    assert error.details["check"] == "summary_selection"
    assert error.details["pointer"] == pointer


def test_selection_follows_the_contracts_loss() -> None:
    """With ECHO, groups of equal rewards are kept."""
    echo = {"lambda": 0.05, "env_mask_mode": "env_only", "warning_filter": True}
    parts = Parts(GOOD["adapter with contract"])
    for line in parts.dataset:
        assert len({c["reward"] for c in line["completions"]}) > 1
    put(parts.summary, "/training_contract/effective_config/loss/echo", echo)
    verify(parts.seal())


def test_warnings_and_submission_are_free_text() -> None:
    parts = Parts(GOOD["adapter with contract"])
    put(parts.summary, "/training_selection/warnings", ["x"])
    put(parts.summary, "/training_submission", {"job_id": "1", "any": [None]})
    verify(parts.seal())


def flips(data: bytes, stride: int, seed: int) -> Iterator[bytes]:
    """Yield copies with one bit of one byte changed."""
    rng = random.Random(seed)
    for place in range(rng.randrange(stride), len(data), stride):
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        yield bytes(flipped)


def replaced(files: BundleBytes, where: str, data: bytes) -> BundleBytes:
    return msgspec.structs.replace(files, **{where: data})


@pytest.mark.parametrize("where", [D, R])
def test_any_flipped_bit_of_dataset_or_replay_is_noticed(where: str) -> None:
    expected = {D: "dataset_digest", R: "replay_digest"}[where]
    for data in flips(getattr(PLAIN, where), 149, 3):
        details = failure(replaced(PLAIN, where, data)).details
        assert (details["check"], details["file"]) == (expected, NAMES[where])


def test_any_flipped_bit_of_a_summary_is_noticed_but_in_free_members() -> None:
    """Where a flip leaves a bundle valid, it changed only an unbound member."""
    good = Parts(PLAIN).summary
    survivors = set()
    for data in flips(PLAIN.summary, 17, 4):
        try:
            verify(replaced(PLAIN, S, data))
        except InvalidBundle as error:
            assert error.details["check"]
            continue
        found = msgspec.json.decode(data)
        survivors |= {
            f"/{name}" for name in good if not same(good[name], found.get(name))
        }
    assert survivors <= set(UNBOUND)


def same(left: Any, right: Any) -> bool:
    return compact(left) == compact(right)


def test_pretty_white_space_of_a_summary_is_not_bound() -> None:
    """A flip that turns a space into a line feed changes no value."""
    data = PLAIN.summary.replace(b'"groups": 4', b'"groups":\t4')
    verify(replaced(PLAIN, S, data))


@pytest.mark.parametrize("where", [D, R, S])
def test_truncation_is_noticed(where: str) -> None:
    data = getattr(PLAIN, where)
    rng = random.Random(5)
    cuts = {0, 1, len(data) - 1, len(data) - 2, *rng.sample(range(len(data)), 40)}
    for cut in cuts - {len(data) - 1 if where == S else -1}:
        failure(replaced(PLAIN, where, data[:cut]))
    failure(replaced(PLAIN, where, data + (b"x" if where == S else b"\n")))


@pytest.mark.parametrize("pair", list(itertools.combinations((D, R, S), 2)))
def test_swapped_files_are_noticed(pair: tuple[str, str]) -> None:
    one, two = pair
    swapped = {one: getattr(PLAIN, two), two: getattr(PLAIN, one)}
    failure(msgspec.structs.replace(PLAIN, **swapped))


@pytest.mark.parametrize("where", [D, R])
def test_file_of_another_bundle_is_noticed(where: str) -> None:
    failure(replaced(PLAIN, where, getattr(GOOD["thinking"], where)))


@pytest.mark.parametrize("where", [D, R])
def test_equal_length_swap_is_noticed(where: str) -> None:
    data = getattr(PLAIN, where)
    failure(replaced(PLAIN, where, data.replace(b"illegal", b"lawful!")))
    failure(replaced(PLAIN, where, data[::-1]))


def test_lines_in_another_order_are_noticed() -> None:
    parts = Parts(PLAIN)
    parts.dataset[0], parts.dataset[2] = parts.dataset[2], parts.dataset[0]
    assert failure(parts.seal()).details["file"] == NAMES[D]
    parts = Parts(PLAIN)
    completions = parts.dataset[0]["completions"]
    completions[0], completions[1] = completions[1], completions[0]
    assert failure(parts.seal()).details["check"] == "dataset_provenance"


def test_more_lines_than_groups_are_noticed() -> None:
    parts = Parts(PLAIN)
    parts.dataset.append(parts.dataset[0])
    details = failure(parts.seal()).details
    assert (details["check"], details["expected"], details["found"]) == (
        "dataset_groups",
        4,
        5,
    )


def relined(change: Callable[[bytes], bytes], line: int = 0) -> BundleBytes:
    """Return the plain bundle with the bytes of one line changed, sealed."""
    lines = PLAIN.dataset.splitlines(keepends=True)
    lines[line] = change(lines[line])
    return Parts(PLAIN).seal_bytes(b"".join(lines))


CANONICAL: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "duplicate key": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":1.0,"reward":1.0', 1),
        "dataset_canonical",
    ),
    "duplicate key, other value first": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":9.0,"reward":1.0', 1),
        "dataset_canonical",
    ),
    "reordered members": (
        lambda b: b.replace(b'"role":"tool","content":', b'"content":', 1).replace(
            b',"kind":"observation"', b',"role":"tool","kind":"observation"', 1
        ),
        "dataset_canonical",
    ),
    "longer float": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":1.00', 1),
        "dataset_canonical",
    ),
    "float with exponent": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":1e0', 1),
        "dataset_canonical",
    ),
    "integer for float": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":1', 1),
        "dataset_canonical",
    ),
    "space": (
        lambda b: b.replace(b'"reward":', b'"reward": ', 1),
        "dataset_canonical",
    ),
    "leading space": (lambda b: b" " + b, "dataset_canonical"),
    "carriage return": (
        lambda b: b.replace(b"\n", b"\r\n"),
        "dataset_canonical",
    ),
    "escaped letter": (
        lambda b: b.replace(b'"role":"tool"', b'"role":"t\\u006fol"', 1),
        "dataset_canonical",
    ),
    "escaped slash": (
        lambda b: b.replace(b"http://", b"http:\\/\\/", 1),
        "dataset_canonical",
    ),
    "explicit null for absent": (
        lambda b: b.replace(
            b'"kind":"action"}', b'"kind":"action","tool_call_id":null}', 1
        ),
        "dataset_record",
    ),
    "byte order mark": (lambda b: b"\xef\xbb\xbf" + b, "dataset_record"),
    "blank line": (lambda b: b"\n" + b, "dataset_record"),
    "invalid utf-8": (
        lambda b: b.replace(b"Play counter", b"Play\xffcounter", 1),
        "dataset_record",
    ),
    "lone surrogate": (
        lambda b: b.replace(b"Play counter", b"Play \\ud800", 1),
        "dataset_record",
    ),
    "NaN": (lambda b: b.replace(b'"reward":1.0', b'"reward":NaN', 1), "dataset_record"),
    "overflow": (
        lambda b: b.replace(b'"reward":1.0', b'"reward":1e999', 1),
        "dataset_record",
    ),
    "two documents": (lambda b: b[:-1] + b"{}\n", "dataset_record"),
    "deep": (
        lambda b: b.replace(b'{"role":"system"', b'{"role":' + b"[" * 5000, 1),
        "dataset_record",
    ),
    "no line": (lambda b: b"null\n", "dataset_record"),
    "deep tool calls": (
        lambda b: b.replace(
            b'"},{"role":"user"',
            b'","tool_calls":[' + b"[" * 500 + b"]" * 500 + b']},{"role":"user"',
            1,
        ),
        "dataset_prompt",
    ),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_dataset_lines_are_byte_canonical(name: str) -> None:
    change, check = CANONICAL[name]
    files = relined(change)
    assert files.dataset != PLAIN.dataset
    details = failure(files).details
    assert (details["check"], details["file"]) == (check, NAMES[D])
    assert details["line"] == 1


def test_last_line_must_be_ended() -> None:
    details = failure(relined(lambda b: b[:-1], line=3)).details
    assert (details["check"], details["line"]) == ("dataset_canonical", 4)


@pytest.mark.parametrize("where", [R, S])
def test_duplicate_key_of_a_document_is_refused(where: str) -> None:
    parts = Parts(PLAIN)
    sealed = parts.seal()
    data = getattr(sealed, where)
    for key in (b'"max_steps": 4', b'"name": "counter"', b'"seed": 40'):
        twice = data.replace(key, key + b", " + key, 1)
        assert twice != data
        files = replaced(sealed, S, twice)
        if where == R:
            files = Parts(PLAIN).seal_bytes(sealed.dataset, twice)
        details = failure(files).details
        assert details["check"] == f"{where}_record"
        assert details["file"] == NAMES[where]


def rewritten(value: Any) -> Any:
    """Return a document as another implementation may write it."""
    if isinstance(value, dict):
        return {key: rewritten(value[key]) for key in reversed(value)}
    return [rewritten(part) for part in value] if isinstance(value, list) else value


def spread(value: Any) -> bytes:
    text = msgspec.json.format(compact(rewritten(value)), indent=5)
    return text.replace(b"\n", b"\r\n").replace(b": 1.0", b": 1.00E0") + b"  "


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_of_another_writer_are_compared_by_value(variant: str) -> None:
    parts = Parts(GOOD[variant])
    files = parts.seal_bytes(GOOD[variant].dataset, write=spread)
    assert files.replay != GOOD[variant].replay
    verify(files)


def test_deepest_observation_of_the_wire_still_verifies() -> None:
    """A frame may nest 128 levels; the manifest holds it in records of its own."""
    parts = Parts(GOOD["one group of two"])
    deep: Any = 1
    for _ in range(125):
        deep = [deep]
    put(parts.replay, "/groups/0/candidates/0/final_state", deep)
    verify(parts.seal())
    for _ in range(100):
        deep = [deep]
    put(parts.replay, "/groups/0/candidates/0/final_state", deep)
    assert failure(parts.seal()).details["check"] == "replay_record"


def test_nested_schema_at_the_bound_is_read() -> None:
    parts = Parts(GOOD["one group of two"])
    deep: Any = {}
    for _ in range(126):
        deep = {"not": deep}
    for document in (parts.summary, parts.replay):
        put(document, "/environments/0/schema/state", deep)
    verify(parts.seal())


def test_hostile_action_schema_of_a_bundle_is_refused() -> None:
    parts = Parts(PLAIN)
    for document in (parts.summary, parts.replay):
        put(document, "/environments/1/schema/action", {"$ref": "http://h/x"})
    details = failure(parts.seal()).details
    assert details["check"] == "summary_record"
    assert details["pointer"] == "/environments/1/schema/action"


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/identity/metadata/name", " counter"),
        ("/identity/metadata/name", "c" * 300),
        ("/identity/metadata/name", "c\x1b"),
        ("/identity/openapi_version", "\x00"),
        ("/identity/base_url", "http://" + "h" * 3000),
    ],
)
def test_identity_that_no_rollout_could_carry_is_refused(
    pointer: str, value: str
) -> None:
    """Both documents agree, and the record they would need cannot exist."""
    parts = Parts(PLAIN)
    for document in (parts.summary, parts.replay):
        put(document, f"/environments/0{pointer}", value)
        if pointer.endswith("base_url"):
            url = value.replace("http", "ws", 1) + "/ws"
            put(document, "/environments/0/identity/websocket_url", url)
    failure(parts.seal())


def test_rewards_that_add_up_to_infinity_are_refused() -> None:
    parts = Parts(PLAIN)
    for index in (0, 2, 3):
        put(
            parts.replay,
            f"/groups/0/candidates/1/exchanges/{index}/result",
            {
                "kind": "observation",
                "observation": {"observation": {}, "reward": 1.7e308, "done": False},
            },
        )
    details = failure(parts.seal()).details
    assert details["check"] == "replay_return"
    assert details["expected"] == float("inf")


def test_statistics_that_are_not_finite_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Returns whose sum overflows cannot have been published."""
    stats = msgspec.structs.replace(
        Collection().bundle().summary.stats, mean_episode_return=float("inf")
    )
    monkeypatch.setattr(verification, "rollout_stats", lambda records: stats)
    assert failure(PLAIN).details["check"] == "summary_stats"


def test_token_ids_stand_where_a_rollout_has_them() -> None:
    parts = Parts(GOOD["without tokens"])
    put(parts.dataset, "/0/prompt_token_ids", [1])
    details = failure(parts.seal()).details
    assert (details["check"], details["pointer"]) == (
        "dataset_trace",
        "/prompt_token_ids",
    )


def test_bundle_without_traces_verifies() -> None:
    """Another implementation writes none."""
    parts = Parts(PLAIN)
    for line in parts.dataset:
        del line["prompt_token_ids"]
        for completion in line["completions"]:
            del completion["trace"]
    verified = verify(parts.seal())
    assert (verified.retried_rollouts, verified.traced_rollouts) == (0, 0)


def test_provenance_of_a_single_completion_has_no_place_in_an_episode() -> None:
    messages = Collection().candidate(0, 0).messages
    provenance = msgspec.to_builtins(toy_sample(messages, "x").provenance)
    parts = Parts(PLAIN)
    completion = parts.dataset[0]["completions"][0]
    parts.dataset[0]["completions"][0] = (
        {name: completion[name] for name in ("text", "reward", "trajectory")}
        | {"provenance": provenance}
        | {name: completion[name] for name in ("openenv", "trace")}
    )
    details = failure(parts.seal()).details
    assert details["check"] == "dataset_provenance"
    assert details["pointer"] == "/completions/0/provenance"


def test_zero_with_another_sign_is_another_reward() -> None:
    parts = Parts(PLAIN)
    group = next(
        index
        for index, line in enumerate(parts.dataset)
        if any(c["reward"] == 0.0 for c in line["completions"])
    )
    place = next(
        index
        for index, c in enumerate(parts.dataset[group]["completions"])
        if c["reward"] == 0.0
    )
    put(parts.dataset, f"/{group}/completions/{place}/reward", -0.0)
    assert failure(parts.seal()).details["check"] == "dataset_record"
    put(parts.dataset, f"/{group}/completions/{place}/openenv/episode_return", -0.0)
    assert failure(parts.seal()).details["check"] == "dataset_provenance"


def test_sizes_are_compared_before_digests() -> None:
    details = failure(replaced(PLAIN, D, PLAIN.dataset[:-9])).details
    assert details["expected"] == len(PLAIN.dataset)
    assert details["found"] == len(PLAIN.dataset) - 9
    details = failure(replaced(PLAIN, R, PLAIN.replay[:-1] + b" ")).details
    assert details["expected"] == digest(PLAIN.replay)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 10_000, b'{"schema":["x"]}', b"5"],
    ids=repr,
)
def test_what_is_no_summary_is_refused_as_one(data: bytes) -> None:
    with pytest.raises(InvalidBundle) as caught:
        read_summary(data[:10_000], "s.json")
    assert caught.value.details["check"] in {"summary_schema", "summary_record"}
    assert caught.value.details["file"] == "s.json"


def test_errors_show_a_bounded_part_of_what_was_found() -> None:
    parts = Parts(PLAIN)
    put(parts.dataset, "/0/messages/0/content", "x" * 100_000)
    error = failure(parts.seal())
    assert len(error.details["found"]) < 320
    parts = Parts(PLAIN)
    put(parts.summary, "/" + "k" * 100_000, 1)
    assert len(str(failure(parts.seal()))) < 600


def test_names_of_files_are_those_given() -> None:
    named = msgspec.structs.replace(
        PLAIN, summary_name="/a/s", dataset_name="/a/d", replay_name="/a/r"
    )
    for where, name in ((S, "/a/s"), (D, "/a/d"), (R, "/a/r")):
        with pytest.raises(InvalidBundle) as caught:
            verify(replaced(named, where, b"{}\n"))
        assert caught.value.details["file"] == name
        assert str(caught.value).startswith(name)


def test_checks_are_named_in_order() -> None:
    names = [name for name, _ in verification.CHECKS]
    assert len(set(names)) == len(names) == 10
    assert names[0] == "summary is a supported record"


def test_every_member_of_the_provenance_is_derived_again() -> None:
    collection = Collection(policy=ADAPTER_POLICY)
    bundle = collection.bundle()
    verified = verify(bytes_of(bundle))
    inspection = verified.summary.environments[0]
    group = verified.replay.groups[0]
    setting = RolloutSetting(
        summary=verified.summary,
        inspection=inspection,
        action_schema=ActionSchema(inspection.schema.action),
        seed=group.seed,
        reset_sha256=sha("0"),
        shared_prompt_tokens=0,
    )
    own = _own_provenance(group.candidates[0])
    members = set(OpenEnvRolloutProvenance.__struct_fields__) - {"schema"}
    assert set(setting.provenance) | set(own) == members
    assert not set(setting.provenance) & set(own)


VECTORS = Path(__file__).parents[1] / "vectors"
PUBLISHED = {
    "bundle-prompt-1": "sha256:fd27ed3a02a9484a67d598aa9a561054aec48cbb27d98986a0e05b3565cd3add",
    "bundle-v2": "sha256:fae9d3fe2a64a6e5653f7b475f0752efea2451926cb0036d20e1e7e889bb0672",
    "bundle-v3": "sha256:52222e6d34c2a73ec272820e5cd8b701a2044976da6de4c80e39088dd13b54d7",
    "bundle-v4": "sha256:c0903f92d5bdfde81447d3588156327ab1a9f01911b616789163ed0d3715bef6",
}
"""Every directory of vectors, and the digest of its summary."""


def test_every_published_bundle_is_listed() -> None:
    assert {path.name for path in VECTORS.glob("bundle-*")} == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_bundle_verifies_for_ever(name: str) -> None:
    """Bytes made once by an earlier version; new code must go on accepting them."""
    files = BundleBytes(
        summary=(VECTORS / name / NAMES[S]).read_bytes(),
        dataset=(VECTORS / name / NAMES[D]).read_bytes(),
        replay=(VECTORS / name / NAMES[R]).read_bytes(),
    )
    assert digest(files.summary) == PUBLISHED[name]
    assert len(files.summary + files.dataset + files.replay) < 300_000
    verified = verify(files)
    endings = {record.termination for record in verified.summary.rollouts}
    assert endings == set(EpisodeTermination)
