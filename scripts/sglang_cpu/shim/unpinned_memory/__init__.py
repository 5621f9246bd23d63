"""Memory that SGLang asks to be pinned is not, where there is no accelerator: torch has no such memory there.

SGLang's LoRA layers and their torch_native backend ask for it on every device, and its record of routed experts has
CUDA's runtime pin memory that is there already. `watch`, which the .pth file beside this package calls at the start of
each interpreter, waits for them to be imported.
"""

import functools
import importlib.abc
import sys

_LORA, _HOST_POOLS = "sglang.srt.lora", "sglang.srt.mem_cache.pool_host"
_FACTORIES = ("arange", "empty", "tensor", "zeros")


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing; it sees what is about to be imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname == _LORA:
            _unpin()
        elif fullname == _HOST_POOLS:
            _register_nothing()
        return None


def watch():
    sys.meta_path.insert(0, _Watch())


def _unpin():
    import torch

    if torch.accelerator.is_available():
        return
    for name in _FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def _register_nothing():
    import torch

    if not torch.accelerator.is_available():
        torch.cuda.cudart = _NoRuntime


class _NoRuntime:
    """CUDA's runtime, whose calls to pin memory and to let it go do nothing, and succeed."""

    def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *_):  # noqa: N802
        return 0


def _unpinned(factory):
    @functools.wraps(factory)
    def make(*args, pin_memory=False, **options):
        return factory(*args, **options)

    return make
