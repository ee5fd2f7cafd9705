"""A bundle of an older summary version is replayed like any other."""

from __future__ import annotations

import anyio
import pytest

from kiln_core.drive.collect import collect
from kiln_core.drive.replay import ReplayRequest, replay_bundle
from kiln_core.verify import VerifiedBundle, verify_bundle
from tests.core.bundles import Parts, bytes_of
from tests.drive.collection import QUICK, adds, collection
from tests.simulators.environment import Simulator, observation, says

pytestmark = pytest.mark.anyio


async def older(url: str) -> VerifiedBundle:
    """Collect, and write the bundle as version 3 did: nobody says who acted."""
    with anyio.fail_after(10):
        bundle = await collect(collection(url), adds(1, 3), times=QUICK)
    parts = Parts(bytes_of(bundle))
    parts.summary["schema"] = "kiln.openenv-rollout-summary.v3"
    del parts.summary["behavior_policy"]
    for line in parts.dataset:
        for rollout in line["completions"]:
            del rollout["openenv"]["behavior_policy"]
    return verify_bundle(parts.seal())


async def test_older_bundle_replays_exactly() -> None:
    async with Simulator().serving() as server:
        request = ReplayRequest(bundle=await older(server.url))
        with anyio.fail_after(10):
            outcome = await replay_bundle(request, times=QUICK)
    assert outcome.report is not None
    assert outcome.report.rollouts == 2


async def test_older_bundle_drifts_like_any_other() -> None:
    async with Simulator().serving() as server:
        request = ReplayRequest(bundle=await older(server.url))
        server.script = {"step": says(observation({"total": 99}, 1.0))}
        with anyio.fail_after(10):
            outcome = await replay_bundle(request, times=QUICK)
    assert outcome.drifted_candidates == 2
