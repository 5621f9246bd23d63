"""Names for the operators of a torchvision that was built for CUDA, beside a torch that was not.

The package index serves this build. Its image transforms, which is all that servers use, are plain torch; but it ends
with an error while it is imported, because it registers more about two operators that its library could not define.
`watch`, which the .pth file beside this package calls at the start of each interpreter, waits for that.
"""

import importlib.abc
import sys

_REGISTRATIONS = "torchvision._meta_registrations"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries = []


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing; it sees what is about to be imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname == _REGISTRATIONS and not sys.modules["torchvision.extension"]._has_ops():
            _declare()
        return None


def watch():
    sys.meta_path.insert(0, _Watch())


def _declare():
    """Once, however often the module is looked for."""
    import torch

    if _libraries:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + _BOXES)
    _libraries.append(library)  # they end with it
