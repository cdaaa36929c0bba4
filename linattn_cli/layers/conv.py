"""The short causal convolution that any mixer may have before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShortConv(nn.Module):
    """Causal depthwise convolution over the real tokens, `y_t = sum_i w_i x_{t-i}`, `[B, T, E] -> [B, T, E]`.

    It has no activation of its own: each mixer applies its feature map. Padded tokens are skipped, not
    convolved as zeros, so a padded sequence gives what its real tokens alone would give.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"short_conv must be a width >= 1, got {width}; 0 in the layer means none")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, cache: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The convolved tokens, and the last `width - 1` real inputs for the next call."""
        batch, tokens, channels = x.shape
        if cache is None:
            cache = x.new_zeros(batch, self.width - 1, channels)
        if mask is None:
            full = torch.cat((cache.to(x.dtype), x), dim=1)
            return self._convolve(full), full[:, tokens:]
        # real tokens first, in their order: the cache then stands right before them wherever the padding was
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True).unsqueeze(-1)
        full = torch.cat((cache.to(x.dtype), x.gather(1, order.expand_as(x))), dim=1)
        y = torch.empty_like(x).scatter(1, order.expand_as(x), self._convolve(full))
        last = mask.sum(1, keepdim=True) + torch.arange(self.width - 1, device=x.device)
        return y, full.gather(1, last.unsqueeze(-1).expand(-1, -1, channels))

    def _convolve(self, full: Tensor) -> Tensor:
        weight = self.weight.flip(-1).to(full.dtype)
        return nn.functional.conv1d(full.mT, weight, groups=full.shape[-1]).mT
