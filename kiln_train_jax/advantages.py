"""Group-relative advantages.

References: Shao et al. 2024, "DeepSeekMath", 2402.03300, section 4.1 (`vanilla`);
Liu et al. 2025, "Understanding R1-Zero-Like Training", 2503.20783, equation 5
(`dr_grpo`, which drops the division by the standard deviation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

STD_FLOOR: Final = 1e-8


def group_advantages(
    rewards: Sequence[float], mode: Literal["dr_grpo", "vanilla"]
) -> np.ndarray:
    """Return how much better each candidate did than its group.

    Whether a group has any variance is decided on the exact 64-bit rewards before any
    cast: the float32 standard deviation of equal rewards is rounding noise that would
    otherwise be divided by itself.

    Args:
        rewards: One per candidate.
        mode: Whether the difference is divided by the standard deviation.

    Returns:
        float32 `[candidates]`, zero mean; all zero when the rewards are equal.
    """
    exact = np.asarray(rewards, np.float64)
    if np.all(exact == exact[0]):
        return np.zeros(len(exact), np.float32)
    centred = exact - exact.mean()
    if mode == "vanilla":
        centred = centred / (exact.std() + STD_FLOOR)
    advantages: np.ndarray = centred.astype(np.float32)
    return advantages
