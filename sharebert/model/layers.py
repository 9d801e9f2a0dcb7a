"""One transformer layer, with the norm before (Pre-LN) or after (Post-LN) its two sublayers.

Legend: B sequences, T tokens, D hidden size, H heads.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from sharebert.config import ModelConfig
from sharebert.model.heads import LAYER_NORM_EPS


class SelfAttention(nn.Module):
    """Multi-head attention of every token to every token that is not padding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)  # one large product instead of three
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Attend.

        Args:
            hidden: (B, T, D).
            attention_mask: bool (B, 1, 1, T), true where a token may be attended to; None: everywhere.
        """
        B, T, D = hidden.shape
        qkv = self.qkv(hidden).view(B, T, 3, self.num_heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D / H)
        dropout = self.dropout if self.training else 0.0
        context = functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout)
        output: Tensor = self.output(context.transpose(1, 2).reshape(B, T, D))
        return output  # (B, T, D)


class FeedForward(nn.Module):
    """Two linear maps with the exact (erf) GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(functional.gelu(self.up(hidden)))
        return output  # (B, T, D)


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual connection and a layer norm.

    It holds nothing that tells it from the other layers (no index): so `layer.compile()` makes one graph for
    all of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_is_first = config.norm == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D); the mask is that of :class:`SelfAttention`."""
        if self.norm_is_first:
            hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), attention_mask))
            hidden = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        else:
            hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, attention_mask)))
            hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden  # (B, T, D)
