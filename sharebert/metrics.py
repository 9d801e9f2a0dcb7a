"""Where figures go: `metrics.jsonl`, the terminal, TensorBoard, Weights & Biases. Rank 0 only."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from sharebert.config import ConfigError, LoggingConfig, RunConfig, TrainConfig, to_dict
from sharebert.files import write_atomically

logger = logging.getLogger(__name__)

Values = Mapping[str, Any]
PLAIN_LINE_SECONDS = 10.0


class Sink(Protocol):
    """Takes one row of figures at a time."""

    def write(self, step: int, values: Values) -> None:
        """Add a row."""

    def close(self) -> None:
        """Flush and let go."""


class JsonLines:
    """One JSON object a line. Rows after `last_step` (-1: all) are cut: a resumed run writes them again."""

    def __init__(self, path: Path, last_step: int) -> None:
        rows = [row for row in read_metrics(path) if row["step"] <= last_step]
        self._last_step, self._there = last_step, [row.keys() for row in rows if row["step"] == last_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        """Append a row and hand it to the operating system, so that a killed run keeps it."""
        row = {"step": step, **values}
        if step == self._last_step and row.keys() in self._there:
            return  # evaluated again: the run was killed after an evaluation that came after the save of its step
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Events for TensorBoard; events after `last_step` of an earlier try are hidden (purged)."""

    def __init__(self, folder: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, step: int, values: Values) -> None:
        """Add every number of the row; text has no place in a curve."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run, continued under its id after a resume."""

    def __init__(self, folder: Path, config: RunConfig, run_id: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=_name_below(folder, Path(config.output_dir)),
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=to_dict(config),
        )
        self.run_id: str = self._run.id

    def write(self, step: int, values: Values) -> None:
        """Log the row under its step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def _name_below(folder: Path, output_dir: Path) -> str:
    """A run's folder as seen from `output_dir`: the cells of a sweep have names of their own."""
    folder, output_dir = folder.resolve(), output_dir.resolve()
    return folder.relative_to(output_dir).as_posix() if folder.is_relative_to(output_dir) else folder.name


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, oldest first; a half-written last line is passed over."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def row_is_regular(step: int, config: TrainConfig) -> bool:
    """Whether a row of training figures is due after `step` updates, whatever happens in the run."""
    return step % config.logging.every_steps == 0 or step == config.max_steps


def check_extras(config: LoggingConfig) -> None:
    """Refuse, before any work, a sink whose package is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            expected = f"the package {name}; pip install 'sharebert[{name}]'"
            raise ConfigError(f"logging.{name}=true: expected {expected}")


def build_sinks(folder: Path, config: RunConfig, last_step: int, wandb_run_id: str | None) -> list[Sink]:
    """The sinks that the configuration asks for, cut back to `last_step`.

    TensorBoard and W&B that begin later than the run, as after the shared prefix of another one, get the rows so far.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", last_step)]
    late: list[Sink] = []
    if config.logging.tensorboard:
        is_there = (folder / "tensorboard").exists()
        sinks.append(TensorBoard(folder / "tensorboard", last_step))
        late += [] if is_there else sinks[-1:]
    if config.logging.wandb:
        sinks.append(WeightsAndBiases(folder, config, wandb_run_id))
        late += [] if wandb_run_id is not None else sinks[-1:]
    for row in read_metrics(folder / "metrics.jsonl") if late else ():
        step = row.pop("step")
        for sink in late:
            sink.write(step, row)
    return sinks


class Progress:
    """The terminal: a bar with time left where there is a terminal, a plain line now and then elsewhere."""

    def __init__(self, step: int, max_steps: int, enabled: bool) -> None:
        self._max_steps, self._enabled = max_steps, enabled
        self._begin_step, self._begin = step, time.monotonic()
        self._last_line = 0.0
        self._bar: tqdm[Any] | None = None
        if enabled and sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
            self._bar = tqdm(total=max_steps, initial=step, dynamic_ncols=True, smoothing=0.1, bar_format=layout)

    def advance(self) -> None:
        """One more update is done."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, values: Values, note: str = "") -> None:
        """Show a row of training figures, and a note after it."""
        if not self._enabled:
            return
        rate = f"{values['perf/tokens_per_second']:,.0f} tokens/s"
        phase = f"{values['share/phase']}  " if "share/phase" in values else ""
        text = f"{phase}loss {values['train/loss']:.3f}  {rate}{note and '  ' + note}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_SECONDS or step == self._max_steps:
            self._last_line = now
            seconds = (now - self._begin) / max(1, step - self._begin_step) * (self._max_steps - step)
            logger.info("update %d/%d  %s  %s left", step, self._max_steps, text, _duration(seconds))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


class Recorder:
    """All sinks and the terminal of one run; does nothing on ranks other than 0."""

    def __init__(self, sinks: list[Sink], progress: Progress) -> None:
        self.progress = progress
        self._sinks = sinks

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the W&B run, for the checkpoint."""
        return next((sink.run_id for sink in self._sinks if isinstance(sink, WeightsAndBiases)), None)

    def write(self, step: int, values: Values) -> None:
        """Add a row to every sink."""
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close everything."""
        self.progress.close()
        for sink in self._sinks:
            sink.close()
