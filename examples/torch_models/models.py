"""The three models, which are plain torch: a ConvNet, a GPT and a DLRM."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, and dropout before the last layer, for images float32 ``[n, 1, 8, 8]``.

    GELU is smooth. With ReLU, a sum near 0 that rounds to the other sign changes a gradient by more than rounding does:
    with torch alone, two orders of the same rows then differ by 1e-2 after some trainings.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Block(nn.Module):
    """Attention to earlier positions, then two dense layers, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(rows, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(attention.transpose(1, 2).reshape(rows, length, width))
        return x + self.dense(self.before_dense(x))


class GPT(nn.Module):
    """The logits of the next character after each of ``tokens``, int64 ``[rows, length]``. The last layer and the
    embedding are one matrix (Radford et al., 2019, "Language models are unsupervised multitask learners")."""

    def __init__(self, characters: int, length: int, layers: int = 4, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.length = length
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        self.logits.weight = self.characters.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.logits(self.norm(self.blocks(self.characters(tokens) + self.positions(positions))))

    @torch.no_grad()
    def write(self, tokens: Tensor, count: int) -> Tensor:
        """``tokens``, int64 ``[length]``, and ``count`` more that are drawn one after the other."""
        random = torch.Generator().manual_seed(0)
        for _ in range(count):
            logits = self(tokens[None, -self.length :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=random)])
        return tokens


class DLRM(nn.Module):
    """The logit of a click, from numbers float32 ``[rows, 13]`` and categories int64 ``[rows, tables]``. The vectors of
    all categories and one of the numbers are multiplied with each other (Naumov et al., 2019, "Deep learning
    recommendation model for personalization and recommendation systems")."""

    def __init__(self, tables: int, height: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(height, width, sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1), persistent=False)
        for table in self.tables:
            nn.init.uniform_(table.weight, -1 / math.sqrt(height), 1 / math.sqrt(height))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = [table(column) for table, column in zip(self.tables, categories.T, strict=True)]
        every = torch.stack([dense, *vectors], dim=1)
        products = (every @ every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1))[:, 0]
