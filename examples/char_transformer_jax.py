"""Train a character-level transformer twice, with cupyflash and with JAX's own attention.

Both runs start from the same weights and see the same batches, so their losses differ by rounding
alone, which grows as training goes on.

    python examples/char_transformer_jax.py            # on a GPU, bfloat16
    python examples/char_transformer_jax.py --smoke    # on the CPU, some seconds
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cupyflash

TEXT = Path(__file__).resolve().parents[1] / "README.md"
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Weights = dict[str, Any]
RATE, DECAYS, TINY = 1e-3, (0.9, 0.999), 1e-8  # of Adam


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend causally, (batch, length, heads, head_dim), by cupyflash."""
    return cupyflash.attention(q, k, v, causal=True)


def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Do the same by JAX."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def initial(characters: int, options: argparse.Namespace) -> Weights:
    """Draw the weights; matrices map rows."""
    keys = iter(jax.random.split(jax.random.key(0), 3 + 4 * options.layers))
    width = options.width

    def matrix(rows: int, columns: int, scale: float | None = None) -> jax.Array:
        scale = rows**-0.5 if scale is None else scale
        return scale * jax.random.normal(next(keys), (rows, columns))

    return {
        "embed": matrix(characters, width, 0.02),
        "place": matrix(options.length, width, 0.02),
        "head": matrix(width, characters),
        "blocks": [
            {
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width),
            }
            for _ in range(options.layers)
        ],
    }


def normed(x: jax.Array) -> jax.Array:
    """Give each row the mean 0 and the variance 1."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def loss_of(weights: Weights, rows: jax.Array, attend: Attend, heads: int, dtype: Any) -> jax.Array:
    """Return the mean cross entropy of each next character."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x = weights["embed"][tokens] + weights["place"]
    batch, length, width = x.shape
    for block in weights["blocks"]:
        qkv = (normed(x) @ block["qkv"]).reshape(batch, length, 3, heads, width // heads)
        out = attend(*(qkv[:, :, n] for n in range(3)))
        x = x + out.reshape(batch, length, width) @ block["out"]
        x = x + jax.nn.gelu(normed(x) @ block["up"]) @ block["down"]
    logs = jax.nn.log_softmax((normed(x) @ weights["head"]).astype(jnp.float32))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def train(attend: Attend, options: argparse.Namespace) -> list[float]:
    """Return the loss of each step."""
    text = TEXT.read_text()
    vocabulary = sorted(set(text))
    tokens = np.array([vocabulary.index(c) for c in text])
    weights = initial(len(vocabulary), options)
    means, squares = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    dtype = jnp.float32 if options.smoke else jnp.bfloat16
    value = functools.partial(loss_of, attend=attend, heads=options.heads, dtype=dtype)

    @jax.jit
    def step(weights: Weights, means: Weights, squares: Weights, rows: Any, t: Any) -> Any:
        loss, slopes = jax.value_and_grad(value)(weights, rows)
        a, b = DECAYS
        means = jax.tree.map(lambda m, g: a * m + (1 - a) * g, means, slopes)
        squares = jax.tree.map(lambda s, g: b * s + (1 - b) * g * g, squares, slopes)

        def moved(w: Any, m: Any, s: Any) -> Any:
            return w - RATE * (m / (1 - a**t)) / (jnp.sqrt(s / (1 - b**t)) + TINY)

        return jax.tree.map(moved, weights, means, squares), means, squares, loss

    draws, losses = np.random.default_rng(1), []
    for n in range(options.steps):
        at = draws.integers(len(text) - options.length - 1, size=options.batch)
        rows = np.stack([tokens[i : i + options.length + 1] for i in at])
        weights, means, squares, loss = step(weights, means, squares, rows, n + 1.0)
        losses.append(float(loss))
        if n % max(options.steps // 10, 1) == 0:
            print(f"{attend.__name__:>7} step {n:5} loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a small model on the CPU")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    if options.smoke:
        jax.config.update("jax_platforms", "cpu")
    small = {"steps": 20, "batch": 4, "length": 64, "width": 64, "heads": 2, "layers": 2}
    large = {"steps": 2000, "batch": 32, "length": 512, "width": 512, "heads": 8, "layers": 6}
    for name, value in (small if options.smoke else large).items():
        setattr(options, name, getattr(options, name, None) or value)
    mine, other = train(ours, options), train(theirs, options)
    worst = max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
    print(f"last losses {mine[-1]:.4f} and {other[-1]:.4f}, apart by at most {worst:.2e}")


if __name__ == "__main__":
    main()
