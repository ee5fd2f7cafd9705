"""What a collection is asked for: environments, controls, and where the bundle goes."""

from __future__ import annotations

import msgspec

from kiln_core.bundle import BundlePaths
from kiln_core.canonical import JsonValue
from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.drive.http import Credential
from kiln_core.plan import CollectionControls

__all__ = ["CollectionRequest", "EnvironmentTarget"]


class EnvironmentTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where an environment is, and how to authenticate."""

    base_url: str
    credential: Credential | None = None


class CollectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a collection needs but the policy."""

    environments: tuple[EnvironmentTarget, ...]
    controls: CollectionControls
    reset_templates: tuple[dict[str, JsonValue], ...]
    """Seed-free, one per environment."""
    adapter: str | None = None
    """Adapter the policy must answer with; None is the base model."""
    guided: bool = True
    keep_tokens: bool = True
    paths: BundlePaths = msgspec.field(default_factory=BundlePaths)
    training_contract: OpenEnvTrainingContract | None = None
