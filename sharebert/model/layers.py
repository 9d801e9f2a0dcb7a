"""One transformer layer, with the norm before (Pre-LN) or after (Post-LN) its two sublayers.

Legend: B sequences, T tokens, K prediction slots, Q the tokens that are computed (T, or K in the last layer),
D hidden size, H heads.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from sharebert.config import ModelConfig
from sharebert.model.attention import attend
from sharebert.model.dropout import Dropout
from sharebert.model.heads import LAYER_NORM_EPS


def tokens_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """(B, K, D): the tokens of (B, T, D) at int64 `positions` (B, K)."""
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to every token that is not padding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)  # one large product instead of three
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            hidden: (B, T, D).
            attention_mask: bool (B, 1, 1 or Q, T), true where a token may be attended to; None: everywhere.
            positions: int64 (B, K), tokens to compute; None: all of them.

        Returns:
            (B, Q, D).
        """
        B, T, D = hidden.shape
        heads = (self.num_heads, self.head_size)
        if positions is None:
            query, key, value = self.qkv(hidden).view(B, T, 3, *heads).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            query = functional.linear(tokens_at(hidden, positions), weight[:D], bias[:D])
            query = query.view(B, -1, *heads).transpose(1, 2)  # (B, H, K, D / H)
            key_value = functional.linear(hidden, weight[D:], bias[D:]).view(B, T, 2, *heads)
            key, value = key_value.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D / H)
        dropout = self.dropout if self.training else 0.0
        context = attend(query, key, value, attention_mask, dropout)  # (B, H, Q, D / H)
        output: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return output


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
    all of them, and one more for the last, which computes the prediction slots only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_is_first = config.norm == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = Dropout(config.dropout)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, Q, D); mask and positions are those of :class:`SelfAttention`."""
        if self.norm_is_first:
            attended = self.attention(self.attention_norm(hidden), attention_mask, positions)
        else:
            attended = self.attention(hidden, attention_mask, positions)
        kept = hidden if positions is None else tokens_at(hidden, positions)
        if self.norm_is_first:
            kept = kept + self.dropout(attended)
            output: Tensor = kept + self.dropout(self.feed_forward(self.feed_forward_norm(kept)))
        else:
            kept = self.attention_norm(kept + self.dropout(attended))
            output = self.feed_forward_norm(kept + self.dropout(self.feed_forward(kept)))
        return output
