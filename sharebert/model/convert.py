"""Our weights under the names of Hugging Face Transformers, and back; Transformers itself is not needed.

Legend: D hidden size, V the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
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
_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_DECODER, _BIAS = "cls.predictions.decoder.", "cls.predictions.bias"
_OTHER_HEADS = re.compile(r"bert\.pooler\.|(?!bert\.|cls\.predictions\.)")
"""Names of what a model has besides the encoder and the masked-LM head."""
SEQ_LEN_KEY = "sharebert_seq_len"
"""Key of our own in an exported `config.json`: the length of the sequences of pretraining, where it is known."""


def transformers_names(name: str, norm: str) -> list[str]:
    """Names in Transformers of the equal parts, along the first dimension, of our tensor `name`.

    One name for all but the projection to queries, keys and values, which is one matrix here.

    >>> transformers_names("encoder.layers.3.feed_forward.up.bias", "pre")
    ['bert.encoder.layer.3.intermediate.dense.bias']
    """
    module, _, leaf = name.rpartition(".")
    if not module.startswith("encoder.layers."):
        return [f"{_OTHER_MODULES[module]}.{leaf}"]
    index, _, inner = module.removeprefix("encoder.layers.").partition(".")
    if inner == "attention.qkv":
        targets = [f"attention.self.{part}" for part in ("query", "key", "value")]
    else:
        targets = [_LAYER_MODULES.get(inner) or _LAYER_NORMS[norm][inner]]
    return [f"bert.encoder.layer.{index}.{target}.{leaf}" for target in targets]


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
        if name == "embeddings.token.weight":
            tensor = tensor[: model.vocab_size]  # (V, D)
        targets = transformers_names(name, model.config.norm)
        parts = tensor.detach().chunk(len(targets))
        state.update({target: part.clone().contiguous() for target, part in zip(targets, parts, strict=True)})
    return architecture, _transformers_config(model, architecture), state


def from_transformers_state(config: ModelConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The state of a Transformers model of the shape `config` under our names, in fp32; undoes the above.

    Args:
        config: sizes and norm.
        state: of any BERT or MegatronBert class: with or without the prefix ``bert.``, the masked-LM head and other
            heads; a norm's weight and bias may have their old names, gamma and beta.

    Returns:
        tensors: the token embedding is (V, D), not padded. No ``head.`` where the state has no masked-LM head.
        left_out: names of the tensors of other heads.

    Raises:
        ValueError: a tensor is missing, of another shape, or has no place here; the message names it.
    """
    state = with_usual_names(state)
    if _WORD_EMBEDDINGS not in state:
        raise ValueError(f"no tensor {_WORD_EMBEDDINGS!r}")
    with torch.device("meta"):
        expected = Bert(config, len(state[_WORD_EMBEDDINGS])).state_dict()
    has_head = any(name.startswith("cls.predictions.") for name in state)
    tensors: dict[str, Tensor] = {}
    used = set()
    for name, reference in expected.items():
        if name.startswith("head.") and not has_head:
            continue
        sources = transformers_names(name, config.norm)
        if name == "embeddings.token.weight":
            reference = reference[: len(state[_WORD_EMBEDDINGS])]  # (V, D)
        for source, part in zip(sources, reference.chunk(len(sources)), strict=True):
            if source not in state:
                raise ValueError(f"no tensor {source!r}")
            if state[source].shape != part.shape:
                raise ValueError(f"{source!r} is {tuple(state[source].shape)}, expected {tuple(part.shape)}")
        tensors[name] = torch.cat([state[source] for source in sources]).float()
        used.update(sources)
    left_out = sorted(set(state) - used)
    strange = [name for name in left_out if not _OTHER_HEADS.match(name)]
    if strange:
        raise ValueError(f"{strange[0]!r} has no place in a model of these settings")
    return tensors, left_out


def with_usual_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names as ``BertForMaskedLM`` has them, and without a decoder, which has to be the token embedding.

    Raises:
        ValueError: the decoder has weights or a bias of its own.
    """
    prefix = "" if any(name.startswith("bert.") for name in state) else "bert."
    usual = {}
    for name, tensor in state.items():
        name = re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", name))
        usual[f"{prefix}{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name] = tensor
    if f"{_DECODER}bias" in usual:
        usual.setdefault(_BIAS, usual[f"{_DECODER}bias"])
    for leaf, tied_to in (("weight", _WORD_EMBEDDINGS), ("bias", _BIAS)):
        decoder = usual.pop(f"{_DECODER}{leaf}", None)
        if decoder is not None and tied_to in usual and not torch.equal(decoder, usual[tied_to]):
            raise ValueError(f"'{_DECODER}{leaf}' differs from {tied_to!r}; expected a tied decoder")
    usual.pop("bert.embeddings.position_ids", None)  # 0, 1, 2, ... as older versions saved it
    return usual


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
