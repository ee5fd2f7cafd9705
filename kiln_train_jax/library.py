"""The adapter folders under one directory.

A folder is an adapter by its name, which must be one safe path segment; whatever
starts with a dot is not looked at, nor are checkpoints of runs. Reading a folder for a
listing costs a hash of its tensors, so digests are remembered by the size and time of
its two files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kiln_core.canonical import read_json
from kiln_core.engine import AdapterInfo
from kiln_core.errors import ArtifactError, FileUnreadable, UsageError
from kiln_core.grpo import check_name
from kiln_train_jax.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from kiln_train_jax.receipt import MANIFEST_FILE

if TYPE_CHECKING:
    from collections.abc import Collection

    from kiln_core.canonical import Sha256
    from kiln_train_jax.config import ModelConfig

CHECKPOINT_SUFFIX: Final = ".kiln-checkpoint"
"""Ends the name of a folder that holds a run's state and no adapter."""
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


class _Known(NamedTuple):
    """What a folder's files were when they were last read."""

    stamp: tuple[tuple[int, int], ...]
    content_sha256: Sha256 | None
    problem: str | None


class AdapterLibrary:
    """Adapter folders by name."""

    def __init__(
        self, directory: Path, config: ModelConfig, base_sha256: Sha256
    ) -> None:
        """Look at a directory; it need not exist yet.

        Args:
            directory: Holds one folder an adapter.
            config: Shape of the base model they must fit.
            base_sha256: Its digest, which the manifest of an adapter may name.
        """
        self.directory = directory
        self._config = config
        self._base_sha256 = base_sha256
        self._known: dict[str, _Known] = {}

    def path(self, name: str) -> Path:
        """Return where an adapter of that name lies or would lie.

        Raises:
            UsageError: The name is not one safe path segment.
        """
        check_name(name, "adapter")
        return self.directory / name

    def read(self, name: str) -> Adapter:
        """Read an adapter.

        Raises:
            UsageError: There is none of that name, or it does not fit the model.
        """
        folder = self.path(name)
        if not folder.is_dir():
            raise UsageError(
                f"there is no adapter {name!r}",
                hint=f"adapters are folders under {self.directory}",
            )
        try:
            self._check_base(folder)
            return read_adapter(folder, self._config)
        except (ArtifactError, FileUnreadable) as error:
            raise UsageError(
                f"adapter {name!r} cannot be loaded: {error.message}", hint=error.hint
            ) from error

    def _check_base(self, folder: Path) -> None:
        """Check the base model that the manifest names, where there is one.

        An adapter from elsewhere has none; then only its shapes can tell.

        Raises:
            ArtifactError: The adapter was trained on another base model.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            return
        manifest = read_json(path.read_bytes(), MANIFEST_FILE)
        named = manifest.get("base_model_sha256") if isinstance(manifest, dict) else ""
        if named != self._base_sha256:
            raise ArtifactError(
                f"{MANIFEST_FILE} names another base model than the one served",
                hint="serve the model it was trained on, or train it anew",
            )

    def content_sha256(self, name: str) -> Sha256:
        """Return the content digest of an adapter on disk.

        Raises:
            UsageError: There is none of that name, or it does not fit the model.
        """
        known = self._look(self.path(name))
        if known.content_sha256 is None:
            return self.read(name).content_sha256
        return known.content_sha256

    def list(self, loaded: Collection[str]) -> tuple[AdapterInfo, ...]:
        """Describe every adapter folder, by name."""
        if not self.directory.is_dir():
            return ()
        folders = sorted(
            path
            for path in self.directory.iterdir()
            if path.is_dir()
            and not path.name.startswith(".")
            and not path.name.endswith(CHECKPOINT_SUFFIX)
        )
        return tuple(self._describe(path, path.name in loaded) for path in folders)

    def describe(self, name: str, *, loaded: bool) -> AdapterInfo:
        """Describe one adapter folder.

        Raises:
            UsageError: The name is not one safe path segment.
        """
        return self._describe(self.path(name), loaded)

    def _describe(self, folder: Path, loaded: bool) -> AdapterInfo:  # noqa: FBT001 - private
        known = self._look(folder)
        present = [folder / name for name in FILES if (folder / name).is_file()]
        return AdapterInfo(
            name=folder.name,
            loaded=loaded,
            has_config=folder / CONFIG_FILE in present,
            has_weights=folder / WEIGHTS_FILE in present,
            size_bytes=sum(path.stat().st_size for path in present),
            content_sha256=known.content_sha256,
            problem=known.problem,
        )

    def _look(self, folder: Path) -> _Known:
        """Read a folder's digest, unless its files are the ones read before."""
        stamp = tuple(
            (status.st_mtime_ns, status.st_size)
            for name in (*FILES, MANIFEST_FILE)
            if (folder / name).is_file()
            for status in [(folder / name).stat()]
        )
        known = self._known.get(folder.name)
        if known is None or known.stamp != stamp:
            try:
                content = self.read(folder.name).content_sha256
                known = _Known(stamp, content, None)
            except UsageError as error:
                known = _Known(stamp, None, error.message)
            self._known[folder.name] = known
        return known
