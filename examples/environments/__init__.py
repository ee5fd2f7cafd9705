"""Three small environments served by the OpenEnv SDK.

`counter` takes several steps, `bandit` is random, `signals` has something to learn.
Start one with `python -m examples.environments serve signals`. Each is the module of
its name; this one does not import the SDK, which takes seconds.
"""

from __future__ import annotations

DESCRIPTIONS = {
    "bandit": "Pull the arm that pays best.",
    "counter": "Add amounts to reach a total of exactly 4.",
    "signals": "Press the lamp of the ticket's colour.",
}
"""What a policy is told about each environment; it is part of every prompt."""

MAX_SESSIONS = 64
"""Sessions a server accepts at once unless told otherwise."""
