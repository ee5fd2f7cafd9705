"""Open bandit: the bandit, whose schema does not bound the arm.

An arm that does not exist therefore fits the schema, passes every local check and
reaches the server, which refuses it with EXECUTION_ERROR; the episode goes on. Clients
test with it that they recover from an error only the environment can see.
"""

from __future__ import annotations

from examples.environments.game import Game
from examples.environments.synthesis.bandit import (
    BEST_ARM,
    Bandit,
    BanditFacts,
    OpenPull,
)

GAME = Game(
    name="bandit_open",
    kind="synthesis",
    description="Pull the arm, 0 to 3, that pays best.",
    move=OpenPull,
    deal=lambda seed, _level: Bandit(seed),
    play=lambda _text: OpenPull(arm=BEST_ARM),
    steps=1,
    facts=BanditFacts,
    levels=1,
)
