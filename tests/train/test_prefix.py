from __future__ import annotations

from kiln_train_jax.prefix import PrefixIndex, block_name, root_name


def test_name_depends_on_everything_before():
    base, other = root_name(None), root_name("sha256:aa")
    one = block_name(base, [1, 2])
    assert one == block_name(base, [1, 2])
    assert len({one, block_name(other, [1, 2]), block_name(base, [2, 1])}) == 3
    assert block_name(one, [3]) != block_name(block_name(base, [9]), [3])


def test_least_recently_used_block_is_given_up():
    index = PrefixIndex(2)
    assert [index.claim(b"a"), index.claim(b"b")] == [0, 1]
    assert index.find(b"a") == 0
    assert index.claim(b"c") == 1
    assert index.find(b"b") is None
    assert index.find(b"a") == 0
    assert (index.hits, index.misses) == (2, 1)


def test_cleared_index_starts_over():
    index = PrefixIndex(2)
    index.claim(b"a")
    index.clear()
    assert index.find(b"a") is None
    assert index.claim(b"b") == 0
