"""verifiers' name for arl's in-process harness: `harness: {id: arl-chat}`.

verifiers finds harnesses as top-level packages; this one is arl.workflow.verifiers_harness.
"""

from arl.workflow.verifiers_harness import ChatHarness

__all__ = ["ChatHarness"]
