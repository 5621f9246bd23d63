"""The code in a guide."""

import re
from pathlib import Path


def python_blocks(document: Path) -> list[str]:
    """Each with as many empty lines before it as make its line numbers the document's."""
    text = document.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]
