"""The data of the three models: digits of scikit-learn, Python's own manual, and a made-up log of clicks."""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """1,500 images to train with, and the other 297 with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])


class Manual(Dataset):
    """Pieces of Python's manual, each beside the same piece one character later: int64 ``[length]`` both."""

    def __init__(self, length: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.length, self.characters = length, sorted(set(text))
        self.text = self.tokens(text)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        first = number * self.length
        return self.text[first : first + self.length], self.text[first + 1 : first + self.length + 1]

    def tokens(self, text: str) -> Tensor:
        number = {character: number for number, character in enumerate(self.characters)}
        return torch.tensor([number[character] for character in text])

    def written(self, tokens: Tensor) -> str:
        return "".join(self.characters[number] for number in tokens.tolist())


class Clicks(Dataset):
    """Rows (numbers float32 ``[13]``, categories int64 ``[tables]``, click float32). A few categories are frequent and
    most are rare, and a click depends on the numbers and on the categories."""

    def __init__(self, rows: int, tables: int, height: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.numbers = torch.rand(rows, 13, generator=random)
        skewed = torch.rand(rows, tables, generator=random) ** 4
        self.categories = (skewed * height).long()
        taste = torch.randn(997, generator=random)[self.categories % 997].mean(dim=1) * tables**0.5
        chance = torch.sigmoid(2 * taste + self.numbers.sum(dim=1) - 6.5)
        self.clicks = torch.bernoulli(chance, generator=random)

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.numbers[number], self.categories[number], self.clicks[number]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(zip(self.numbers[numbers], self.categories[numbers], self.clicks[numbers], strict=True))
