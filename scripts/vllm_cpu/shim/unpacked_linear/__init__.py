"""Linear layers that vLLM computes from the weights which a reload writes.

On a CPU vLLM packs the weights of linear layers when it loads a model, and computes from the packed copies. A reload
(`reload_weights`) writes new weights beside them, which no layer reads: embeddings and norms are new, linear layers are
old. `watch`, which the .pth file beside this package calls at the start of each interpreter, waits for the module that
packs, and has it compute each layer from its weight. With ARL_LEAVE_PACKED=1 vLLM stays as it is.
"""

import importlib.abc
import importlib.util
import os
import sys

_PACKS = "vllm.model_executor.layers.utils"


class _Watch(importlib.abc.MetaPathFinder):
    """Finds the one module, as the others would, and changes it once it has run."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _PACKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            module.dispatch_cpu_unquantized_gemm = _leave_unpacked

        spec.loader.exec_module = run_and_change
        return spec


def watch():
    if os.environ.get("ARL_LEAVE_PACKED") == "1":
        return
    sys.meta_path.insert(0, _Watch())


def _leave_unpacked(layer, remove_weight):
    import torch.nn.functional as F

    layer.cpu_linear = F.linear
