"""The settings of pretraining: verbs `train`, `prepare`, `plan` and `bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Protocol

from sharebert.config.checks import check, check_choice, check_fraction, check_positive


@dataclass(frozen=True)
class ModelConfig:
    """A BERT encoder with a masked-LM head."""

    name: str = "bert_mini"
    """Name of the preset, for people; set by the files of the group `model`."""
    num_layers: int = 4
    """Transformer layers, L."""
    hidden_size: int = 256
    """Width of the residual stream, D."""
    num_heads: int = 4
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 1024
    """Width of the feed-forward layer."""
    max_position_embeddings: int = 512
    """Learned positions; no sequence can be longer."""
    norm: str = "pre"
    """`pre`: layer norm before attention and feed-forward, and once at the end. `post`: as the original BERT."""
    dropout: float = 0.1
    """Dropout of embeddings and sublayer outputs."""
    attention_dropout: float = 0.1
    """Dropout of the attention probabilities."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights. 0.02 suits width 768 and up; narrow presets use 0.55/sqrt(width)."""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "max_position_embeddings")
        check_positive("model.", self, *sizes, "initializer_range")
        check_choice("model.norm", self.norm, ("pre", "post"))
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            check(0.0 <= value < 1.0, f"model.{name}", value, "a number from 0 up to, not including, 1")
        check(
            self.hidden_size % self.num_heads == 0,
            "model.hidden_size",
            self.hidden_size,
            f"a multiple of model.num_heads={self.num_heads}",
        )


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str = "python_docs"
    """`python_docs` (documentation of the running Python), `text_files`, or `hf_dataset` (and `files` after it)."""
    files: list[str] = field(default_factory=list)
    """Paths, folders or globs of .txt, .jsonl and .parquet, each also with .gz or .zst."""
    repeats: list[int] = field(default_factory=list)
    """How often the training documents of each entry of `files` are written, as [1, 3]; with `hf_dataset`, the
    dataset's number comes first. Empty: once each. Held-out documents are written once."""
    txt_documents: str = "blank_line"
    """What a document of a .txt file is: `blank_line` (the lines between two blank ones) or `line` (each line)."""
    hf_path: Optional[str] = None
    """For `hf_dataset`: a hub name, or a local folder written by `save_to_disk` or holding data files."""
    hf_name: Optional[str] = None
    """For `hf_dataset`: the dataset's configuration name on the hub."""
    hf_revision: Optional[str] = None
    """For `hf_dataset`: commit, tag or branch of a dataset on the hub. null: the newest, of which any change, even of
    its README, counts as other data."""
    hf_split: str = "train"
    """For `hf_dataset`: the split to read."""
    hf_streaming: bool = False
    """For `hf_dataset`: read it as a stream, without a copy of all of it on disk."""
    text_column: str = "text"
    """Column or JSON key that holds the text."""
    seq_len: int = 64
    """Tokens in a sequence, [CLS] and [SEP] included."""
    vocab_size: int = 1024
    """Size of the WordPiece vocabulary trained when `tokenizer` is not given."""
    lowercase: bool = True
    """Lowercase text and strip accents, as the uncased BERT does; for a trained or a vocab.txt tokenizer."""
    tokenizer: Optional[str] = None
    """Path of a tokenizer.json or vocab.txt to use; null trains one on the corpus."""
    validation_fraction: float = 0.05
    """Share of the documents held out, chosen by a hash of their content."""
    cross_document_attention: bool = True
    """Let tokens attend across the ends of documents in a sequence, as the original BERT. false: each document only
    to itself, its positions counted from 0; attention then runs with a mask, which is slower."""
    deduplicate: bool = False
    """Keep only the first of several equal documents."""
    errors: str = "strict"
    """What a line that is not UTF-8 or not valid JSON does: `strict` ends with its place, `replace` mends the bytes
    and drops a line that is still not JSON, `skip` drops the line. What was mended or dropped is counted."""
    min_characters: int = 0
    """Documents with fewer characters are dropped."""
    max_characters: Optional[int] = None
    """Documents with more characters are dropped; null: none."""
    cache_dir: Optional[str] = None
    """Where prepared corpora live; null: $SHAREBERT_CACHE, else $XDG_CACHE_HOME/sharebert, else ~/.cache/sharebert."""
    num_proc: Optional[int] = None
    """Processes that tokenise; null: one for each usable core."""

    def __post_init__(self) -> None:
        check_choice("data.source", self.source, ("python_docs", "text_files", "hf_dataset"))
        check_choice("data.txt_documents", self.txt_documents, ("blank_line", "line"))
        check_choice("data.errors", self.errors, ("strict", "replace", "skip"))
        check_positive("data.", self, "vocab_size", "num_proc", "max_characters")
        least, most = self.min_characters, self.max_characters
        check(least >= 0, "data.min_characters", least, "at least 0")
        check(most is None or most >= least, "data.max_characters", most, f"at least data.min_characters={least}")
        check(self.seq_len >= 8, "data.seq_len", self.seq_len, "at least 8")
        check_fraction("data.", self, "validation_fraction")
        if self.source == "text_files":
            check(bool(self.files), "data.files", self.files, "at least one path or glob with data.source=text_files")
        if self.source == "hf_dataset":
            check(bool(self.hf_path), "data.hf_path", self.hf_path, "a name or folder with data.source=hf_dataset")
        entries = len(self.files) + (self.source == "hf_dataset")
        expected = f"one whole number from 1 for each of {entries} (the dataset, if any, and the entries of data.files)"
        is_one_each = len(self.repeats) == entries and all(number >= 1 for number in self.repeats)
        check(not self.repeats or is_one_each, "data.repeats", self.repeats, expected)


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens are predicted and what the model sees in their place."""

    probability: float = 0.15
    """Share of each sequence that is predicted: max(1, round(probability x length)) slots."""
    whole_word: bool = False
    """Choose whole words instead of single wordpieces."""
    mask_share: float = 0.8
    """Share of the chosen tokens shown as [MASK]."""
    random_share: float = 0.1
    """Share of the chosen tokens shown as a random token; the rest are shown unchanged."""

    def __post_init__(self) -> None:
        check(0.0 < self.probability < 1.0, "masking.probability", self.probability, "a number between 0 and 1")
        check_fraction("masking.", self, "mask_share", "random_share")
        total = self.mask_share + self.random_share
        check(total <= 1.0 + 1e-9, "masking.mask_share + masking.random_share", total, "at most 1")


POLICIES = ("fixed", "adaptive", "multi_step", "never", "always")


@dataclass(frozen=True)
class UnshareConfig:
    """When, and from what, the layers stop sharing weights."""

    policy: str = "fixed"
    """`fixed` (unshare at update `step`), `adaptive` (when the layers' gradients stop agreeing), `multi_step` (group by
    group, likewise), `never` share (an ordinary BERT), `always` share (as ALBERT)."""
    step: Optional[int] = None
    """For `fixed`: the first unshared update, tau; tau - 1 updates are shared. Wins over `fraction`."""
    fraction: float = 0.1
    """For `fixed` without `step`: tau as a share of max_steps, rounded, at least 1 (the paper: 50k of 500k)."""
    unit_layers: int = 1
    """Layers with weights of their own in a sharing unit: A of the paper's A x B; must divide num_layers."""
    check_every: Optional[int] = None
    """Updates between two checks of the correlation of adjacent units' gradients. `adaptive` and `multi_step` decide
    by them (the paper: 1,000); under the other policies they are a diagnostic. null: no checks."""
    threshold: float = 0.5
    """A correlation below this speaks for unsharing, rho; a cosine between -1 and 1."""
    patience: int = 3
    """Checks in a row that have to speak for unsharing."""
    earliest_step: int = 0
    """Checks in updates before this one do not count."""
    latest_step: Optional[int] = None
    """For `adaptive` and `multi_step`: from this update on nothing shares, whatever the correlations; null: never."""
    optimizer_state: str = "copy"
    """At unsharing each layer's optimizer state is a `copy` of the shared one (the literal algorithm), or `reset`."""
    shared_lr_factor: float = 1.0
    """Multiplies the learning rate, of all parameters, as long as any layers share. The paper has no such factor (1):
    under AdamW a shared weight moves as far as any other, but in all its layers at once."""
    initial: str = "independent"
    """For `never`: layers start `independent` (as an ordinary BERT) or from the `same` weights."""
    prefix_cache: Optional[str] = None
    """Folder of shared checkpoints: a run starts from the newest one of a run that is equal up to there, and leaves
    its own. null: none, and in a sweep `prefix-cache` in its folder; `off`: none, in a sweep either."""

    def __post_init__(self) -> None:
        if self.prefix_cache is not None and self.prefix_cache.lower() in ("off", "false"):  # YAML reads off as false
            object.__setattr__(self, "prefix_cache", "off")
        check_choice("unshare.policy", self.policy, POLICIES)
        check_choice("unshare.optimizer_state", self.optimizer_state, ("copy", "reset"))
        check_choice("unshare.initial", self.initial, ("independent", "same"))
        check_positive(
            "unshare.", self, "shared_lr_factor", "step", "unit_layers", "check_every", "patience", "latest_step"
        )
        check_fraction("unshare.", self, "fraction")
        check(-1.0 < self.threshold < 1.0, "unshare.threshold", self.threshold, "a number between -1 and 1")
        check(self.earliest_step >= 0, "unshare.earliest_step", self.earliest_step, "a number of at least 0")
        latest, expected = self.latest_step, f"at least unshare.earliest_step={self.earliest_step}, or null"
        check(latest is None or latest >= self.earliest_step, "unshare.latest_step", latest, expected)
        if self.policy in ("adaptive", "multi_step"):
            expected = f"a number of updates with unshare.policy={self.policy}"
            check(self.check_every is not None, "unshare.check_every", self.check_every, expected)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule.

    AdamW is torch's, which corrects the bias of both moments; the optimizer of the original BERT does not,
    so its first few thousand updates are larger than ours at the same rate.
    """

    name: str = "adamw"
    """`adamw`, or `sgd` (no momentum: the notation of the paper's Algorithm 1)."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-6
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and layer norms have none."""
    clip_norm: Optional[float] = 1.0
    """Largest global gradient norm; null: no clipping."""
    warmup_steps: int = 100
    """Updates over which the rate rises linearly from 0 to `lr`."""
    schedule: str = "linear"
    """After warm-up: `linear` or `cosine` to 0 at max_steps, `constant`, or `wsd` (constant, then linear to 0)."""
    decay_fraction: float = 0.1
    """For `wsd`: share of max_steps, at the end, over which the rate falls to 0."""

    def __post_init__(self) -> None:
        check_choice("optim.name", self.name, ("adamw", "sgd"))
        check_choice("optim.schedule", self.schedule, ("linear", "cosine", "constant", "wsd"))
        check_positive("optim.", self, "lr", "eps", "clip_norm")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "a number of at least 0")
        check(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "a number of at least 0")
        check_fraction("optim.", self, "decay_fraction")
        betas_are_valid = len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)
        check(betas_are_valid, "optim.betas", list(self.betas), "two numbers from 0 up to, not including, 1")
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))


@dataclass(frozen=True)
class EngineConfig:
    """How the arithmetic is carried out. `auto` follows a fixed rule, never a timing."""

    device: str = "auto"
    """`auto` (CUDA when there is one), `cpu` or `cuda`."""
    precision: str = "auto"
    """`auto` (bf16 where the hardware has it, else fp32), `bf16`, `fp16` (with a gradient scaler) or `fp32`."""
    micro_batch_size: Optional[int] = None
    """Upper bound of the sequences in one forward pass on one process; null: all of the process's share."""
    compile: str = "auto"
    """torch.compile of each layer: `auto` (on for CUDA, off for CPU), `true` or `false`."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more time."""
    num_workers: Optional[int] = None
    """Processes that read and mask batches; null: 0 on CPU, 2 on CUDA."""
    group_timeout_minutes: float = 30.0
    """How long a process waits for another one of its job before it gives up. What rank 0 does alone, such as saving,
    may take ten times as long; preparing data as long as it takes."""

    def __post_init__(self) -> None:
        check_choice("engine.device", self.device, ("auto", "cpu", "cuda"))
        check_choice("engine.precision", self.precision, ("auto", "bf16", "fp16", "fp32"))
        object.__setattr__(self, "compile", str(self.compile).lower())
        check_choice("engine.compile", self.compile, ("auto", "true", "false"))
        check_positive("engine.", self, "micro_batch_size", "group_timeout_minutes")
        workers = self.num_workers
        check(workers is None or workers >= 0, "engine.num_workers", workers, "a number of at least 0, or null")


@dataclass(frozen=True)
class CheckpointConfig:
    """When training state is saved, what is kept, and whether a run resumes."""

    every_steps: Optional[int] = 500
    """Updates between checkpoints; null: only before unsharing, when stopped, and at the end."""
    keep_last: int = 2
    """Newest checkpoints that are kept. The one before each unsharing is kept besides."""
    keep_every: Optional[int] = None
    """Also keep every checkpoint whose step is a multiple of this."""
    resume: str = "auto"
    """`auto` (from the newest good checkpoint of the run folder), `never`, or the path of a checkpoint."""
    accept_other_batch: bool = False
    """Go on in a run although global_batch_size is another one now: no text is repeated or left out, but it is not the
    same training any more. false: refused."""

    def __post_init__(self) -> None:
        check_positive("checkpoint.", self, "every_steps", "keep_last", "keep_every")
        check(bool(self.resume), "checkpoint.resume", self.resume, "auto, never, or the path of a checkpoint")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out masked-LM loss and accuracy, always on the same sequences with the same masks."""

    every_steps: Optional[int] = 250
    """Updates between evaluations; null: only at step 0 and at the end."""
    max_sequences: int = 2000
    """Upper bound of the held-out sequences, chosen by a hash of their content."""

    def __post_init__(self) -> None:
        check_positive("evaluation.", self, "every_steps", "max_sequences")


@dataclass(frozen=True)
class LoggingConfig:
    """Where progress goes besides the terminal, `metrics.jsonl` and `curves.png`."""

    every_steps: int = 10
    """Updates between two rows of figures."""
    tensorboard: bool = False
    """Write TensorBoard events (extra `tensorboard`)."""
    wandb: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "sharebert"
    """Project of the W&B run."""

    def __post_init__(self) -> None:
        check_positive("logging.", self, "every_steps")


@dataclass(frozen=True)
class DebugConfig:
    """Switches for finding faults; all of them cost time."""

    deterministic: bool = False
    """Only deterministic kernels: runs on CUDA repeat bit for bit."""
    detect_anomaly: bool = False
    """torch's anomaly mode: name the operation whose backward pass made a NaN."""


@dataclass(frozen=True)
class TrainConfig:
    """One pretraining run."""

    run_name: Optional[str] = None
    """Folder of the run below output_dir; null: the experiment's name, else `run`."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""
    seed: int = 1
    """Seed of initial weights, data order, masks and dropout."""
    max_steps: int = 800
    """Updates in the run, T."""
    global_batch_size: int = 64
    """Sequences in an update, over all processes and micro-batches."""
    init_from: Optional[str] = None
    """Start from the weights of this checkpoint, or of a folder that Hugging Face Transformers wrote (BERT or
    MegatronBert), at step 0 with a fresh optimizer. Layers that share begin at their mean. null: random weights."""
    max_run_minutes: Optional[float] = None
    """Save and leave with status 75 this long after the process began, before a queue's time limit; null: never. What
    a save takes is kept free before it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    unshare: UnshareConfig = field(default_factory=UnshareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        check_positive("", self, "max_steps", "global_batch_size", "max_run_minutes")
        check(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 below 2**63")
        positions = self.model.max_position_embeddings
        expected = f"at most model.max_position_embeddings={positions}"
        check(self.data.seq_len <= positions, "data.seq_len", self.data.seq_len, expected)
        layers, unit_layers = self.model.num_layers, self.unshare.unit_layers
        expected = f"a divisor of model.num_layers={layers}"
        check(layers % unit_layers == 0, "unshare.unit_layers", unit_layers, expected)
        if self.unshare.policy in ("adaptive", "multi_step"):
            expected = f"at least two units to compare with unshare.policy={self.unshare.policy}"
            check(layers > unit_layers, "model.num_layers / unshare.unit_layers", layers // unit_layers, expected)
        if self.unshare.policy == "fixed":
            step, expected = self.unshare.step, f"at most max_steps={self.max_steps}"
            check(step is None or step <= self.max_steps, "unshare.step", step, expected)


class _HasBatch(Protocol):
    @property
    def global_batch_size(self) -> int: ...


def check_world_size(config: _HasBatch, world_size: int) -> None:
    """Refuse a global batch that cannot be split evenly over `world_size` processes."""
    expected = f"a multiple of the {world_size} processes of this job"
    divides = config.global_batch_size % world_size == 0
    check(divides, "global_batch_size", config.global_batch_size, expected)
