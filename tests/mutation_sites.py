"""For mutation.py: all places of the sources where a fault may be, and its text there."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Files without a promise about results: figures, timing, the command line.
NO_SITES = {"plot.py", "timing.py", "_bench.py", "__main__.py", "_installation.py", "_extras.py"}

# ------------------------------------------------------------------------------------------------- faults in Python

SWAPPED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
PAIRS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "all": "any", "any": "all"}
PAIRS |= {
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "logaddexp": "add",
    "cumsum": "cumprod",
    "argmax": "argmin",
}


def python_sites(text):
    """(start, end, replacement, operator) of each fault in a file."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data = text.encode()

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def source(node):
        start, end = span(node)
        return data[start:end].decode()

    skipped = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        quiet = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            quiet = [node.returns, *(a.annotation for a in arguments if a), *node.decorator_list]
            quiet += [node] if node.name in ("__repr__", "__dir__") else []
        elif isinstance(node, ast.AnnAssign):
            quiet = [node.annotation]
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            quiet = [node]
        for root in filter(None, quiet):
            skipped |= {id(n) for n in ast.walk(root)}
        if isinstance(node, ast.If) and "TYPE_CHECKING" in source(node.test):
            skipped |= {id(n) for n in ast.walk(node)}

    def between(left, right, old, new):
        """Replaces an operator that stands between two nodes."""
        start, end = span(left)[1], span(right)[0]
        gap = data[start:end].decode()
        return (start, end, gap.replace(old, new, 1), "operator") if gap.count(old) == 1 else None

    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            found.append(between(node.left, node.right, *SWAPPED[type(node.op)]))
        elif isinstance(node, ast.BoolOp):
            found.append(between(*node.values[:2], *SWAPPED[type(node.op)]))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            found.append(between(node.left, node.comparators[0], *SWAPPED[type(node.ops[0])]))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            start, end = span(node)
            found.append((start, end, f"({source(node.operand)})", "sign" if isinstance(node.op, ast.USub) else "not"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            found.append((*span(node), repr(node.value + 1), "constant"))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found.append((*span(node), repr(not node.value), "constant"))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            found.append((*span(node.test), f"(not ({source(node.test)}))", "condition"))
        elif isinstance(node, ast.Call):
            name = source(node.func).split(".")[-1]
            if name in PAIRS:
                start, end = span(node.func)
                found.append((end - len(name), end, PAIRS[name], "function"))
            if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:3]):
                first, second = node.args[-2:]
                gap = data[span(first)[1] : span(second)[0]].decode()
                found.append((span(first)[0], span(second)[1], source(second) + gap + source(first), "arguments"))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            found.append((*span(node), "pass", "statement"))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id  # a value that is made anew from its old one
            if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.value)):
                found.append((*span(node), "pass", "statement"))
    return [site for site in found if site], data


# ------------------------------------------------------------------------------------------------- faults in C++, CUDA

CXX = [
    *((re.escape(f" {a} "), f" {b} ", "operator") for a, b in (
        ("+", "-"), ("-", "+"), ("*", "/"), ("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"), ("==", "!="),
        ("!=", "=="), ("&&", "||"), ("||", "&&"), ("+=", "-="), ("<<", ">>"), (">>", "<<"), ("&", "|"), ("|", "&"),
    )),
    (r"\bmin(?=[(<])", "max", "function"), (r"\bmax(?=[(<])", "min", "function"),
    (r"\bMin(?=\()", "Max", "function"), (r"\bMax(?=\()", "Min", "function"),
    (r"\btrue\b", "false", "constant"), (r"\bfalse\b", "true", "constant"),
    (r"(?<=[=(\[,<>+\-*/?:&|] )\d+\b(?![.\w'])", None, "constant"), (r"(?<=[(\[])\d+\b(?![.\w'])", None, "constant"),
    (r"(?<=[ (])-(?=[a-z])", "", "sign"), (r"(?<=[ (])!(?=[a-z(])", "", "not"),
    (r"\+\+(?=\w)", "--", "operator"),
]  # fmt: skip
STATEMENT = re.compile(r"^ +(?!return|const |constexpr|static|using|auto |typename|template|for |if |while |else|case |"
                       r"break|continue|F |I |A |One |Value |int |int64_t |size_t |float |double )[\w:\[\]().>*-]+"
                       r"( [-+*/|&]?= [^;{}]*|\([^;{}]*\))?;$", re.M)  # fmt: skip


def cxx_sites(text):
    # Comments, strings, preprocessor lines and assertions stay.
    quiet = (
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|^ *#.*?(?<!\\)$|static_assert\([^;]*;"
        r"|^ *(?:template|namespace|using)[^\n]*"
    )
    bare = re.sub(quiet, lambda m: re.sub(r"[^\n]", "\0", m[0]), text, flags=re.M | re.S)
    found = []
    for pattern, new, operator in CXX:
        for match in re.finditer(pattern, bare):
            found.append((*match.span(), str(int(match[0]) + 1) if new is None else new, operator))
    for match in STATEMENT.finditer(bare):
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        found.append((start, match.end(), ";", "statement"))
    for match in re.finditer(r"\? ([^?:;\n]+) : ([^?:;,)\n]+)", bare):
        found.append((*match.span(), f"? {match[2]} : {match[1]}", "arguments"))
    assert text.isascii(), "sites are counted in bytes"
    return found, text.encode()


SEARCHED = {
    "python": sorted(p for p in (ROOT / "jax_rnnt").rglob("*.py") if p.name not in NO_SITES),
    "cpu": sorted([*(ROOT / "xla_kernels/cpu").glob("*.h"), *(ROOT / "xla_kernels/cpu").glob("*.cc"),
                   ROOT / "xla_kernels/common/extended.h", ROOT / "xla_kernels/common/ffi_calls.h"]),
    "cuda": sorted([*(ROOT / "xla_kernels/cuda").glob("*.cuh"),
                    *(ROOT / f"xla_kernels/cuda/{n}.cu" for n in ("lattice", "skip_lattice", "softmax_emission"))]),
}  # fmt: skip
