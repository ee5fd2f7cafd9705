"""Every bound of Kiln as a named constant, and the retained-bytes budget.

Units stand in the names. Values are those of the artifact contract
(``docs/artifacts.md``); a test compares the schema-visible ones with the structs.
"""

from __future__ import annotations

from kiln_core.errors import LimitError

__all__ = ["Lease", "RetainedBudget"]

KIB = 1024
MIB = 1024 * KIB

MAX_SEED = 2**63 - 1
"""Largest group seed: the signed 63-bit bound, not its rounding to a double."""
MAX_GENERATION_SEED = 2**64 - 1
"""Largest per-turn generation seed: products wrap at 64 bits."""

MAX_ENVIRONMENTS = 64
MAX_GROUPS = 16_384
MAX_GROUP_SIZE = 256
MAX_ROLLOUTS = 16_384
"""Bound of groups times group size."""
MAX_STEPS = 256
MAX_CONCURRENCY = 256
MAX_ACTION_TOKENS = 16_384
MAX_RECOVERABLE_ERRORS = 64
MAX_CAPACITY_WAIT_SECONDS = 3_600
MAX_EPISODE_RETRIES = 16

MAX_ARTIFACT_BYTES = 256 * MIB
"""Bound of each of the three bundle files."""
RETAINED_BUDGET_BYTES = 512 * MIB
"""Bound of everything a collection keeps in memory."""
CONTRACT_RESERVE_BYTES = 1 * MIB
"""Part of the budget that is kept for the training contract."""
MAX_RESET_OPTIONS_BYTES = 16 * MIB - 1024
MAX_TRAINING_CONFIG_BYTES = 1 * MIB
MAX_TRAINER_EVIDENCE_BYTES = 4 * MIB
"""Bound of a training receipt, and of an adapter manifest."""
MAX_RUN_REQUEST_BYTES = 1 * MIB
MAX_RUN_RECORD_BYTES = 2 * MIB
"""Bound of ``run.json``; a larger one is not read."""

MAX_SERVER_MESSAGE_BYTES = 512 * KIB
"""Bound of a frame from an environment, after decompression."""
MAX_CLIENT_MESSAGE_BYTES = 16 * MIB
"""Bound of a frame to an environment."""
MAX_DISCOVERY_BYTES = 2 * MIB
MAX_CONTROL_PLANE_BYTES = 16 * MIB
"""Bound of one JSON answer of the Kiln server."""
MAX_ENVIRONMENT_NAMES = 1_024
MAX_TASK_SPLITS = 1_024
"""Bound of the splits that a task provider lists."""
MAX_TASK_NAME_BYTES = 256
"""Bound of the name of an environment or a split in a Task route."""
MAX_TASK_COLLECTION = 16_384
"""Bound of the rows in one raw answer of a task provider."""
MAX_TASK_PAGE = 200
"""Bound of the rows of a page that a command shows."""
TASK_PAGE = 50
"""Rows of a page, by default."""
MAX_TASK_COUNT = 2**63 - 1
"""Bound of the number of rows a provider may claim, and of where a page starts."""
MAX_JSON_DEPTH = 128
"""Nesting of one document from outside: a frame, a reply, a discovery document."""
MAX_ARTIFACT_DEPTH = MAX_JSON_DEPTH + 32
"""Nesting of a bundle file, which holds such documents inside records."""
UNCOUNTED_BYTES = 16 * MIB
"""A document up to this size is decoded without counting what it holds."""
MAX_DECODED_VALUES = 32 * MIB
"""Bound of the values that one larger document or dataset line may hold."""
MAX_DECODED_CONTAINERS = 4 * MIB
"""The same for objects and arrays, each of which takes some 80 bytes in memory."""
MAX_IDENTITY_TEXT_BYTES = 256
MAX_URL_BYTES = 2_048

MAX_SCHEMA_BYTES = 256 * KIB
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_EXPANSION = 10_000
"""Bound of subschemas, and of those applied in place after following references."""
MAX_SCHEMA_CHAIN = 128
"""Bound of references and combinators between a subschema and what it applies."""
MAX_SCHEMA_PATTERNS = 64
MAX_PATTERN_BYTES = 128 * KIB
"""Bound of one compiled regular expression."""
MAX_ACTION_DEPTH = 32
MAX_ACTION_WORK = 500_000
"""Bound of subschema visits that checking one action may take."""
MAX_DIAGNOSED_WORK = 2_000
"""The same for a diagnosis, which builds a tree of all errors."""
MAX_ACTION_ISSUES = 4
MAX_ISSUE_BYTES = 192
MAX_FAILURE_MESSAGE_BYTES = 4 * KIB

HTTP_CONNECT_SECONDS = 10.0
HTTP_TOTAL_SECONDS = 60.0
EXCHANGE_SECONDS = 60.0
"""Deadline of one WebSocket exchange, and of its connection."""
KEEPALIVE_MIN_SECONDS = 0.01
KEEPALIVE_MAX_SECONDS = 10.0
CAPACITY_BACKOFF_SECONDS = 0.25
CAPACITY_BACKOFF_MAX_SECONDS = 2.0
CONTROL_PLANE_SECONDS = 180.0
RECOVERY_SECONDS = 10.0
"""Wait for an environment to answer again before a lost episode's next attempt."""
EPISODE_RETRIES = 2
"""Fresh attempts of a candidate whose session was lost, by default."""


class RetainedBudget:
    """Counts the bytes a collection keeps; refuses the one that is too many.

    Every retained piece is charged as canonical bytes when it arrives. What one episode
    retains is charged through a `Lease`, so that a lost attempt gives all of it back.
    """

    def __init__(
        self, limit_bytes: int = RETAINED_BUDGET_BYTES - CONTRACT_RESERVE_BYTES
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def charge(self, size_bytes: int, what: str) -> None:
        """Add ``size_bytes`` for ``what``.

        Raises:
            LimitError: The budget would be exceeded; nothing is charged then.
        """
        if self.used_bytes + size_bytes > self.limit_bytes:
            raise LimitError(
                f"keeping {what} would exceed the retained-data budget of "
                f"{self.limit_bytes} bytes",
                hint="reduce group size, concurrency, steps or environment payloads",
                limit_bytes=self.limit_bytes,
                used_bytes=self.used_bytes,
                refused_bytes=size_bytes,
            )
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back bytes charged before."""
        self.used_bytes -= size_bytes


class Lease:
    """What one owner has charged to a budget, so that it can be given back whole."""

    def __init__(self, budget: RetainedBudget) -> None:
        self._budget = budget
        self.used_bytes = 0

    def charge(self, size_bytes: int, what: str) -> None:
        """Charge the budget and remember it.

        Raises:
            LimitError: The budget would be exceeded.
        """
        self._budget.charge(size_bytes, what)
        self.used_bytes += size_bytes

    def settle(self, size_bytes: int, what: str) -> None:
        """Replace all that was charged by the size of a compacter form.

        Raises:
            LimitError: The compacter form is larger, and too large.
        """
        self.close()
        self.charge(size_bytes, what)

    def close(self) -> None:
        """Give everything back."""
        self._budget.release(self.used_bytes)
        self.used_bytes = 0
