"""BERT with a masked-LM head: embeddings, encoder, head, and its initial weights.

With ``norm=post`` it computes what Transformers' ``BertForMaskedLM`` computes, with ``norm=pre`` what its
``MegatronBertForMaskedLM`` does. The encoder runs a list of layers and does not know whether they share weights.

Legend: B sequences, T tokens, K prediction slots, D hidden size, V the vocabulary, W = V rounded up to 64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharebert.config import ModelConfig
from sharebert.model.dropout import Dropout
from sharebert.model.heads import LAYER_NORM_EPS, MaskedLanguageModelHead
from sharebert.model.layers import TransformerLayer
from sharebert.seeding import derive_seed

VOCABULARY_MULTIPLE = 64
"""Matrix products are fast at such sizes. The ids added are never drawn and never predicted."""


def padded_vocabulary_size(vocab_size: int) -> int:
    """`vocab_size` rounded up to a multiple of 64."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def positions_within(documents: Tensor) -> Tensor:
    """Position of each token counted from the first of its document; int64 (B, T) from document numbers (B, T)."""
    T = documents.shape[1]
    place = torch.arange(T, device=documents.device)  # (T,)
    begins = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # (B, T)
    return place - torch.cummax(place * begins, dim=1).values


class Embeddings(nn.Module):
    """Sum of token, position and token-type embeddings; all tokens are of type 0 (no next-sentence task)."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(padded_vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = nn.Embedding(2, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS) if config.norm == "post" else None
        self.dropout = Dropout(config.dropout)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        T = input_ids.shape[1]
        if documents is None:
            same_for_all_rows = self.position.weight[:T] + self.token_type.weight[0]  # (T, D)
            hidden = self.token(input_ids) + same_for_all_rows  # (B, T, D)
        else:
            within = self.position(positions_within(documents)) + self.token_type.weight[0]  # (B, T, D)
            hidden = self.token(input_ids) + within
        hidden = hidden if self.norm is None else self.norm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped  # (B, T, D)


class Encoder(nn.Module):
    """The stack of layers; with Pre-LN a last norm ends it.

    Attributes:
        layers: the layer modules. The objects are distinct; their Parameter objects may be the same.
        activation_checkpointing: recompute each layer's activations in the backward pass. May be switched
            at any time.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation_checkpointing = False
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS) if config.norm == "pre" else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, D) to (B, K, D).

        The last layer computes the tokens at `positions` only, as nothing else is read of it: exactly the same numbers
        for about 0.7 of a layer less work.

        Args:
            hidden: (B, T, D).
            positions: int64 (B, K).
            attention_mask: bool (B, T), true at real tokens, or None.
            documents: int64 (B, T); a token attends to those of its own document only. Padding is a document too, so
                the mask is not needed besides, and no row of scores is empty. None: to all.
        """
        mask = last_mask = None if attention_mask is None else attention_mask[:, None, None, :]  # (B, 1, 1, T)
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
            last_mask = documents.gather(1, positions)[:, None, :, None] == documents[:, None, None, :]  # (B, 1, K, T)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        # Padding comes once an epoch: a graph of its own would be compiled in the middle of a run.
        is_rare = attention_mask is not None and documents is None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            arguments = (hidden, last_mask, positions) if index == last else (hidden, mask)
            run: Callable[..., Tensor] = layer._call_impl if is_rare else layer  # the former: without compiled code
            hidden = checkpoint(run, *arguments, use_reentrant=False) if recompute else run(*arguments)
        return hidden if self.norm is None else self.norm(hidden)  # (B, K, D)


class Bert(nn.Module):
    """A BERT encoder and its masked-LM head.

    Args:
        config: sizes, norm and dropout.
        vocab_size: V, the real size of the vocabulary.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocabulary_size(vocab_size)
        self.embeddings = Embeddings(config, self.padded_vocab_size)
        self.encoder = Encoder(config)
        self.head = MaskedLanguageModelHead(config, vocab_size, self.padded_vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Score the vocabulary at the prediction slots.

        Args:
            input_ids: int64 (B, T), T at most `max_position_embeddings`.
            positions: int64 (B, K), from 0 to T - 1.
            attention_mask: bool (B, T), true at real tokens; None when there is no padding, which is faster.
            documents: int64 (B, T), ascending along a row; attention stays inside a document and positions count from
                its first token. None: documents do not matter.

        Returns:
            Logits (B, K, W). Those of the ids from V on are so low that a softmax gives them exactly 0.
        """
        hidden = self.encoder(self.embeddings(input_ids, documents), positions, attention_mask, documents)  # (B, K, D)
        logits: Tensor = self.head(hidden, self.embeddings.token.weight)
        return logits  # (B, K, W)


def _same_name(name: str) -> str:
    return name


@torch.no_grad()
def initialize(
    model: Bert, seed: int, initializer_range: float, name_in_unit: Callable[[str], str] = _same_name
) -> None:
    """Give every parameter its initial value, a pure function of (seed, name_in_unit(its name)).

    Weights and embeddings are normal(0, initializer_range), biases 0, norm weights 1. Rows of the token
    embedding beyond the real vocabulary are 0 and stay so, and the values of the others do not depend on
    how many there are.

    Args:
        model: on any device; values are drawn on the CPU, so they are the same on all of them.
        seed: the run's seed.
        initializer_range: standard deviation.
        name_in_unit: maps names that must start equal to one name, as ``encoder.layers.7.x`` to
            ``encoder.layers.0.x`` where layers share.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:  # a norm's weight
            parameter.fill_(1.0)
        else:
            generator = torch.Generator().manual_seed(derive_seed(seed, "weights", name_in_unit(name)))
            rows = model.vocab_size if parameter is model.embeddings.token.weight else parameter.shape[0]
            values = torch.empty(rows, *parameter.shape[1:]).normal_(0.0, initializer_range, generator=generator)
            parameter.zero_()
            parameter[:rows].copy_(values)
