"""Datasets of the `datasets` library: folders on disk and names on the hub, memory-mapped or as a stream.

All goes through `datasets`, so HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and its cache work as everywhere else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.text_files import text_or_empty
from sharebert.config import ConfigError, DataConfig, near_match
from sharebert.files import sha256_of_file

_COMMIT = re.compile("[0-9a-f]{40}")


class UnreachableError(ConfigError):
    """The hub did not give what was asked for: it may at the next try, and what is tokenised stays."""


def local_folder(config: DataConfig) -> Path | None:
    """The folder that `hf_path` names, or None when it is a name on the hub.

    Raises:
        ConfigError: it is written like a path, but there is no such folder; or a folder has a revision.
    """
    assert config.hf_path is not None  # DataConfig has checked it
    folder = Path(config.hf_path).expanduser()
    if folder.is_dir():
        if config.hf_revision is not None:
            came = f"data.hf_revision={config.hf_revision!r} with the folder data.hf_path={config.hf_path!r}"
            raise ConfigError(f"{came}; expected it with a name on the hub only")
        return folder
    if config.hf_path.startswith(("/", ".", "~")):
        raise ConfigError(f"data.hf_path={config.hf_path!r}: no such folder")
    return None


def load(config: DataConfig) -> Any:
    """The split `hf_split`, memory-mapped, or a stream with `hf_streaming`; only its column of text.

    Raises:
        UnreachableError: the hub does not answer, or not as expected.
        ConfigError: no such dataset, configuration, split or column; the message names the key.
    """
    import datasets

    folder = local_folder(config)
    try:
        if folder is not None and _is_saved(folder):
            saved = _saved_split(datasets.load_from_disk(str(folder)), folder, config)
            return _checked(saved.to_iterable_dataset() if config.hf_streaming else saved, config)
        name = str(folder) if folder is not None else config.hf_path
        options = {"split": config.hf_split, "streaming": config.hf_streaming, "revision": config.hf_revision}
        return _checked(datasets.load_dataset(name, config.hf_name, **options), config)
    except ConfigError:
        raise
    except hub_errors() as error:  # missing, offline, unknown configuration or split
        given = f"hf_name={config.hf_name!r}, hf_split={config.hf_split!r}"
        kind = UnreachableError if folder is None else ConfigError  # the hub's own faults come in many forms
        raise kind(f"data.hf_path={config.hf_path!r} ({given}): {error}") from error


def _saved_split(saved: Any, folder: Path, config: DataConfig) -> Any:
    if not hasattr(saved, "keys"):
        return saved  # one split; there is nothing to choose
    if config.hf_split not in saved:
        splits, hint = ", ".join(saved), near_match(config.hf_split, saved)
        raise ConfigError(f"data.hf_split={config.hf_split!r}: no such split{hint} in {folder}: {splits}")
    return saved[config.hf_split]


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _checked(dataset: Any, config: DataConfig) -> Any:
    # A stream of files without a schema knows its columns from the first row only.
    columns = list(dataset.column_names or next(iter(dataset), {}))
    if config.text_column not in columns:
        hint = near_match(config.text_column, columns)
        found = ", ".join(columns)
        raise ConfigError(f"data.text_column={config.text_column!r}: no such column{hint}; columns: {found}")
    return dataset.select_columns([config.text_column])


def at_commit(config: DataConfig) -> DataConfig:
    """`config` with the commit that a stream from the hub is at now as `hf_revision`: all of it is read from there.

    A full commit stays as it is, without a question to the hub; so does what is no stream from the hub, which
    `datasets` keeps on disk under its own fingerprint.

    Raises:
        ConfigError: the hub does not know it, or cannot be reached.
    """
    if local_folder(config) is not None or not config.hf_streaming or _COMMIT.fullmatch(config.hf_revision or ""):
        return config
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().dataset_info(str(config.hf_path), revision=config.hf_revision)
    except hub_errors() as error:
        given = f"data.hf_path={config.hf_path!r}, data.hf_revision={config.hf_revision!r}"
        expected = "a dataset on the hub, and a connection unless data.hf_revision is the hash of a commit"
        raise ConfigError(f"{given}: {error}; expected {expected}") from error
    return replace(config, hf_revision=info.sha)


def hub_errors() -> tuple[type[Exception], ...]:
    """What `datasets` and the hub raise where something is not there, or there is no connection."""
    from huggingface_hub import errors

    return (OSError, ValueError, RuntimeError, errors.HTTPError)  # type: ignore[attr-defined]


def content_hash(config: DataConfig) -> tuple[str, int]:
    """(hash, bytes): of the files of a local folder; for the hub, the fingerprint that `datasets` keeps, or for a
    stream (:func:`at_commit`) the commit, and 0 bytes where the hub does not say."""
    folder = local_folder(config)
    if folder is None and config.hf_streaming:
        return hashlib.sha256(f"{config.hf_path} {config.hf_revision}".encode()).hexdigest(), _stream_bytes(config)
    if folder is None:
        dataset = load(config)
        return hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest(), int(dataset.data.nbytes)
    digest, num_bytes = hashlib.sha256(), 0
    for path in _data_files(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_of_file(path)}\n".encode())
        num_bytes += path.stat().st_size
    return digest.hexdigest(), num_bytes


def _stream_bytes(config: DataConfig) -> int:
    try:
        return int(load(config).info.dataset_size or 0)
    except ConfigError:  # no connection, and none is needed where the corpus is prepared; else reading says so
        return 0


def _data_files(folder: Path) -> list[Path]:
    """Files that rows may come from: not hidden ones, nor in a saved dataset what `datasets` leaves there itself."""
    ours = ("cache-", "tmp") if _is_saved(folder) else ()
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(ours)]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def read_documents(config: DataConfig) -> Iterator[str]:
    """The documents of the split in its order; memory holds 256 rows."""
    row = 0
    for batch in load(config).iter(batch_size=256):
        for row, value in enumerate(batch[config.text_column], start=row + 1):  # noqa: B020
            yield text_or_empty(value, f"{config.hf_path}, row {row}")
