from __future__ import annotations

import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_core.errors import FileUnreadable, InvalidRecord
from kiln_train_jax.attention import FullContext
from kiln_train_jax.folder import TURN_TEMPLATE, load_folder
from kiln_train_jax.gguf_file import read_gguf
from kiln_train_jax.gguf_model import PRE_TOKENIZERS, tokenizer_document
from kiln_train_jax.tokenizer import (
    SPECIAL_BYTE_TOKENS,
    THINK_TOKENS,
    Tokenizer,
    byte_alphabet,
)
from kiln_train_jax.weights import ReadOnce, tensors_digest
from tests.train.parity import PROVENANCE, script, vectors, write_folder

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "lm_head": "output",
}
TOKENS = jnp.asarray(script.prompt_tokens(), jnp.int32)
PLACES = jnp.arange(script.PROMPT, dtype=jnp.int32)[None]


def stored_name(name):
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if "layers" in parts else ""
    return f"{layer}{NAMES[parts[-2]]}.weight"


def interleaved(rows, heads):
    """Put rows in the order of the llama architecture, as its converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def vocabulary():
    """Return tokens and types: bytes, then special and thinking, then unused."""
    names = [*SPECIAL_BYTE_TOKENS, *THINK_TOKENS]
    spare = [f"[PAD{place}]" for place in range(256 + len(names), 272)]
    kinds = [1] * 256 + [3 if name in SPECIAL_BYTE_TOKENS else 4 for name in names]
    return [*byte_alphabet(), *names, *spare], kinds + [5] * len(spare)


def write(path, case="llama-tied", *, encode=None, skip=(), pre="gpt-2", **changes):
    """Write a case as a GGUF file; `changes` are metadata keys with `__` for dots."""
    shape, tensors = script.shape_of(case), script.seeded_tensors(case)
    kind, tokens = shape["model_type"], vocabulary()
    writer = gguf.GGUFWriter(path, changes.pop("architecture", kind))
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(shape.get("rope", 1e4))
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    if "tokens" not in skip:
        writer.add_tokenizer_model(changes.pop("tokenizer", "gpt2"))
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(changes.pop("tokens", tokens[0]))
        writer.add_token_types(tokens[1])
        writer.add_array("tokenizer.ggml.merges", changes.pop("merges", ["a b"])[1:])
    if "template" not in skip:
        writer.add_chat_template(TURN_TEMPLATE)
    if "end" not in skip:
        writer.add_eos_token_id(266)
    for key, value in changes.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    for name, tensor in script.seeded_tensors(case).items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            of = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensors[name] = interleaved(tensor, shape[of])
    for name, tensor in tensors.items():
        if name in skip:
            continue
        plain = encode is None or tensor.ndim == 1 or tensor.shape[1] % 32
        data = tensor if plain else gguf.quants.quantize(tensor, encode)
        raw = None if plain else encode
        writer.add_tensor(stored_name(name), data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(loaded):
    hidden, _ = loaded.model(TOKENS, PLACES, FullContext())
    return np.asarray(loaded.model.logits(hidden)[0])


@pytest.mark.parametrize("case", ["llama-one-kv", "llama-tied", "qwen3-tied-wide"])
def test_logits_are_those_of_transformers(tmp_path, case):
    """So query and key rows are put back for llama, and left alone for qwen3."""
    loaded = load_folder(str(write(tmp_path / "small.gguf", case)))
    np.testing.assert_allclose(
        logits_of(loaded), vectors(case)["logits"], rtol=0, atol=1e-4
    )


def test_file_means_what_its_folder_means(tmp_path):
    case = "llama-one-kv"
    from_file = load_folder(str(write(tmp_path / "small.gguf", case)))
    from_folder = load_folder(str(write_folder(tmp_path / "small", case)))
    assert from_file.config == from_folder.config
    assert from_file.served_model_id == "small"
    assert (from_file.end_id, from_file.stop_ids) == (266, frozenset({266}))
    ours, theirs = from_file.tokenizer, from_folder.tokenizer
    assert (ours.added, ours.special_ids) == (theirs.added, theirs.special_ids)
    for text in (*script.TEXTS, "<|end|></think>"):
        assert ours.encode_text(text) == theirs.encode_text(text)
        assert ours.encode_markup(text) == theirs.encode_markup(text)
    assert not ours.has(271)


def test_digest_sees_tensors_and_configuration(tmp_path):
    digests = [
        load_folder(str(write(tmp_path / f"{place}.gguf", **change))).base_sha256
        for place, change in enumerate(
            [{}, {}, {"general__name": "x"}, {"encode": BF16}]
        )
    ]
    assert digests[0] == digests[1]
    assert digests[0] == digests[2]
    assert digests[0] != digests[3]


BF16, F16, Q8 = (
    getattr(gguf.GGMLQuantizationType, name) for name in ("BF16", "F16", "Q8_0")
)


@pytest.mark.parametrize(
    ("encode", "tolerance"), [(F16, 1e-3), (BF16, 8e-3), (Q8, 2e-2)], ids=str
)
def test_encodings_are_undone(tmp_path, encode, tolerance):
    file = read_gguf(write(tmp_path / "small.gguf", "qwen3-one-kv", encode=encode))
    stored = file.dequantised("blk.1.ffn_up.weight")
    expected = script.seeded_tensors("qwen3-one-kv")[
        "model.layers.1.mlp.up_proj.weight"
    ]
    assert stored.dtype == np.float32
    np.testing.assert_allclose(stored, expected, atol=tolerance)


def test_reading_once_digests_as_reading_all():
    tensors = script.seeded_tensors("llama-tied")
    once = ReadOnce(tensors)
    assert [once[name] is tensors[name] for name in once] == [True] * len(once)
    assert once.digest({"a": 1}) == tensors_digest({"a": 1}, tensors)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_pre_tokenizer_cuts_as_transformers_does(pre):
    tokens, merges = script.small_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|hi|>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3],
        "tokenizer.ggml.merges": merges,
    }
    ours = Tokenizer(tokenizer_document(metadata), vocab_size=len(tokens) + 1)
    found = [ours.encode_text(text) for text in script.TEXTS]
    assert found == PROVENANCE["token_ids"][pre]
    for text in script.TEXTS:
        normal = "caf\u00e9 na" not in text or pre != "qwen2"  # which normalises
        assert not normal or ours.decode(ours.encode_text(text)) == text
    assert len(ours.encode_text("<|hi|>")) > 1
    assert ours.encode_markup("<|hi|>") == [len(tokens)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not known"),
        ({"tokenizer": "llama"}, "tokenizer 'llama'"),
        ({"skip": ["tokens"]}, "no tokenizer"),
        ({"skip": ["template"]}, "no chat template"),
        ({"skip": ["end"]}, "end token"),
        ({"tokens": vocabulary()[0][:-1]}, "not whole"),
        ({"tokens": ["a"] * 272}, "not whole"),
        ({"merges": ["", "ab"]}, "merge of one part"),
        ({"merges": ["", "a nothing"]}, r"tokenizer\.json cannot be used"),
        ({"skip": ["model.norm.weight"]}, r"model\.norm\.weight is missing"),
        ({"skip": ["model.embed_tokens.weight"]}, "token_embd"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__attention__sliding_window": 64}, "sliding window"),
        ({"llama__rope__dimension_count": 4}, "rope.dimension_count"),
    ],
    ids=str,
)
def test_file_of_another_kind_is_refused(tmp_path, change, words):
    with pytest.raises(InvalidRecord, match=words):
        load_folder(str(write(tmp_path / "small.gguf", **change)))


def test_every_truncation_is_refused(tmp_path):
    whole = write(tmp_path / "small.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 8, 20, 31, 60, 500, 3_000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidRecord, match=r"cut\.gguf is"):
            read_gguf(path)


def number(value, form="<Q"):
    return struct.pack(form, value)


def text(value):
    return number(len(value)) + value


HEAD = b"GGUF" + number(3, "<I")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGML" + number(3, "<I"), "begin with GGUF"),
        (b"GGUF" + number(9, "<I"), "version is 9"),
        (HEAD + number(0) + number(2**60), "too early"),
        (HEAD + number(2**60) + number(0), "too early"),
        (HEAD + number(0) + number(1) + number(2**63), "too early"),
        (HEAD + number(0) + number(1) + text(b"\xff"), "UTF-8"),
        (HEAD + number(0) + number(1) + text(b"k") + number(99, "<I"), "type 99"),
        (
            HEAD
            + number(0)
            + number(1)
            + text(b"k")
            + struct.pack("<IIQ", 9, 0, 2**60),
            "too early",
        ),
        (
            HEAD
            + number(0)
            + number(1)
            + text(b"k")
            + struct.pack("<IIQ", 9, 8, 2**60),
            "too early",
        ),
        (
            HEAD + number(0) + number(1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1),
            "holds value type 9",
        ),
        (
            HEAD + number(0) + number(2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2,
            "occurs twice",
        ),
        (
            HEAD
            + number(0)
            + number(1)
            + text(b"general.alignment")
            + struct.pack("<II", 4, 3),
            "alignment is 3",
        ),
        (HEAD + number(1) + number(0) + text(b"t") + number(9, "<I"), "9 axes"),
        (
            HEAD
            + number(1)
            + number(0)
            + text(b"t")
            + struct.pack("<IQIQ", 1, 2**62, 0, 0),
            "too early",
        ),
        (
            HEAD
            + number(1)
            + number(0)
            + text(b"t")
            + struct.pack("<IQIQ", 1, 32, 0, 2**63),
            "too early",
        ),
        (
            HEAD
            + number(1)
            + number(0)
            + text(b"t")
            + struct.pack("<IQIQ", 1, 33, 2, 0),
            "no whole rows",
        ),
        (
            HEAD
            + number(1)
            + number(0)
            + text(b"t")
            + struct.pack("<IQIQ", 1, 32, 777, 0),
            "unknown type 777",
        ),
        (
            HEAD
            + number(2)
            + number(0)
            + (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2,
            "occurs twice",
        ),
    ],
    ids=range(18),
)
def test_hostile_header_ends_at_once(tmp_path, data, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidRecord, match=words):
        read_gguf(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileUnreadable, match=r"none\.gguf"):
        load_folder(str(tmp_path / "none.gguf"))


def test_encoding_without_inverse_is_refused(tmp_path):
    data = HEAD + number(1) + number(0) + text(b"t")
    data += struct.pack("<IQIQ", 1, 32, int(gguf.GGMLQuantizationType.I32), 0)
    path = tmp_path / "whole.gguf"
    path.write_bytes(data + bytes(32 + 128))
    with pytest.raises(InvalidRecord, match="I32, which is not supported"):
        read_gguf(path).dequantised("t")
