"""vLLM's and SGLang's fields that ask for a form of the answer, in the bodies of OpenAI's older protocols."""

from __future__ import annotations

from typing import Any

from arl.web.bodies import RequestBody
from arl.workflow.messages import arguments_of
from arl.workflow.proxy.answer_forms import Form, json_schema, one_of, one_of_texts, regex


class FormFields(RequestBody):
    """The fields; at most one of them may be there."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    regex: Any = None

    def form(self, *others: tuple[str, Form]) -> tuple[str, Form | None]:
        """The form of the answer's text, and the field that asks for it. others: asked for by other fields."""
        forms = list(others)
        if (given := self.guided_json) is not None:
            forms.append(("guided_json", json_schema("guided_json", arguments_of(given))))
        for name, pattern in (("guided_regex", self.guided_regex), ("regex", self.regex)):
            if pattern is not None:
                forms.append((name, regex(name, pattern)))
        if (given := self.guided_choice) is not None:
            forms.append(("guided_choice", one_of_texts("guided_choice", given)))
        return one_of(forms)
