"""The settings of fine-tuning: verb `finetune`. Epochs, warm-up and decay are those of the paper by default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from sharebert.config.checks import check, check_choice, check_fraction, check_positive
from sharebert.config.train import LoggingConfig, TrainConfig

GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
SQUAD_TASKS = ("squad", "squad_v2")
TASKS = (*GLUE_TASKS, *SQUAD_TASKS, "table")


@dataclass(frozen=True)
class TaskConfig:
    """What the encoder is fine-tuned on and scored by."""

    name: str = "table"
    """A task of GLUE (`ax` only predicts, with a model fine-tuned on mnli), `squad`, `squad_v2`, or `table`: files of
    your own; set by the files of the group `task`."""
    path: Optional[str] = None
    """For GLUE and SQuAD: a local folder with the columns of the hub's dataset, written by `save_to_disk` or holding a
    file for each split (validation.jsonl, ...); null: the hub (nyu-mll/glue, rajpurkar/squad, rajpurkar/squad_v2)."""
    train: Optional[str] = None
    """For `table`: the file to train on: .tsv, .csv, .jsonl or .parquet, each also with .gz or .zst. The first line of
    TSV and CSV names the columns; a tab always ends a field of TSV, quotes mean nothing there."""
    dev: Optional[str] = None
    """For `table`: the file to score on."""
    test: Optional[str] = None
    """For `table`: a file to write predictions for; its labels, if it has any, are scored at the end."""
    text_columns: list[str] = field(default_factory=list)
    """For `table`: the columns of one or two texts; empty: found by their names."""
    label_column: Optional[str] = None
    """For `table`: the column to predict; null: found by its name."""
    kind: str = "auto"
    """For `table`: `classification`, `regression`, or `auto`: regression where the labels are numbers that are not all
    whole, classes where they are words or up to 20 different whole numbers; anything else has to be said."""
    score: list[str] = field(default_factory=list)
    """Figures whose mean is the run's score, by which a sweep chooses; empty: all of the task's (GLUE's own rule),
    for `table` accuracy, or Pearson and Spearman."""
    max_length: int = 128
    """Wordpieces in a sequence, specials included; at most the encoder's positions."""
    stride: int = 128
    """For SQuAD: wordpieces from the start of one window of a long context to that of the next, as the original BERT
    has it; less where a window is shorter."""
    max_question_length: int = 64
    """For SQuAD: wordpieces of a question; the rest is cut off."""
    max_answer_length: int = 30
    """For SQuAD: wordpieces of the longest answer that is considered."""
    null_threshold: float = 0.0
    """For SQuAD 2.0: a question counts as unanswerable where the score of no answer is higher than that of the best
    answer by more than this. The best threshold for the dev set is reported besides."""

    def __post_init__(self) -> None:
        check_choice("task.name", self.name, TASKS)
        check_choice("task.kind", self.kind, ("auto", "classification", "regression"))
        check_positive("task.", self, "stride", "max_question_length", "max_answer_length")
        check(self.max_length >= 8, "task.max_length", self.max_length, "at least 8")
        columns = self.text_columns
        check(len(columns) <= 2, "task.text_columns", columns, "the names of one or two columns, or none")
        for name in ("train", "dev", "test", "text_columns", "label_column"):
            is_fitting = self.name == "table" or not getattr(self, name)
            check(is_fitting, f"task.{name}", getattr(self, name), f"none with task={self.name}; see task.path")
        is_fitting = self.path is None or self.name != "table"
        check(is_fitting, "task.path", self.path, "none with task=table; see task.train and task.dev")


@dataclass(frozen=True)
class FinetuneOptimConfig:
    """AdamW; the rate rises linearly over the first updates and falls linearly to 0."""

    lr: float = 3e-5
    """Peak learning rate; the paper picks it from 1, 1.5, 2, 3, 4, 5, 7.5, 10 and 12e-5 on the dev set."""
    warmup_fraction: float = 0.1
    """Share of the updates over which the rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-6
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and layer norms have none."""
    clip_norm: Optional[float] = 1.0
    """Largest global gradient norm; null: no clipping."""

    def __post_init__(self) -> None:
        check_positive("optim.", self, "lr", "eps", "clip_norm")
        check_fraction("optim.", self, "warmup_fraction")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "a number of at least 0")
        betas_are_valid = len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)
        check(betas_are_valid, "optim.betas", list(self.betas), "two numbers from 0 up to, not including, 1")
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))


