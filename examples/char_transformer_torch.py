"""Train a character-level transformer twice, with cupyflash and with PyTorch's own attention.

Both runs start from the same weights and see the same batches, so their losses differ by rounding
alone, which grows as training goes on.

    python examples/char_transformer_torch.py            # on a GPU, bfloat16
    python examples/char_transformer_torch.py --smoke    # on the CPU, some seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import cupyflash

TEXT = Path(__file__).resolve().parents[1] / "README.md"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally, (batch, length, heads, head_dim), by cupyflash."""
    return cupyflash.attention(q, k, v, causal=True)


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Do the same by PyTorch, whose heads come before the length."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside the residual stream."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        x = x + self.out(self.attend(*qkv.unbind(2)).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """The next character's logits at each position."""

    def __init__(
        self, characters: int, length: int, width: int, heads: int, layers: int, attend: Attend
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, characters)."""
        return self.head(self.blocks(self.embed(tokens) + self.place))


def train(attend: Attend, options: argparse.Namespace) -> list[float]:
    """Return the loss of each step."""
    device = "cpu" if options.smoke else "cuda"
    text = TEXT.read_text()
    vocabulary = sorted(set(text))
    tokens = torch.tensor([vocabulary.index(c) for c in text], device=device)
    torch.manual_seed(0)
    sizes = (options.length, options.width, options.heads, options.layers)
    model = Transformer(len(vocabulary), *sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for step in range(options.steps):
        at = torch.randint(len(text) - options.length - 1, (options.batch,), generator=draws)
        rows = torch.stack([tokens[i : i + options.length + 1] for i in at.tolist()])
        with torch.autocast(device, torch.bfloat16, enabled=not options.smoke):
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(options.steps // 10, 1) == 0:
            print(f"{attend.__name__:>7} step {step:5} loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a small model on the CPU")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    small = {"steps": 20, "batch": 4, "length": 64, "width": 64, "heads": 2, "layers": 2}
    large = {"steps": 2000, "batch": 32, "length": 512, "width": 512, "heads": 8, "layers": 6}
    for name, value in (small if options.smoke else large).items():
        setattr(options, name, getattr(options, name, None) or value)
    mine, other = train(ours, options), train(theirs, options)
    worst = max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
    print(f"last losses {mine[-1]:.4f} and {other[-1]:.4f}, apart by at most {worst:.2e}")


if __name__ == "__main__":
    main()
