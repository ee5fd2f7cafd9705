"""A pack of small environments served by the OpenEnv SDK.

`synthesis` has made-up tasks, `arcade` games, `math` families of exact problems.
`python -m examples.environments inventory` lists them, and `serve NAME` serves one.
Rules are plain functions of a seed (`game`), the SDK is in one module (`hosting`), and
every environment has a player that needs no model (`players`).
"""

from __future__ import annotations

MAX_SESSIONS = 64
"""Sessions a server accepts at once unless told otherwise."""
