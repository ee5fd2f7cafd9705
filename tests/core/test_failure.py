"""`kiln_core/failure.py`: every error of ours, at every stage, has one diagnosis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import errors, limits
from kiln_core.canonical import compact, read_record
from kiln_core.errors import (
    CapacityExhausted,
    EpisodeUnfit,
    HttpStatusError,
    IdentityDrift,
    KilnError,
    PolicyError,
    RemoteProtocolError,
    SessionRefused,
    TrainingEvidenceInvalid,
    TransportError,
    UsageError,
)
from kiln_core.failure import (
    CODES,
    FALLBACKS,
    HINTS,
    RETRYABLE,
    FailureCode,
    FailureStage,
    OpenEnvRunFailure,
    classify_failure,
    run_failure,
    shortened,
)
from tests.core.test_errors import CLASSES

NOW = 1_700_000_000_000
COLLECTION = FailureStage.COLLECTION


def diagnosed(
    error: BaseException, stage: FailureStage = COLLECTION
) -> OpenEnvRunFailure:
    failure = classify_failure(error, stage, NOW)
    assert read_record(compact(failure), OpenEnvRunFailure, "failure") == failure
    return failure


def caused(outer: BaseException, *inner: BaseException) -> BaseException:
    link = outer
    for cause in inner:
        link.__cause__ = cause
        link = cause
    return outer


EXPECTED: dict[str, tuple[str, str]] = {
    # class: code while collecting, code while training
    "KilnError": ("collection_failed", "training_failed"),
    "UsageError": ("persisted_contract_invalid", "persisted_contract_invalid"),
    "OutputExists": ("artifact_publication_failed", "artifact_publication_failed"),
    "OutputUnwritable": ("artifact_publication_failed", "artifact_publication_failed"),
    "ArtifactError": ("environment_protocol_error", "training_failed"),
    "ProtocolError": ("environment_protocol_error", "environment_protocol_error"),
    "LocalProtocolError": ("internal_error", "internal_error"),
    "EnvironmentFault": ("environment_protocol_error", "environment_protocol_error"),
    "CapacityExhausted": (
        "environment_capacity_exhausted",
        "environment_capacity_exhausted",
    ),
    "EpisodeUnfit": ("collection_failed", "collection_failed"),
    "TransportError": ("environment_unavailable", "environment_unavailable"),
    "CredentialReflected": ("environment_protocol_error", "environment_protocol_error"),
    "CapacityAtUpgrade": (
        "environment_capacity_exhausted",
        "environment_capacity_exhausted",
    ),
    "DriftError": ("collection_failed", "training_failed"),
    "IdentityDrift": ("environment_identity_changed", "environment_identity_changed"),
    "LimitError": ("collection_failed", "training_failed"),
    "PolicyError": ("collection_failed", "training_failed"),
    "AdmissionError": ("collection_failed", "training_failed"),
    "TrainingError": ("training_failed", "training_failed"),
    "TrainingEvidenceInvalid": (
        "training_evidence_invalid",
        "training_evidence_invalid",
    ),
    "RunNotRecorded": ("run_admission_failed", "run_admission_failed"),
}


@pytest.mark.parametrize("error_type", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_a_diagnosis(error_type: type[KilnError]) -> None:
    row = next(
        EXPECTED[t.__name__] for t in error_type.__mro__ if t.__name__ in EXPECTED
    )
    for stage, code in zip((COLLECTION, FailureStage.TRAINING), row, strict=True):
        failure = diagnosed(error_type("it broke"), stage)
        assert (failure.code, failure.stage) == (code, stage)
        assert failure.message == "it broke"
        assert failure.hint
        assert failure.occurred_unix_ms == NOW


@pytest.mark.parametrize("stage", FailureStage)
def test_untyped_error_falls_back_to_its_stage(stage: FailureStage) -> None:
    failure = diagnosed(RuntimeError("token abc of a private file"), stage)
    assert failure.code is FALLBACKS[stage]
    assert failure.message == (
        "failed unexpectedly (RuntimeError); the server's log has more"
    )
    retryable = {"internal_error", "artifact_publication_failed", "training_failed"}
    retryable |= {"post_evaluation_failed"}
    assert failure.retryable is (failure.code not in retryable)


@pytest.mark.parametrize("stage", FailureStage)
@pytest.mark.parametrize("error_type", CLASSES, ids=lambda c: c.__name__)
def test_every_error_at_every_stage_is_a_record(
    error_type: type[KilnError], stage: FailureStage
) -> None:
    failure = diagnosed(error_type("it broke", hint=""), stage)
    assert failure.hint == HINTS[failure.code]
    if CODES.get(error_type) is not None:
        assert failure.code is CODES[error_type]


def test_tables_are_total() -> None:
    assert set(FALLBACKS) == set(FailureStage)
    assert set(HINTS) == set(FailureCode)
    assert set(FailureCode) - set(RETRYABLE) == {FailureCode.ENVIRONMENT_UNAVAILABLE}
    produced = {code for code in CODES.values() if code} | set(FALLBACKS.values())
    assert produced == set(FailureCode)


@pytest.mark.parametrize("code", RETRYABLE)
def test_every_code_can_be_stated(code: FailureCode) -> None:
    failure = run_failure(code, FailureStage.RESTORATION, "m", NOW)
    assert failure.retryable is RETRYABLE[code]
    assert failure.hint == HINTS[code]
    assert run_failure(code, FailureStage.RESTORATION, "m", -1).occurred_unix_ms == 0
    told = run_failure(code, FailureStage.RESTORATION, "m", NOW, hint="do this")
    assert told.hint == "do this"


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        *((s, True) for s in (408, 425, 429, 500, 502, 503, 504)),
        *((s, False) for s in (200, 301, 400, 401, 403, 404, 422, 501, 505, 599)),
    ],
)
def test_http_status_decides(status: int, retryable: bool) -> None:
    failure = diagnosed(HttpStatusError("no", http_status=status))
    assert (failure.code, failure.retryable, failure.http_status) == (
        "environment_unavailable",
        retryable,
        status,
    )


def test_transport_failure_without_a_status_is_retryable() -> None:
    assert diagnosed(TransportError("no")).retryable is True


def test_wire_code_is_kept() -> None:
    failure = diagnosed(SessionRefused("no", protocol_code="FACTORY_ERROR"))
    assert (failure.code, failure.protocol_code) == (
        "environment_protocol_error",
        "FACTORY_ERROR",
    )


@pytest.mark.parametrize("error_type", [SessionRefused, RemoteProtocolError])
def test_wire_code_of_a_full_server_is_capacity(error_type: type[KilnError]) -> None:
    failure = diagnosed(error_type("full", protocol_code="CAPACITY_REACHED"))
    assert (failure.code, failure.protocol_code, failure.retryable) == (
        "environment_capacity_exhausted",
        "CAPACITY_REACHED",
        True,
    )


@pytest.mark.parametrize(
    "details",
    [
        {"protocol_code": "lower"},
        {"protocol_code": "A\n"},
        {"protocol_code": 7},
        {"protocol_code": ""},
        {"http_status": -1},
        {"http_status": 65_536},
        {"http_status": "404"},
    ],
)
def test_hostile_evidence_is_left_out(details: dict[str, object]) -> None:
    failure = diagnosed(RemoteProtocolError("no", **details))
    assert b"protocol_code" not in compact(failure)
    assert b"http_status" not in compact(failure)


def test_status_of_our_own_server_is_no_evidence() -> None:
    failure = diagnosed(PolicyError("no", http_status=503))
    assert failure.code is FailureCode.COLLECTION_FAILED
    assert b"http_status" not in compact(failure)


def test_typed_cause_decides_and_the_outer_words_stay() -> None:
    inner = HttpStatusError("inner", http_status=404)
    failure = diagnosed(caused(KilnError("outer"), OSError(), inner))
    assert (failure.code, failure.message) == ("environment_unavailable", "outer")
    assert failure.http_status == 404


def test_first_typed_error_of_the_chain_decides() -> None:
    failure = diagnosed(caused(EpisodeUnfit("outer"), TransportError("inner")))
    assert failure.code is FailureCode.COLLECTION_FAILED


def test_capacity_wins_over_what_wraps_it() -> None:
    failure = diagnosed(caused(TransportError("outer"), CapacityExhausted("full")))
    assert failure.code is FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED


def test_evidence_wins_over_capacity() -> None:
    chain = caused(CapacityExhausted("full"), TrainingEvidenceInvalid("receipt"))
    assert diagnosed(chain).code is FailureCode.TRAINING_EVIDENCE_INVALID


def test_group_is_searched() -> None:
    group = ExceptionGroup(
        "g", [ValueError(), ExceptionGroup("h", [IdentityDrift("d")])]
    )
    failure = diagnosed(group)
    assert (failure.code, failure.message) == ("environment_identity_changed", "d")


def test_context_without_cause_decides_nothing() -> None:
    error = RuntimeError()
    error.__context__ = TransportError("earlier")
    failure = diagnosed(error, FailureStage.ORCHESTRATION)
    assert failure.code is FailureCode.INTERNAL_ERROR


def test_circle_of_causes_ends() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert diagnosed(one).code is FailureCode.COLLECTION_FAILED


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("http://user:pw@host/x failed", "http://host/x failed"),
        ("ws://u@h:1 and https://p:q@i", "ws://h:1 and https://i"),
        ("http://u:p@w@h/x", "http://h/x"),
        ("http://h/x?token=1#f failed", "http://h/x failed"),
        ("'http://h/?k=v'", "'http://h/'"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [removed]"),
        ("echoed t0ken back", "echoed [removed] back"),
        ("is it up? mail me@host", "is it up? mail me@host"),
    ],
)
def test_message_holds_no_secret(said: str, shown: str) -> None:
    failure = classify_failure(
        TransportError(said, hint=said), COLLECTION, NOW, secrets=("", "t0ken")
    )
    assert (failure.message, failure.hint) == (shown, shown)


@given(st.text(), st.integers(3, 40))
def test_cut_keeps_whole_characters(text: str, limit: int) -> None:
    cut = shortened(text, limit)
    assert len(cut.encode()) <= limit
    safe = text.encode(errors="backslashreplace").decode()
    if cut != safe:
        assert cut.endswith("...")
        assert safe.startswith(cut[:-3])
        assert len(safe.encode()) > limit
        assert len(cut.encode()) > limit - 4


def test_long_message_is_cut_to_its_bound() -> None:
    failure = diagnosed(UsageError("é" * limits.MAX_FAILURE_MESSAGE_BYTES))
    assert len(failure.message.encode()) <= limits.MAX_FAILURE_MESSAGE_BYTES
    assert failure.message.endswith("é...")


def test_surrogates_do_not_break_the_record() -> None:
    assert "\\ud800" in diagnosed(UsageError("\ud800")).message


def test_table_names_only_errors() -> None:
    assert all(issubclass(error_type, errors.KilnError) for error_type in CODES)
