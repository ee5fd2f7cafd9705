"""A model as it lies in a folder: configuration, weights, tokenizer, chat template.

Any Hugging Face folder of a supported architecture will do, and any GGUF file;
`builtin:tiny` is a folder that comes with the package, and `builtin:random` is built in
memory from a fixed seed, for tests. Digests of everything that decides a model's
behaviour are taken here, once.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp
import msgspec

from kiln_core.canonical import digest_json, read_json
from kiln_core.errors import FileUnreadable, InvalidRecord
from kiln_core.provenance import TokenizerIdentity
from kiln_train_jax import weights
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.gguf_model import read_model
from kiln_train_jax.model import Decoder
from kiln_train_jax.template import ChatTemplate
from kiln_train_jax.tokenizer import Tokenizer, byte_document

if TYPE_CHECKING:
    from kiln_core.canonical import Sha256

TINY: Final = "builtin:tiny"
RANDOM: Final = "builtin:random"
RANDOM_SEED: Final = 0
GGUF_SUFFIX: Final = ".gguf"

TURN_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Chat format of `builtin:tiny`: a role token, the content, an end token."""

THINKING_TEMPLATE: Final = (
    "{%- set ns = namespace(last_user=-1) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}"
    "{%- set ns.last_user = loop.index0 -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' }}"
    "{%- if message.role == 'assistant' and '</think>' in message.content -%}"
    "{%- if loop.index0 > ns.last_user -%}"
    "{{ '<think>\n' + message.content }}"
    "{%- else -%}"
    "{{ message.content.split('</think>')[-1] }}"
    "{%- endif -%}"
    "{%- else -%}"
    "{{ message.content }}"
    "{%- endif -%}"
    "<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "<|assistant|>"
    "{%- if enable_thinking -%}{{ '<think>\n' }}{%- endif -%}"
    "{%- endif -%}"
)
"""Chat format of `builtin:random`: the same, with reasoning that the generation prompt
opens and that is dropped from turns before the last user message."""

END_OF_TURN: Final = "<|end|>"


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model and the digests of its parts."""

    served_model_id: str
    config: ModelConfig
    model: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    """Tokens that end a turn."""
    end_id: int
    """The one a finished action is closed with."""
    base_sha256: Sha256
    """Digest of configuration and every tensor."""
    tokenizer_identity: TokenizerIdentity


def load_folder(source: str, *, dtype: Any = jnp.float32) -> ModelFolder:
    """Load a model.

    Args:
        source: `builtin:tiny`, `builtin:random`, or the path of a folder or a GGUF
            file.
        dtype: Dtype of the parameters in memory.

    Raises:
        FileUnreadable: The folder or one of its files is missing.
        InvalidRecord: A file is not what it should be, or does not fit the others.
    """
    if source == RANDOM:
        return _random_model(dtype)
    if source == TINY:
        with as_file(files("kiln_train_jax") / "models" / "tiny") as folder:
            return _read_folder(folder, TINY, dtype)
    path = Path(source)
    if path.suffix == GGUF_SUFFIX:
        return _read_gguf(path, dtype)
    return _read_folder(path, path.name or path.resolve().name, dtype)


def _read_folder(folder: Path, name: str, dtype: Any) -> ModelFolder:
    """Read a folder from disk.

    Raises:
        FileUnreadable: There is no such folder.
    """
    if not folder.is_dir():
        raise FileUnreadable(f"there is no model folder at {folder}", file=str(folder))
    document = _read_object(folder / "config.json")
    tokenizer_config = _read_object(folder / "tokenizer_config.json")
    optional = folder / "generation_config.json"
    generation = _read_object(optional) if optional.is_file() else {}
    config = ModelConfig.from_hugging_face(document)
    tensors = weights.read_tensors(folder)
    return _assemble(
        name,
        config,
        weights.build(config, tensors, dtype=dtype),
        weights.tensors_digest(document, tensors),
        _Texts(
            tokenizer=_read_bytes(folder / "tokenizer.json"),
            tokenizer_config={
                **tokenizer_config,
                "chat_template": _template(folder, tokenizer_config),
            },
            generation_config=generation,
        ),
    )


def _read_gguf(path: Path, dtype: Any) -> ModelFolder:
    """Read a GGUF file from disk, each tensor once."""
    parts = read_model(path)
    config = ModelConfig.from_hugging_face(parts.config)
    tensors = weights.ReadOnce(parts.tensors)
    model = weights.build(config, tensors, dtype=dtype)
    return _assemble(
        path.stem,
        config,
        model,
        tensors.digest(parts.config),
        _Texts(
            tokenizer=parts.tokenizer,
            tokenizer_config=parts.tokenizer_config,
            generation_config=parts.generation_config,
        ),
    )


def _random_model(dtype: Any) -> ModelFolder:
    """Build the model of the unit tests: small, thinking, from a fixed seed."""
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    tensors = weights.random_tensors(config, seed=RANDOM_SEED)
    return _assemble(
        RANDOM,
        config,
        weights.build(config, tensors, dtype=dtype),
        weights.tensors_digest(msgspec.to_builtins(config), tensors),
        _Texts(
            tokenizer=byte_document(),
            tokenizer_config={
                "chat_template": THINKING_TEMPLATE,
                "eos_token": END_OF_TURN,
            },
            generation_config={},
        ),
    )


class _Texts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a model but its weights, as its files say it."""

    tokenizer: bytes
    tokenizer_config: dict[str, Any]
    """With the chat template as a string."""
    generation_config: dict[str, Any]


