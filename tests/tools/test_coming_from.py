"""Do the tables of docs/coming_from name what the library has, with its defaults, and is equal what they call equal?

Numbers of other libraries: losses/test_vectors.py, and programs of the pages (test_docs.py). What remarks say of the
library itself is tested where that is.
"""

import ast
import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import jax_rnnt
import project
import vectors
from pages import code as code_of

PAGES = sorted(path.stem for path in (project.ROOT / "docs/coming_from").glob("*.md") if path.stem != "index")
EXACT = 1e-12


def rows(page):
    """The cells of the page's one table: there, here, remark."""
    text = (project.ROOT / f"docs/coming_from/{page}.md").read_text()
    (table,) = re.findall(r"^\| there \| here \| \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def resolve(path):
    """The object of a dotted name: of the package, or of the folder speech."""
    if path.startswith("speech."):
        _, room, *names = path.split(".")
        file = project.ROOT / "speech/jax_rnnt_speech" / room / f"{names[0]}.py"
        file, names = (file, names[1:]) if file.exists() else (file.with_name("__init__.py"), names)
        source = ast.parse(file.read_text())
        for name in names:
            (source,) = [x for x in source.body if getattr(x, "name", None) == name]
        return source
    if path.startswith("flax."):
        pytest.importorskip("flax")
        importlib.import_module(f"jax_rnnt.{path.rpartition('.')[0]}")
    found = jax_rnnt
    for name in path.split("."):
        found = getattr(found, name)
    return found


def parameters(path):
    found = resolve(path)
    if isinstance(found, ast.FunctionDef):
        return {x.arg: None for x in [*found.args.args, *found.args.kwonlyargs]}
    if path.startswith("flax."):
        found = found.__init__
    return inspect.signature(found).parameters


@pytest.mark.parametrize("page", PAGES)
def test_names_and_defaults(page):
    """Every name is there, every argument, with the default that the table states; and the page says of which version
    the other library's are."""
    text = (project.ROOT / f"docs/coming_from/{page}.md").read_text()
    assert re.search(r"Checked against (\w+ \d|(the|its)\s+source\s+of)", text)
    table = rows(page)
    assert len(table) > 5
    argument = r"`(\w+)(?:=([^`]+))?` of `([\w.]+)`"
    for there, here, _ in table:
        for name, default, path in re.findall(argument, here):
            assert name in parameters(path), (there, name, path)
            parameter = parameters(path)[name]
            if parameter is None or parameter.default is inspect.Parameter.empty or callable(parameter.default):
                assert default == "", (there, default)
            else:
                assert ast.literal_eval(default) == parameter.default, (there, default, parameter.default)
        for code in re.findall(r"`([^`]+)`", re.sub(argument, "", here)):
            check_code(code)


def check_code(code):
    """Names of the package in an expression, and the arguments of its calls."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            signature = inspect.signature(resolve(ast.unparse(node.func)))
            unpacked = any(isinstance(x, ast.Starred) for x in node.args)
            named = {x.arg: None for x in node.keywords}
            (signature.bind_partial if unpacked else signature.bind)(*([None] * len(node.args)), **named)
        if isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Call, ast.BinOp)):
            resolve(ast.unparse(node.value))


def test_arguments_of_torchaudio():
    """In the order of its signature."""
    names = ["logits", "targets", "logit_lengths", "target_lengths", "blank", "clamp", "reduction", "fused_log_softmax"]
    assert [re.match(r"`(\w+)", there)[1] for there, *_ in rows("torchaudio")[:8]] == names
    assert list(inspect.signature(jax_rnnt.rnnt_loss).parameters)[:8] == names


def test_reductions_of_nemo():
    p = batches.problem()
    p = p._replace(target_lengths=np.maximum(p.target_lengths, 1))  # there a target without labels is no case
    each, labels = np.asarray(jax_rnnt.RNNTLoss(reduction="none")(*p)), p.target_lengths
    expected = {
        "mean_batch": each.mean(),
        "mean": (each / labels).mean(),
        "mean_volume": each.sum() / labels.sum(),
        "sum": each.sum(),
    }
    for page in ("nemo", "hugging_face"):
        found = {}
        for there, here, _ in rows(page):
            if match := re.match(r'`reduction="(\w+)"`', there):
                found[match[1]] = re.search(r'reduction="(\w+)"', here)[1]
        assert page == "hugging_face" or expected.keys() <= found.keys()
        for name in {"mean", "mean_volume", *found}:
            np.testing.assert_allclose(jax_rnnt.RNNTLoss(reduction=found[name])(*p), expected[name], rtol=EXACT)


@pytest.mark.slow
def test_tdt_of_nemo():
    """Its kernels' numbers for the problem of `vectors`: FastEmit and clamp leave durations alone."""
    names, _ = code_of("docs/coming_from/nemo.md", "def on_tokens_alone")
    logits = np.concatenate([vectors.X, np.cos(2 + 3 * vectors.t + 2 * vectors.u + 5 * np.arange(3))], -1)
    batch = vectors.BLANK_AMONG_LABELS, *vectors.LENGTHS
    gradient = jax.jit(jax.grad(names["on_tokens_alone"], argnums=1))
    for clamp, tokens in ((-1.0, 0.246719295), (0.05, -0.155848133)):
        loss = jax_rnnt.TDTLoss((0, 1, 2), sigma=0.05, fastemit_lambda=jnp.float64(0.1), clamp=jnp.float64(clamp))
        heads = np.split(gradient(loss, logits, *batch), [-3], -1)
        for head, expected in zip(heads, (tokens, 1.141180559)):
            found = (head * vectors.WEIGHTS[..., : head.shape[-1]]).sum()
            np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.slow
def test_no_path_in_ctc():
    """Three labels in two frames: +inf without a gradient here; about 1e5 with a gradient there."""
    optax = pytest.importorskip("optax")
    logits, labels = np.random.default_rng(0).normal(size=(1, 2, 5)), np.array([[1, 2, 3]])
    with jax.numpy_dtype_promotion("standard"):
        there = lambda x: optax.ctc_loss(x, np.zeros((1, 2)), labels, np.zeros((1, 3)))[0]
        value, gradient = jax.value_and_grad(there)(logits)
    assert 5e4 < value < 2e5 and jnp.any(gradient != 0)
    here = lambda x: jax_rnnt.MonotonicRNNTLoss(blank=0)(jnp.repeat(x[:, :, None], 4, 2), labels, [2], [3])
    value, gradient = jax.value_and_grad(here)(logits)
    assert value == np.inf and not gradient.any()


def test_paddings_of_axlearn():
    """BOS is a row of the predictor and no label."""
    paddings = np.array([[0, 0, 0, 1], [0, 1, 1, 1]])
    assert (jax_rnnt.lengths_from_paddings(paddings) - 1).tolist() == [2, 0]
