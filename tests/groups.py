"""Which tests one worker runs, one after another: those of a file, and of files that share something."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

DIRECTORIES = ("conformance/", "engine/local/serving/", "engine/weights/")
"""Their files share a server, which takes seconds to start."""
RAY = ("test_learner_engines.py", "test_ray_engine.py", "test_ray_start.py")
"""They start Ray, and `ray_address=auto` finds whatever cluster is being started or ended on the machine."""
PAIR = ("test_invariance.py", "test_ranks.py", "test_vision_steps.py")
"""They share two ranks, which take seconds to import torch and to warm up."""
LONGEST = (
    "ray", "run/test_launch.py", "engine/weights/", "pair", "recovery/test_kills.py", "test_docs.py",
    "runtime/test_notebook_cells.py", "run/test_constrained_run.py", "conformance/", "run/finetuning/test_job.py",
)  # fmt: skip
"""These groups begin first, in this order: a long one that begins last leaves the other workers idle."""


class GroupScheduling(LoadScopeScheduling):
    """xdist's `--dist loadgroup` writes a test's group into its name, which pytest 9.2 keeps as it was: no group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = next((group for group in LONGEST if group in self.workqueue), None)
        if first:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def group_of(file: str) -> str:
    """file: below the repository, as pytest names it."""
    path = file.removeprefix("tests/")
    if path.rpartition("/")[2] in RAY:
        return "ray"
    if path.rpartition("/")[2] in PAIR:
        return "pair"
    return next((directory for directory in DIRECTORIES if path.startswith(directory)), path)
