"""A small Transformer encoder for classifying texts, trained from scratch.

Vaswani et al. (2017), "Attention is all you need": word embeddings, learned positions,
encoder layers with the normalisation after each sum, and a linear classifier on what
comes out at [CLS], the first position. No dropout.

Shapes: B texts, T positions, E width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from dome_lab.paper.tasks.words import LENGTH, PADDING

WIDTH, NUM_HEADS, FEED_FORWARD, NUM_LAYERS = 64, 4, 256, 3  # the paper's


class Transformer(nn.Module):
    """The network, for texts (B, T) of word numbers, T = ``length``.

    Args:
        vocabulary_size: How many word numbers there are.
        num_classes: Outputs.
        length: Positions in a text, [CLS] included.
    """

    def __init__(
        self, vocabulary_size: int, num_classes: int, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, WIDTH)
        # Small against the words', which have variance 1.
        self.positions = nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(NUM_LAYERS))
        self.classifier = nn.Linear(WIDTH, num_classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits, shape (B, num_classes)."""
        x = self.words(texts) + self.positions
        seen = (texts != PADDING)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return self.classifier(x[:, 0])


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each added and then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, FEED_FORWARD)
        self.narrow = nn.Linear(FEED_FORWARD, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        # As torch initialises its own attention.
        nn.init.xavier_uniform_(self.query_key_value.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.merge.bias)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """The layer's output, shape (B, T, E).

        Args:
            x: What came out below, shape (B, T, E).
            seen: Positions that are not padding, shape (B, 1, 1, T).
        """
        x = self.attention_norm(x + self._attention(x, seen))
        return self.feed_forward_norm(x + self.narrow(relu(self.widen(x))))

    def _attention(self, x: Tensor, seen: Tensor) -> Tensor:
        B, T, E = x.shape
        heads = self.query_key_value(x).view(B, T, 3, NUM_HEADS, E // NUM_HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.merge(mixed.transpose(1, 2).reshape(B, T, E))
