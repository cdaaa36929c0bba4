"""What `verify-scan` can check of any layer of the user's own, whatever is in it, and says where it cannot.

The layer is built as a model would build it, in float64, on random tokens. A causal layer that carries a state
must give the same output for the whole sequence, for two pieces, and token by token; no token may see a later
one; sequences of a batch may not see each other. What it should compute nobody here knows: for that a form with
a serial oracle is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from linattn_cli import own_mixer
from linattn_cli.compare import Comparison, Scale, budget, compare, name_of
from linattn_cli.settings import ModelConfig
from linattn_cli.verify import Row, judged, unjudged
from linattn_cli.verify_cases import Sizes
from linattn_cli.verify_forms import named_state

WHOLE = "whole sequence float64"


def verify_layer(name: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes, *, seed: int, device: str) -> Iterator[Row]:
    """The rows of a layer: its forward against itself, called in every way that must not matter."""
    yield from _Layer(name, sizes, seed, device).rows(dtypes)


class _Layer:
    def __init__(self, name: str, sizes: Sizes, seed: int, device: str) -> None:
        from linattn_cli.model import build_mixer

        self.name, self.own, self.sizes = name, own_mixer.load(name), sizes
        width = sizes.heads * sizes.key_dim
        config = ModelConfig(name=name, d_model=width, heads=sizes.heads, d_head=sizes.key_dim)
        torch.manual_seed(seed)
        # Built in float32, so that float64 and float32 have the same weights.
        self.single = build_mixer(config).to(device).eval()
        self.double = copy.deepcopy(self.single).double()
        generator = torch.Generator().manual_seed(seed)
        self.x, self.other = (
            torch.randn(sizes.batch, sizes.tokens, width, generator=generator).double().to(device) for _ in range(2)
        )

    def rows(self, dtypes: tuple[torch.dtype, ...]) -> Iterator[Row]:
        with torch.no_grad():
            y = self.double(self.x)
        if not bool(y.isfinite().all()):
            bad = Comparison(None, None, problem=f"{int((~y.isfinite()).sum())} of {y.numel()} outputs not finite")
            yield self._row("layer", "finite numbers", torch.float64, "o", bad)
            return
        yield from self._repeated(y)
        with torch.no_grad():
            yield from self._causal(y)
            yield from self._batched(y)
            yield from self._padded(y)
            yield from self._in_pieces(y)
        yield from self._split_gradients()
        for dtype in dtypes:
            with torch.no_grad():
                yield from self._rounded(dtype, y)

    def _repeated(self, y: Tensor) -> Iterator[Row]:
        """The same call again, with gradients: the same bits, and finite ones."""
        first, second = (self._gradients(lambda x: self.double(x)) for _ in range(2))
        yield self._compared("layer-again", "the same call", "o", self.double(self.x).detach(), y)
        for name, gradient in first.items():
            yield self._compared(
                "layer-again", "the same call", f"grad {name}", second[name], gradient, gradient_of=True
            )

    def _causal(self, y: Tensor) -> Iterator[Row]:
        """Another future, and none at all: the past must not notice."""
        half = max(1, self.sizes.tokens // 2)
        changed = torch.cat((self.x[:, :half], self.other[:, half:]), dim=1)
        yield self._compared("layer-future", WHOLE, "o", self.double(changed)[:, :half], y[:, :half])
        yield self._compared("layer-prefix", WHOLE, "o", self.double(self.x[:, :half]), y[:, :half])

    def _batched(self, y: Tensor) -> Iterator[Row]:
        alone = torch.cat([self.double(self.x[row : row + 1]) for row in range(self.sizes.batch)])
        yield self._compared("layer-alone", "the same in a batch, float64", "o", alone, y)

    def _padded(self, y: Tensor) -> Iterator[Row]:
        """Padding on both sides changes nothing of what is between."""
        if "padding_mask" not in self.own.forward:
            yield self._missing("layer-padding", "its forward takes no padding_mask")
            return
        pad = max(1, self.sizes.tokens // 3)
        left, right = self.other[:, :pad], self.other[:, -pad:]
        mask = torch.ones(self.sizes.batch, self.sizes.tokens + 2 * pad, dtype=torch.bool, device=self.x.device)
        mask[:, :pad] = mask[:, -pad:] = False
        padded = self.double(torch.cat((left, self.x, right), dim=1), padding_mask=mask)
        yield self._compared("layer-padding", WHOLE, "o", padded[:, pad:-pad], y)

    def _in_pieces(self, y: Tensor) -> Iterator[Row]:
        if not self.own.carries_state:
            for form in ("layer-split", "layer-decode"):
                yield self._missing(form, "its forward takes no state and return_state")
            return
        _, state = self.double(self.x, return_state=True)
        for form, lengths in (("layer-split", self._two()), ("layer-decode", [1] * self.sizes.tokens)):
            got, after = _in_turn(self.double, self.x, lengths)
            yield self._compared(form, WHOLE, "o", got, y)
            found = named_state(after)
            for name, value in named_state(state).items():
                if value.numel():
                    yield self._compared(form, WHOLE, name, found.get(name), value)

    def _split_gradients(self) -> Iterator[Row]:
        """The gradient through a carried state, which a forgotten detach would cut."""
        if not self.own.carries_state:
            return
        whole = self._gradients(lambda x: self.double(x))
        pieces = self._gradients(lambda x: _in_turn(self.double, x, self._two())[0])
        for name, gradient in whole.items():
            yield self._compared("layer-split", WHOLE, f"grad {name}", pieces[name], gradient, gradient_of=True)

    def _rounded(self, dtype: torch.dtype, y: Tensor) -> Iterator[Row]:
        """The whole sequence in float32; token by token in float32 says how much error that may have."""
        if dtype == torch.float64:
            return
        if dtype != torch.float32:
            reason = f"weights stay float32 under autocast; train --dtype {name_of(dtype)} tries it in earnest"
            yield self._missing(f"layer-{name_of(dtype)}", reason)
            return
        got = self.single(self.x.float())
        error = compare(got, y, dtype=dtype)
        if not self.own.carries_state:
            found = error.problem or f"max error {error.max_error:.2g}, RMS {error.rms_ratio:.2g}"
            yield self._missing("layer", f"nothing token by token says how large an error may be; it was {found}")
            return
        serial = compare(_in_turn(self.single, self.x.float(), [1] * self.sizes.tokens)[0], y, dtype=dtype)
        if serial.problem:
            yield self._row("layer-decode", WHOLE, dtype, "o", serial)
            return
        row = _place(self.name, "layer", WHOLE, dtype, "o", self.sizes)
        yield row | judged(error, budget(dtype, serial, gradient=False)) | {"condition": None}

    def _two(self) -> list[int]:
        first = self.sizes.tokens // 3
        return [length for length in (first, self.sizes.tokens - first) if length]

    def _gradients(self, call: Any) -> dict[str, Tensor]:
        """Gradients of the input and of every parameter, against a fixed upstream gradient."""
        x = self.x.clone().requires_grad_()
        leaves = {"x": x, **{name: p for name, p in self.double.named_parameters() if p.requires_grad}}
        found = torch.autograd.grad(call(x), list(leaves.values()), self.other, allow_unused=True)
        # No path from a parameter to the output is a gradient of zero.
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in pairs}

    def _compared(
        self, form: str, against: str, quantity: str, got: Tensor | None, expected: Tensor, *, gradient_of: bool = False
    ) -> Row:
        if not bool(expected.isfinite().all()):
            found = Comparison(None, None, problem=f"{int((~expected.isfinite()).sum())} values not finite")
        else:
            found = compare(got, expected.detach(), dtype=torch.float64, scale=Scale.of(expected))
        return self._row(form, against, torch.float64, quantity, found, gradient=gradient_of)

    def _row(
        self, form: str, against: str, dtype: torch.dtype, quantity: str, found: Comparison, *, gradient: bool = False
    ) -> Row:
        row = _place(self.name, form, against, dtype, quantity, self.sizes)
        allowed = budget(torch.float64, Comparison(0.0, 0.0), gradient=gradient)
        return row | judged(found, allowed) | {"condition": None}

    def _missing(self, form: str, reason: str) -> Row:
        return _place(self.name, form, None, None, None, self.sizes) | unjudged(
            "not run", f"{self.own.class_}: {reason}"
        )


def _place(
    name: str, form: str, against: str | None, dtype: torch.dtype | None, quantity: str | None, sizes: Sizes
) -> Row:
    return {
        "model": name,
        "options": "defaults",
        "form": form,
        "against": against,
        "dtype": None if dtype is None else name_of(dtype),
        "quantity": quantity,
        "seq_len": sizes.tokens,
        "d_head": sizes.key_dim,
    }


def _in_turn(layer: nn.Module, x: Tensor, lengths: list[int]) -> tuple[Tensor, Any]:
    """The sequence in pieces of these lengths, the state carried from each to the next."""
    state, outputs = None, []
    for piece in x.split(lengths, dim=1):
        y, state = layer(piece, state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state
