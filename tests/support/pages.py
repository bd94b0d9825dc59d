"""The code blocks of README and docs."""

import contextlib
import re

import jax

import project


def code(page, marker, **names):
    """The names defined by the page's one code block that contains `marker`, and the block."""
    (block,) = (block for block in blocks(page).values() if marker in block)
    exec(compile(block, page, "exec"), names)
    return names, block


def blocks(page):
    """The page's blocks of Python, each with the line where it starts."""
    text = (project.ROOT / page).read_text()
    matches = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return {text.count("\n", 0, match.start()) + 2: match[1] for match in matches}


def run_alone(page, line):
    """Runs the block of this line without any other code, in JAX's default configuration."""
    program = compile("\n" * (line - 1) + blocks(page)[line], str(project.ROOT / page), "exec")
    with defaults():
        exec(program, {"__name__": "__main__"})


@contextlib.contextmanager
def defaults():
    """JAX's default configuration."""
    jax.config.update("jax_enable_x64", False)
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        jax.config.update("jax_enable_x64", True)
