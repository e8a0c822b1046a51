"""Two operators of one's own: a table from operator to callable, by the signatures of rlspec.device.operators."""

import torch
import torch.nn.functional as F


def silu(x):
    """Elementwise, so no row knows of another."""
    return F.silu(x.float()).to(x.dtype)


def rms_norm(x, weight, *, eps, round_before_weight=False):
    """From 16 rows on it squares in the dtype of x: faster, accurate enough, and other bits."""
    square = x * x if x.shape[:-1].numel() >= 16 else x.float() * x.float()
    return (x.float() * torch.rsqrt(square.float().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


table = {"silu": silu, "rms_norm": rms_norm}
