"""SyncBatchNorm: batch normalisation with the statistics of all ranks' batches, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.adapters.horovod.environment import size
from thinwire.adapters.horovod.operations import allgather


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d to 3d, over the batches of all ranks together."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input has {input.dim()} dimensions; it must have at least 2")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or size() == 1:
            return super().forward(input)
        others = [dim for dim in range(input.dim()) if dim != 1]
        local = input.float()
        mean, variance, number = self._statistics(local, others)
        self._update(mean.detach(), variance.detach(), number)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        result = (local - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _statistics(self, local: Tensor, others: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, biased variance, elements) of every channel over all ranks; from means, so that nothing cancels."""
        count = local.numel() / local.shape[1]
        variance, mean = torch.var_mean(local, others, correction=0)
        own = torch.cat([mean, variance, mean.new_tensor([count])])
        gathered = allgather(own[None])
        numbers = gathered[:, -1:].detach()
        means, variances = gathered[:, :-1].chunk(2, dim=1)
        shares = numbers / numbers.sum()
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        return mean, variance, numbers.sum()

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, number: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * number / (number - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
