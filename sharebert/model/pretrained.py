"""Folders that Hugging Face Transformers wrote, as a start for pretraining; Transformers itself is not needed.

Any class of BERT (Post-LN) or MegatronBert (Pre-LN) will do. What our model would compute otherwise is refused.
"""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sharebert.config import ConfigError, ModelConfig
from sharebert.model.bert import Bert
from sharebert.model.convert import from_transformers_state
from sharebert.model.heads import LAYER_NORM_EPS

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_NORMS = {"bert": "post", "megatron-bert": "pre"}
"""By `model_type`; the configurations of the original BERT, which have none, are of the first."""
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_FIXED = {
    "hidden_act": "gelu",  # the exact one; gelu_new and gelu_fast are the tanh approximation
    "layer_norm_eps": LAYER_NORM_EPS,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "is_decoder": False,
}
"""What our model cannot have otherwise; Transformers' defaults, where config.json lacks the key, are the same."""


def is_transformers_folder(folder: Path) -> bool:
    """Whether `folder` holds a model as Transformers writes it."""
    return (folder / CONFIG_FILE).is_file()


def read_shape(folder: Path) -> dict[str, Any]:
    """Sizes and norm of the model in `folder`, under the names of `ModelConfig`.

    Raises:
        ConfigError: it is of another architecture, or computes what our model does not.
    """
    file = folder / CONFIG_FILE
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"init_from: {file}: expected a readable config.json ({error})") from error
    model_type = config.get("model_type", "bert")
    if model_type not in _NORMS:
        raise ConfigError(f"init_from: {file}: model_type={model_type!r}, expected one of {', '.join(_NORMS)}")
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise ConfigError(f"init_from: {file}: {key}={config[key]!r}, expected {expected!r}")
    missing = [key for key in _SIZES.values() if key not in config]
    if missing:
        raise ConfigError(f"init_from: {file}: no key {missing[0]!r}")
    return {**{ours: config[theirs] for ours, theirs in _SIZES.items()}, "norm": _NORMS[model_type]}


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of the model in `folder`: one, or those of its index.

    Raises:
        ConfigError: there is none.
    """
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return sorted({folder / part for part in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    raise ConfigError(f"init_from={str(folder)!r}: no weights there; expected {' or '.join(_WEIGHT_FILES)}")


def read_pretrained(folder: Path, config: ModelConfig) -> tuple[dict[str, Tensor], list[str]]:
    """The weights in `folder` under our names, and the names of those left out, as `from_transformers_state` gives.

    Raises:
        ConfigError: a file is missing or damaged, or the weights do not fit `config`.
    """
    state: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            state |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except (OSError, EOFError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(f"init_from: {file}: cannot be read ({error})") from error
    try:
        return from_transformers_state(config, state)
    except ValueError as error:
        raise ConfigError(f"init_from={str(folder)!r}: {error}") from error


@torch.no_grad()
def load_pretrained(folder: Path, model: Bert) -> None:
    """Copy the weights in `folder` into `model`, and log what was left out and what keeps its initial values.

    Raises:
        ConfigError: as :func:`read_pretrained`; or the vocabulary is smaller than that of the data.
    """
    tensors, left_out = read_pretrained(folder, model.config)
    num_rows, vocab_size = len(tensors["embeddings.token.weight"]), model.vocab_size
    if num_rows < vocab_size:
        came = f"init_from={str(folder)!r}: a vocabulary of {num_rows}"
        raise ConfigError(f"{came}, expected {vocab_size} as in the data")
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name in ("embeddings.token.weight", "head.bias"):
            parameters[name][:vocab_size] = tensor[:vocab_size]  # (V, ...): without our padding, and without theirs
        else:
            parameters[name].copy_(tensor)
    _log_differences(tensors, left_out, vocab_size, folder)


def _log_differences(tensors: dict[str, Tensor], left_out: list[str], vocab_size: int, folder: Path) -> None:
    """What is not as in the folder, or will not be at the end."""
    logger.info("init_from: the weights of %s", folder)
    num_rows = len(tensors["embeddings.token.weight"])
    if num_rows > vocab_size:
        logger.info("init_from: ids %d to %d are no tokens of the data: left out", vocab_size, num_rows - 1)
    if left_out:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in left_out)
        logger.info("init_from: left out: %s", ", ".join(modules))
    if "head.bias" not in tensors:
        logger.info("init_from: no masked-LM head there: it begins with random weights")
    of_types = tensors["embeddings.token_type.weight"]
    if not torch.equal(of_types[0], of_types[1]):
        logger.info("init_from: token type 1 is not trained here, and becomes a copy of type 0 in an export")
