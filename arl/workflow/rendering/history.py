"""The text of one line of a dialogue, rendered on as the line grows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from arl.workflow.chat_template import REFUSALS, ChatTemplate
from arl.workflow.messages import Message, ToolSpecs
from arl.workflow.rendering.incremental import Rendering

if TYPE_CHECKING:
    from jinja2 import Template

_FEW = 8
"""A history of fewer messages is rendered as a whole: watching the template would take longer."""


class History:
    """The text of one growing history: what is new is rendered, or all of it where only that is exact."""

    def __init__(self, template: ChatTemplate, tools: ToolSpecs) -> None:
        self._template = template
        self._specs = template.specs_as_texts(tools)
        self._messages: list[Message] = []
        self._shown: list[dict[str, Any]] = []
        """The messages as texts."""
        self._last: Rendering | None = None
        self._check_at = 2 * _FEW
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message], after: int = 0, last: Message | None = None) -> str | None:
        """The text of these messages after those that were rendered last, up to number `after`.

        None if the last of those is not `last` any more, or while another thread renders.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if after and (after > len(self._messages) or self._messages[after - 1] is not last):
                return None
            if after < len(self._shown):
                self._last = None
            self._messages[after:] = messages
            self._shown[after:] = self._template.as_texts(messages)
            self._template.check_shows(self._shown[after:], self._specs)
            text = self._render_new() if len(self._shown) >= _FEW else None
            return self._template.render_texts(self._shown, self._specs) if text is None else text
        finally:
            self._lock.release()

    def _render_new(self) -> str | None:
        if self._watched is None:
            return None
        rendering, self._last = Rendering(self._watched[0], self._shown, self._last), None
        try:
            rendering.run(self._watched[1])
        except REFUSALS:
            return None  # a whole rendering says why, if it fails too
        if len(self._shown) >= self._check_at:
            self._check_at = 2 * len(self._shown)
            self._template.check(rendering.text, self._shown, self._specs)
        self._last = rendering
        return rendering.text

    @cached_property
    def _watched(self) -> tuple[Template, dict[str, Any]] | None:
        return self._template.watched(self._specs)
