"""Layers of the encoders of images, as torch modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


class PixelConv2d(nn.Conv2d):
    """A convolution of pixels from 0 to 255, scaled to [0, 1], in the memory format that convolutions are
    fastest in.

    The weights are divided by 255 rather than the pixels: there are far fewer of them, and integers up to 255
    are exact in bfloat16, which pixels in [0, 1] are not. Output and hence all later convolutions are in
    torch's channels_last format. A training step of the Nature CNN on 256 images takes 133 ms of a thread of
    a CPU with AMX in fp32 and 53 ms in bf16; with images divided, channels first, 203 and 92 ms.

    Args:
        channels_last: images come as [B, H, W, C] instead of [B, C, H, W].
        arguments: of `nn.Conv2d`.
    """

    def __init__(self, *arguments: Any, channels_last: bool = False, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, K, H', W'] of pixels, uint8 or float."""
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        weight = self.weight / 255
        if device == "cpu" and (AVX512 or dtype == torch.bfloat16) and self._takes_blocks(x):
            return F.conv2d(blocks(x).to(dtype), block_weights(weight), self.bias)
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)

    def _takes_blocks(self, x: Tensor) -> bool:
        """Whether kernel, stride and image divide into blocks of 4x4 bytes."""
        sides = (*self.kernel_size, *x.shape[2:])
        return (
            x.dtype == torch.uint8
            and x.stride(3) == 1  # what a replay buffer samples are views of longer stacks
            and all(step % 4 == 0 for step in (x.storage_offset(), *x.stride()[:3]))
            and self.stride == (4, 4)
            and self.padding == (0, 0)
            and all(side % 4 == 0 for side in sides)
        )


def blocks(x: Tensor) -> Tensor:
    """Each 4x4 block of bytes as one pixel with 16 times the channels: [B, C, H, W] to [B, 16·C, H/4, W/4],
    channels_last.

    A convolution of stride 4 over `x` is one of stride 1 over its blocks (see `block_weights`), with channels
    enough to fill the CPU's matrix units, and four bytes of a row are moved at a time. With AMX this spares
    15 % of a whole training step in bf16, and some 3 % in fp32. In fp32 on a CPU without AVX512 it would cost
    6 %: the gradient of the weights is slower there.
    """
    b, c, h, w = x.shape
    rows = x.view(torch.int32).view(b, c, h // 4, 4, w // 4).permute(0, 2, 4, 1, 3).contiguous()
    return rows.view(torch.uint8).view(b, h // 4, w // 4, 16 * c).permute(0, 3, 1, 2)


def block_weights(weight: Tensor) -> Tensor:
    """The weights [K, C, h, w] of a convolution of stride 4 as those over `blocks`: [K, 16·C, h/4, w/4]."""
    k, c, h, w = weight.shape
    split = weight.view(k, c, h // 4, 4, w // 4, 4).permute(0, 1, 3, 5, 2, 4)
    return split.reshape(k, 16 * c, h // 4, w // 4)


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), both convolutions 3x3, keeping the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, C, H, W] of inputs [B, C, H, W]."""
        # In place only on what this block made: x itself is needed for the sum.
        hidden = F.relu(self.conv0(F.relu(x)), inplace=True)
        outputs: Tensor = self.conv1(hidden)
        return outputs.add_(x)
