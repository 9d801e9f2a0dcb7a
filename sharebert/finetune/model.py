"""The model of a task: a Transformers class for the encoder's kind, with the encoder's weights and a new head.

Weights are put in by name here, rather than by `from_pretrained`, so that every tensor of the encoder is known to
have arrived bit for bit, and so that new weights depend on nothing but the seed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sharebert.checkpoint import META_FILE, MODEL_FILE, TOKENIZER_FILE
from sharebert.config import ConfigError, FinetuneConfig
from sharebert.data.format import DataError
from sharebert.finetune.problem import Problem
from sharebert.model.convert import with_usual_names
from sharebert.seeding import derive_seed

logger = logging.getLogger(__name__)

ENCODER_PREFIX = "bert."
POOLER_PREFIX = "bert.pooler."
MODEL_TYPES = ("bert", "megatron-bert")
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
PICKLED_FILE = "pytorch_model.bin"


def check_extra() -> None:
    """Refuse, before any work, a machine without the libraries of the extra `hf`.

    Raises:
        ConfigError: saying how to install them.
    """
    for package in ("transformers", "sklearn", "scipy"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"finetune: expected the package {package}; pip install 'sharebert[hf]'")


def encoder_folder(config: FinetuneConfig) -> Path:
    """The folder that `encoder` names."""
    return Path(str(config.encoder)).expanduser()


def read_encoder_config(folder: Path) -> dict[str, Any]:
    """`config.json` of an encoder folder.

    Raises:
        ConfigError: the folder is none, or holds something else; the message says what to do.
    """
    given = f"encoder={str(folder)!r}"
    if (folder / META_FILE).is_file() and (folder / "training_state.pt").is_file():
        raise ConfigError(f"{given}: a training checkpoint; export it first: sharebert export {folder} my-bert")
    missing = [name for name in ("config.json", MODEL_FILE, TOKENIZER_FILE) if not (folder / name).is_file()]
    if MODEL_FILE in missing and (folder / PICKLED_FILE).is_file():
        expected = "load it with Transformers' AutoModel and save_pretrained it to another folder, with its tokenizer"
        raise ConfigError(f"{given}: {PICKLED_FILE} there; expected {MODEL_FILE}: {expected}")
    if missing:
        expected = "expected a folder written by `sharebert export CHECKPOINT FOLDER`"
        raise ConfigError(f"{given}: no {missing[0]} there; {expected}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{given}: config.json is not JSON ({error})") from error
    if config.get("model_type") not in MODEL_TYPES:
        expected = f"expected one of {', '.join(MODEL_TYPES)}"
        raise ConfigError(f"{given}: model_type {config.get('model_type')!r} in config.json; {expected}")
    return dict(config)


def build_model(
    folder: Path, problem: Problem, seed: int, random_encoder: bool, dropout: float | None = None
) -> nn.Module:
    """The model to fine-tune, on the host, in training mode.

    Args:
        folder: of the encoder.
        problem: names the class and its head.
        seed: of the new weights.
        random_encoder: take the encoder's size only.
        dropout: of hidden states, attention and head; None: the encoder's.

    Raises:
        DataError: a tensor of the encoder is missing, superfluous, damaged or of another size.
    """
    model = _fresh_model(folder, problem, seed, dropout)
    names = dict(model.named_parameters())
    if random_encoder:
        logger.info("encoder: random weights of the size of %s; all %d tensors are new", folder, len(names))
        return model.train()
    tensors = _encoder_tensors(folder)
    expected = {name for name in names if name.startswith(ENCODER_PREFIX) and not name.startswith(POOLER_PREFIX)}
    # A pooler in the folder is used where the model has one: that of an original BERT, or of another fine-tuning.
    surplus = {name for name in tensors.keys() - names.keys() if not name.startswith(POOLER_PREFIX)}
    if wrong := sorted((expected - tensors.keys()) | surplus):
        what = "is missing" if wrong[0] in expected else "has no place in the model"
        raise DataError(f"{folder / MODEL_FILE}: tensor {wrong[0]!r} {what}")
    loaded = {name: tensor for name, tensor in tensors.items() if name in names}
    _copy(loaded, names, folder)
    new = [name for name in names if name not in loaded]
    logger.info("encoder: %d tensors of %s, sha256 %s", len(loaded), folder, tensors_hash(loaded)[:16])
    logger.info("new, random (%d tensors): %s", len(new), ", ".join(new))
    return model.train()


def load_fine_tuned(folder: Path, problem: Problem) -> nn.Module:
    """A fine-tuned model with its head, whose classes are brought into the order of the problem's.

    Raises:
        ConfigError: it has other classes.
        DataError: a tensor is missing or of another size.
    """
    from transformers import AutoConfig

    names: Mapping[str, int] = problem.model_settings()["label2id"]
    theirs: Mapping[str, int] = AutoConfig.from_pretrained(folder).label2id
    if theirs.keys() != names.keys():
        expected = f"expected a model fine-tuned on {', '.join(names)} (task=mnli)"
        raise ConfigError(f"encoder={str(folder)!r}: classes {', '.join(theirs)}; {expected}")
    model = _fresh_model(folder, problem, seed=0)
    parameters, tensors = dict(model.named_parameters()), _tensors(folder)
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise DataError(f"{folder / MODEL_FILE}: tensor {missing[0]!r} is missing")
    order = torch.tensor([theirs[name] for name in names])
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name][order]
    _copy({name: tensors[name] for name in parameters}, parameters, folder)
    logger.info("model: %s, all %d tensors", folder, len(parameters))
    return model.eval()


def _fresh_model(folder: Path, problem: Problem, seed: int, dropout: float | None = None) -> nn.Module:
    """The model with random weights: a function of the seed, whatever was drawn before."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # our own lines say which tensors are new
    transformers.utils.logging.disable_progress_bar()
    settings = problem.model_settings()
    if dropout is not None:
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
        settings |= dict.fromkeys(names, dropout)  # the last one is unknown to MegatronBert, and passed over
    config = transformers.AutoConfig.from_pretrained(folder, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "finetune", "new weights"))
        model: nn.Module = getattr(transformers, problem.model_class).from_config(config)
    return model.float()


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Under the usual names, whichever the folder has, and without a masked-LM head, which no task uses."""
    try:
        tensors = load_file(folder / MODEL_FILE)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder / MODEL_FILE}: cannot be read ({error})") from error
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("cls.")}
    return {name: tensor.float() for name, tensor in with_usual_names(kept).items()}


def _encoder_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tensors(folder).items() if name.startswith(ENCODER_PREFIX)}


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], folder: Path) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            found, expected = tuple(tensor.shape), tuple(parameters[name].shape)
            raise DataError(f"{folder / MODEL_FILE}: tensor {name!r} is {found}; expected {expected}")
        parameters[name].copy_(tensor)


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_model(model: Any, encoder: Path, target: Path) -> None:
    """Write the model with the encoder's tokenizer, as a folder that Transformers loads; it appears as a whole."""
    temporary = target.with_name(f".{target.name}.new")
    for path in (temporary, target):
        shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    for name in TOKENIZER_FILES:
        if (encoder / name).is_file():
            shutil.copyfile(encoder / name, temporary / name)
    temporary.rename(target)
