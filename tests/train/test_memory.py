from __future__ import annotations

from types import SimpleNamespace

import pytest

from kiln_train_jax import memory


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_given_back_where_the_library_can(monkeypatch, known):
    asked = []
    library = SimpleNamespace(malloc_trim=asked.append) if known else SimpleNamespace()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    memory.give_back()
    assert asked == ([0] if known else [])


def test_real_library_is_asked_without_harm():
    memory.give_back()
