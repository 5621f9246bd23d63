"""Memory that SGLang asks to be pinned is not, where there is no accelerator: torch has no such memory there.

SGLang's LoRA layers and their torch_native backend ask for it on every device. `watch`, which the .pth file beside
this package calls at the start of each interpreter, waits for them to be imported.
"""

import functools
import importlib.abc
import sys

_BEFORE = "sglang.srt.lora"
_FACTORIES = ("arange", "empty", "tensor", "zeros")


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing; it sees what is about to be imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname == _BEFORE:
            _unpin()
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


def _unpinned(factory):
    @functools.wraps(factory)
    def make(*args, pin_memory=False, **options):
        return factory(*args, **options)

    return make
