"""Rollout summaries of versions 2 to 4: still read, never written.

They differ from version 5 in what they bind. Version 2 has one reset object for all
environments, version 3 an ordered plan of them, version 4 may hold the admitted
training contract; none of them says which policy acted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from msgspec import UNSET, UnsetType

from kiln_core.canonical import Sha256
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import OpenEnvRolloutSummary

__all__ = ["LEGACY_SCHEMAS", "LegacyRolloutSummary", "check_version"]

SUMMARY_V2: Final = "kiln.openenv-rollout-summary.v2"
SUMMARY_V3: Final = "kiln.openenv-rollout-summary.v3"
SUMMARY_V4: Final = "kiln.openenv-rollout-summary.v4"
LEGACY_SCHEMAS: Final = (SUMMARY_V2, SUMMARY_V3, SUMMARY_V4)

REQUIRED: Final = {
    SUMMARY_V2: ("reset_options_sha256",),
    SUMMARY_V3: ("reset_plan_sha256",),
    SUMMARY_V4: ("reset_plan_sha256",),
}
"""Members a version must have beside those that all share."""
FORBIDDEN: Final = {
    SUMMARY_V2: ("reset_plan_sha256", "training_contract", "behavior_policy"),
    SUMMARY_V3: ("reset_options_sha256", "training_contract", "behavior_policy"),
    SUMMARY_V4: ("reset_options_sha256", "behavior_policy"),
}
"""Members a version did not know, so that it may not claim them."""


class LegacyRolloutSummary(OpenEnvRolloutSummary, frozen=True, kw_only=True):
    """A summary of version 2, 3 or 4; every other member is that of version 5."""

    schema: Literal[  # type: ignore[assignment]  # an older version of the record
        "kiln.openenv-rollout-summary.v2",
        "kiln.openenv-rollout-summary.v3",
        "kiln.openenv-rollout-summary.v4",
    ]
    # wider than in version 5, where both are required
    behavior_policy: BehaviorPolicyIdentity | UnsetType = UNSET  # type: ignore[assignment]
    reset_plan_sha256: Sha256 | UnsetType = UNSET  # type: ignore[assignment]
    reset_options_sha256: Sha256 | UnsetType = UNSET
    """Version 2: digest of the one seed-free reset object of all environments."""


def check_version(summary: OpenEnvRolloutSummary, fail: Callable[..., Any]) -> None:
    """Check that a summary has the members of its version and no later ones.

    Args:
        summary: Of any version; version 5 is held by its record alone.
        fail: Called for the first contradiction.
    """
    if not isinstance(summary, LegacyRolloutSummary):
        return
    version = summary.schema.rpartition(".")[2]
    for names, wanted in (
        (REQUIRED[summary.schema], "present"),
        (FORBIDDEN[summary.schema], "absent"),
    ):
        for name in names:
            found = "absent" if getattr(summary, name) is UNSET else "present"
            if found != wanted:
                fail(
                    "summary_version",
                    f"/{name}",
                    f"in a {version} summary it must be {wanted}",
                    wanted,
                    found,
                )