@dataclass(frozen=True)
class FinetuneEngineConfig:
    """How the arithmetic of training is carried out. Scores always come from fp32, whatever the batch."""

    device: str = "auto"
    """`auto` (CUDA when there is one), `cpu` or `cuda`."""
    precision: str = "auto"
    """`auto` (bf16 where the hardware has it, else fp32), `bf16` or `fp32`."""
    micro_batch_size: Optional[int] = None
    """Upper bound of the sequences in one forward pass on one process; null: all of the process's share."""
    group_timeout_minutes: float = 30.0
    """How long a process waits for another one of its job before it gives up."""

    def __post_init__(self) -> None:
        check_choice("engine.device", self.device, ("auto", "cpu", "cuda"))
        check_choice("engine.precision", self.precision, ("auto", "bf16", "fp32"))
        check_positive("engine.", self, "micro_batch_size", "group_timeout_minutes")


@dataclass(frozen=True)
class FinetuneCheckpointConfig:
    """When training state is saved, and what stays of it."""

    every_steps: Optional[int] = 500
    """Updates between checkpoints; null: only when stopped, and at the end."""
    resume: str = "auto"
    """`auto` (from the newest good checkpoint of the run folder) or `never` (start over)."""
    keep_finished: bool = False
    """Keep the last checkpoint of a finished run, three times as large as the model that stays in any case."""

    def __post_init__(self) -> None:
        check_positive("checkpoint.", self, "every_steps")
        check_choice("checkpoint.resume", self.resume, ("auto", "never"))


@dataclass(frozen=True)
class FinetuneEvaluationConfig:
    """When the dev set is scored."""

    every_steps: Optional[int] = None
    """Updates between evaluations; null: after each epoch. Always at the end."""
    batch_size: int = 64
    """Sequences in a forward pass on one process."""

    def __post_init__(self) -> None:
        check_positive("evaluation.", self, "every_steps", "batch_size")


@dataclass(frozen=True)
class FinetuneConfig:
    """One fine-tuning run."""

    run_name: Optional[str] = None
    """Folder of the run below output_dir; conf/finetune.yaml makes it finetune-<task>."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""
    encoder: Optional[str] = None
    """Folder of the pretrained encoder, as `sharebert export` writes it; also a fine-tuned `model` folder, whose head
    is then not used (but by `ax`)."""
    random_encoder: bool = False
    """Start from random weights of the encoder's size, with its tokenizer: what pretraining is compared with."""
    dropout: Optional[float] = None
    """Dropout of hidden states, attention and head; null: as the encoder was pretrained, with a warning where that was
    without (the paper: 0.1)."""
    seed: int = 1
    """Seed of the new weights, data order and dropout."""
    epochs: float = 3.0
    """Passes over the training set."""
    global_batch_size: int = 32
    """Sequences in an update, over all processes and micro-batches; for SQuAD, windows."""
    max_run_minutes: Optional[float] = None
    """Save and leave with status 75 this long after the process began, before a queue's time limit; null: never."""
    task: TaskConfig = field(default_factory=TaskConfig)
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    engine: FinetuneEngineConfig = field(default_factory=FinetuneEngineConfig)
    checkpoint: FinetuneCheckpointConfig = field(default_factory=FinetuneCheckpointConfig)
    evaluation: FinetuneEvaluationConfig = field(default_factory=FinetuneEvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        check_positive("", self, "epochs", "global_batch_size", "max_run_minutes")
        check(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 below 2**63")
        is_fitting = self.dropout is None or 0.0 <= self.dropout < 1.0
        check(is_fitting, "dropout", self.dropout, "a number from 0 up to, not including, 1, or null")
        is_fitting = self.task.name != "ax" or not self.random_encoder
        check(is_fitting, "random_encoder", self.random_encoder, "false with task=ax, which does not train")


def check_complete(config: FinetuneConfig) -> None:
    """Refuse a request that leaves out what has no default: the encoder, and the files of a table."""
    check(bool(config.encoder), "encoder", config.encoder, "a folder written by `sharebert export CHECKPOINT FOLDER`")
    for name in ("train", "dev") if config.task.name == "table" else ():
        check(bool(getattr(config.task, name)), f"task.{name}", getattr(config.task, name), "a file with task=table")


RunConfig = TrainConfig | FinetuneConfig
"""The settings of a run that has a run folder."""
