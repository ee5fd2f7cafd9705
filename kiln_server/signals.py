"""Which signals end a server."""

from __future__ import annotations

import signal

__all__ = ["ending_signals"]


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a server.

    A hang-up is not among them where ``nohup`` says so.
    """
    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending
