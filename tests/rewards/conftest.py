"""Unit tests as a reward run in the sandbox that the sandbox's own tests share."""

from sandbox.conftest import bubblewrap

__all__ = ["bubblewrap"]
