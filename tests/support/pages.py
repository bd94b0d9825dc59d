"""The code blocks of README and docs."""

import re

import losses


def code(page, marker, **names):
    """The names defined by the page's one code block that contains `marker`, and the block."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (losses.ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if marker in block)
    exec(compile(block, page, "exec"), names)
    return names, block