def _assemble(
    name: str, config: ModelConfig, model: Decoder, base_sha256: Sha256, texts: _Texts
) -> ModelFolder:
    tokenizer = Tokenizer(texts.tokenizer, vocab_size=config.vocab_size)
    tokenizer_config = texts.tokenizer_config
    variables = {
        key: _token_text(key, tokenizer_config[key])
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if tokenizer_config.get(key) is not None
    }
    template = ChatTemplate(
        tokenizer_config["chat_template"], tokenizer, variables=variables
    )
    stop_ids = _stop_ids(config, tokenizer, variables, texts.generation_config)
    end_id = tokenizer.id_of(variables.get("eos_token", ""))
    return ModelFolder(
        served_model_id=name,
        config=config,
        model=model,
        tokenizer=tokenizer,
        template=template,
        stop_ids=stop_ids,
        end_id=min(stop_ids) if end_id is None else end_id,
        base_sha256=base_sha256,
        tokenizer_identity=TokenizerIdentity(
            vocab_sha256=tokenizer.sha256,
            config_sha256=digest_json(tokenizer_config),
            chat_template_sha256=template.sha256,
        ),
    )


def _stop_ids(
    config: ModelConfig,
    tokenizer: Tokenizer,
    variables: dict[str, str],
    generation: dict[str, Any],
) -> frozenset[int]:
    """Collect the tokens that end a turn, from every file that may name one.

    Raises:
        InvalidRecord: None does, or one is not in the vocabulary.
    """
    named = generation.get("eos_token_id") or []
    ids = {*config.eos_token_ids, *(named if isinstance(named, list) else [named])}
    end = tokenizer.id_of(variables.get("eos_token", ""))
    ids |= set() if end is None else {end}
    if not ids:
        raise InvalidRecord("no file of the model names an end token")
    for place in ids:
        if not isinstance(place, int) or not 0 <= place < config.vocab_size:
            raise InvalidRecord(f"end token {place!r} is not in the vocabulary")
    return frozenset(ids)


def _template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Return the chat template, from its own file or the tokenizer's configuration.

    Raises:
        InvalidRecord: There is none, or it is not UTF-8.
    """
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return _read_bytes(own).decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"{own.name} is not UTF-8") from error
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):
        entries = [entry for entry in inline if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        inline = named.get("default")
    if not isinstance(inline, str):
        raise InvalidRecord(
            "the model has no chat template",
            hint="use an instruction-tuned model, or add chat_template.jinja",
        )
    return inline


def _token_text(key: str, token: Any) -> str:
    """Return a token's text, however the file writes it.

    Raises:
        InvalidRecord: It is written in no known way.
    """
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InvalidRecord(f"tokenizer_config.json: {key} is {token!r}")
    return text


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        InvalidRecord: It holds something else.
    """
    value = read_json(_read_bytes(path), path.name)
    if not isinstance(value, dict):
        raise InvalidRecord(f"{path.name} is not a JSON object", file=str(path))
    return value


def _read_bytes(path: Path) -> bytes:
    """Read a file of the folder.

    Raises:
        FileUnreadable: It is missing or not permitted.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileUnreadable(
            f"the model folder has no readable {path.name}", file=str(path)
        ) from error
