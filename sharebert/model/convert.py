"""Our weights under the names of Hugging Face Transformers; Transformers itself is not needed.

Legend: D hidden size, V the vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sharebert.config import ModelConfig
from sharebert.model.bert import Bert
from sharebert.model.heads import LAYER_NORM_EPS

_LAYER_MODULES = {
    "attention.output": "attention.output.dense",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
}
_LAYER_NORMS = {
    "post": {"attention_norm": "attention.output.LayerNorm", "feed_forward_norm": "output.LayerNorm"},
    "pre": {"attention_norm": "attention.ln", "feed_forward_norm": "ln"},
}
_OTHER_MODULES = {
    "embeddings.token": "bert.embeddings.word_embeddings",
    "embeddings.position": "bert.embeddings.position_embeddings",
    "embeddings.token_type": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "encoder.norm": "bert.encoder.ln",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}


def to_transformers_state(model: Bert) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Name of the Transformers class, its configuration, and its state.

    Returns:
        architecture: ``BertForMaskedLM`` (Post-LN) or ``MegatronBertForMaskedLM`` (Pre-LN).
        config: what its ``config.json`` holds, but for the ids of the special tokens, which only a
            tokenizer knows.
        state: independent tensors (layers that share weights become copies), with the real vocabulary.
            The tied decoder is left out, as Transformers' own `save_pretrained` does.
    """
    is_post = model.config.norm == "post"
    architecture = "BertForMaskedLM" if is_post else "MegatronBertForMaskedLM"
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if name == "embeddings.token.weight":
            tensor = tensor[: model.vocab_size]  # (V, D)
        module, _, leaf = name.rpartition(".")
        if module.startswith("encoder.layers."):
            index, _, inner = module.removeprefix("encoder.layers.").partition(".")
            targets = _layer_tensors(inner, tensor, model.config)
            named = {f"bert.encoder.layer.{index}.{target}.{leaf}": part for target, part in targets.items()}
        else:
            named = {f"{_OTHER_MODULES[module]}.{leaf}": tensor}
        state.update({target: part.clone().contiguous() for target, part in named.items()})
    return architecture, _transformers_config(model, architecture), state


def _layer_tensors(module: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Names of the modules of a Transformers layer that take parts of `tensor` of our layer's `module`."""
    if module == "attention.qkv":
        names = ("query", "key", "value")
        return {f"attention.self.{name}": part for name, part in zip(names, tensor.chunk(3), strict=True)}
    return {_LAYER_MODULES.get(module) or _LAYER_NORMS[config.norm][module]: tensor}


def _transformers_config(model: Bert, architecture: str) -> dict[str, Any]:
    config = model.config
    return {
        "architectures": [architecture],
        "model_type": "bert" if architecture == "BertForMaskedLM" else "megatron-bert",
        "vocab_size": model.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": 2,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": LAYER_NORM_EPS,
        "tie_word_embeddings": True,
    }
