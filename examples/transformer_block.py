"""VLA and HLA2 in somebody else's model: a Transformer block, padded batches, and token by token decoding.

Run it: `python examples/transformer_block.py`. It prints what it shows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn_cli.layers import HLA2, VLA, Mixer, MixerState


class Block(nn.Module):
    """What `nn.TransformerEncoderLayer(norm_first=True)` does, with a layer of linattn as its attention."""

    def __init__(self, attention: Mixer, d_model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, state: MixerState | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        y, state = self.attention(self.norm1(x), state, return_state=True, padding_mask=padding_mask)
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(self.norm2(x))), state


class TinyModel(nn.Module):
    """One block of each kind between an embedding and a head."""

    def __init__(self, vocabulary: int = 50, d_model: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        layers: list[Mixer] = [VLA(d_model, heads=4, short_conv=3), HLA2(d_model, heads=4, decay="mask")]
        self.blocks = nn.ModuleList(Block(layer, d_model) for layer in layers)
        self.head = nn.Linear(d_model, vocabulary)

    def forward(
        self, tokens: Tensor, states: list[MixerState] | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, list[MixerState]]:
        x, after = self.embedding(tokens), []
        for index, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[index], padding_mask)
            after.append(state)
        return self.head(x), after

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int) -> Tensor:
        """Greedy: the prompt in one call, then one token a call, at the same cost however long the context is."""
        logits, states = self(prompt)
        tokens = [logits[:, -1:].argmax(-1)]
        for _ in range(count - 1):
            logits, states = self(tokens[-1], states)
            tokens.append(logits.argmax(-1))
        return torch.cat(tokens, dim=1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = TinyModel().eval()
    tokens = torch.randint(50, (2, 12))
    shown = {}

    # It trains like any other module.
    logits, _ = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    shown["parameters with a gradient"] = float(sum(p.grad is not None for p in model.parameters()))
    shown["parameters"] = float(len(list(model.parameters())))

    # Padding, wherever it is, changes nothing of the real tokens.
    padded, mask = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 15, dtype=torch.bool)
    padded[0, 3:], mask[0, 3:] = tokens[0], True
    padded[1, :12], mask[1, :12] = tokens[1], True
    with torch.no_grad():
        whole, _ = model(tokens)
        inside, _ = model(padded, padding_mask=mask)
        shown["padding changes the logits by"] = float((inside[mask] - whole.flatten(0, 1)).abs().max())

        # Token by token is the same as all at once.
        pieces, carried = [], None
        for t in range(tokens.shape[1]):
            y, carried = model(tokens[:, t : t + 1], carried)
            pieces.append(y)
        shown["decoding changes the logits by"] = float((torch.cat(pieces, 1) - whole).abs().max())

    # Greedy decoding with the state, against asking for the whole sequence anew for every token.
    short, slow = model.generate(tokens, 8), tokens
    for _ in range(8):
        with torch.no_grad():
            slow = torch.cat((slow, model(slow)[0][:, -1:].argmax(-1)), dim=1)
    shown["generated tokens that differ"] = float((short != slow[:, 12:]).sum())
    return shown


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.3g}")
