"""Lets torchtitan 0.2 train on a CPU, which it does not support: stand-ins for what torch.cpu lacks."""

import contextlib
import os
import sys


def _patch():
    import torch
    import torch.distributed as dist

    class Properties:
        name, total_memory = "cpu", 2**40

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu = torch.cpu
    for name, value in {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: Properties,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }.items():
        setattr(cpu, name, value)
    barrier = dist.barrier
    dist.barrier = lambda *arguments, device_ids=None, **more: barrier(*arguments, **more)
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    fsdp_init = _fsdp_param_group.FSDPParamGroup.__init__

    def init(self, *arguments, **more):  # gloo has no PREMUL_SUM
        fsdp_init(self, *arguments, **more)
        self.force_sum_reduction_for_comms = True

    _fsdp_param_group.FSDPParamGroup.__init__ = init


if "RANK" in os.environ and not any("torch.distributed.run" in word for word in sys.orig_argv):
    with contextlib.suppress(ImportError):
        _patch()
