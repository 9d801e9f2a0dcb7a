"""The splits of a dataset of the hub, or of a local folder of the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.hf_dataset import hub_errors
from sharebert.config import ConfigError, TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.tables import SUFFIXES, Columns, read_table


@dataclass(frozen=True)
class RawSplit:
    """The rows of a split as the dataset has them."""

    source: str
    """Where they are from, for messages."""
    columns: Columns
    class_names: Mapping[str, list[str]]
    """Of each column whose numbers have names, those names in the order of the numbers."""

    def column(self, name: str) -> list[Any]:
        """The values of a column.

        Raises:
            DataError: it is not there.
        """
        if name not in self.columns:
            raise DataError(f"{self.source}: no column {name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]


def read_splits(
    config: TaskConfig, hub_path: str, hub_name: str | None, required: Sequence[str], optional: Sequence[str]
) -> dict[str, RawSplit]:
    """The splits of these names: all that are required, and of the others those that are there.

    Args:
        config: with `path`, the local folder; None: the hub.
        hub_path: name of the dataset on the hub.
        hub_name: of its configuration.

    Raises:
        ConfigError: the folder or the dataset is not there.
        DataError: a required split is missing, or a file cannot be read.
    """
    if config.path is None:
        found, source = _from_hub(config.name, hub_path, hub_name), hub_path
    else:
        folder = Path(config.path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"task.path={config.path!r}: no such folder")
        found, source = _from_folder(folder, [*required, *optional]), str(folder)
    if missing := [name for name in required if name not in found]:
        there, name = ", ".join(found) or "none of a known name", missing[0]
        raise DataError(f"{source}: no split {name!r} (as {name}.jsonl or saved by datasets); found: {there}")
    return {name: found[name] for name in (*required, *optional) if name in found}


def _from_hub(task: str, path: str, name: str | None) -> dict[str, RawSplit]:
    import datasets

    try:
        return _of_datasets(datasets.load_dataset(path, name), path)
    except hub_errors() as error:  # offline, unknown dataset or configuration
        what = f"{path}, {name}" if name else path
        expected = "expected a connection, or a folder as task.path"
        raise ConfigError(f"task={task}: {what} did not come from the hub ({error}); {expected}") from error


def _from_folder(folder: Path, names: Sequence[str]) -> dict[str, RawSplit]:
    if (folder / "dataset_dict.json").is_file():
        import datasets

        try:
            return _of_datasets(datasets.load_from_disk(str(folder)), str(folder))
        except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:  # by what is damaged or missing
            raise DataError(f"{folder}: expected what `save_to_disk` wrote, found it damaged ({error!r})") from error
    found = {}
    for name in names:
        files = [path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
        if len(files) > 1:
            raise DataError(f"{folder}: {files[0].name} and {files[1].name}; expected one file for a split")
        files = files or sorted(folder.glob(f"{name}-*.parquet"))  # as in a clone of the hub's repository
        if files:
            source = files[0] if len(files) == 1 else folder / f"{name}-*.parquet"
            found[name] = RawSplit(str(source), _joined(files), {})
    return found


def _joined(files: Sequence[Path]) -> Columns:
    """The rows of all files, one after the other."""
    tables = {path: read_table(path) for path in files}
    first = tables[files[0]]
    for path, table in tables.items():
        if table.keys() != first.keys():
            raise DataError(
                f"{path}: columns {', '.join(table)}; expected those of {files[0].name}: {', '.join(first)}"
            )
    return {column: [value for table in tables.values() for value in table[column]] for column in first}


def _of_datasets(dataset: Any, source: str) -> dict[str, RawSplit]:
    found = {}
    for name, split in dataset.items():
        class_names = {
            column: list(feature.names) for column, feature in split.features.items() if hasattr(feature, "names")
        }
        columns = {column: list(split[column]) for column in split.column_names}
        found[name] = RawSplit(f"{source}, {name}", columns, class_names)
    return found
