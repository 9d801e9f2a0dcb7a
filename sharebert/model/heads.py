"""The masked-LM head.

Legend: B sequences, K prediction slots, D hidden size, V the vocabulary, W its padded size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharebert.config import ModelConfig

LAYER_NORM_EPS = 1e-12
"""As the original BERT, for every norm of the model. Under autocast they compute in fp32, where it does not vanish."""

PADDED_LOGIT = -1e4
"""Logit of the ids that only fill the vocabulary up. The softmax and its gradient are exactly 0 there, as
with -inf, but it fits into fp16 and can never turn into NaN."""


class MaskedLanguageModelHead(nn.Module):
    """Scores over the vocabulary, at the prediction slots only: about 15% of the work of scoring every token.

    The decoder is the token embedding itself, handed to :meth:`forward`: there is no second parameter that
    could come untied.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.num_padded_ids = padded_vocab_size - vocab_size
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.bias = nn.Parameter(torch.zeros(vocab_size))  # (V,)

    def forward(self, hidden: Tensor, token_embedding: Tensor) -> Tensor:
        """Score the vocabulary.

        Args:
            hidden: (B, K, D), the tokens at the prediction slots.
            token_embedding: (W, D), the decoder.

        Returns:
            Logits (B, K, W); while training in the type of autocast, else in that of the weights.
        """
        predicted = self.norm(functional.gelu(self.dense(hidden)))  # (B, K, D)
        bias = functional.pad(self.bias, (0, self.num_padded_ids), value=PADDED_LOGIT)  # (W,)
        if self.training:
            return functional.linear(predicted, token_embedding, bias)  # (B, K, W)
        # Held-out scores in full: between equal 16-bit logits the lower id would win, and figures would differ by
        # machine.
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(predicted.to(token_embedding.dtype), token_embedding, bias)
