"""Machine code of CUDA kernels for sm_90: cubins, disassembled by nvdisasm, as instructions with their control bits."""

import importlib.util
import itertools
import os
import pathlib
import re
import shutil
import struct
import subprocess

RZ, PT = 255, 7
UNIFORM = 256  # register UR0; URZ is UNIFORM + 63. Predicates UP0 ... UPT follow PT.
SHARED_BASE = 0x400  # the first KiB of shared memory belongs to the system
INSTALL = "no nvdisasm: pip install nvidia-cuda-nvdisasm, or name one in the environment variable NVDISASM"


class Unsupported(Exception):
    """An opcode, a modifier or an operand that the interpreter does not know."""


def find_nvdisasm():
    """Path of nvdisasm, or None: from $NVDISASM, the package nvidia-cuda-nvdisasm, or the path."""
    if name := os.environ.get("NVDISASM"):
        return name if os.path.isfile(name) else None
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in sorted(pathlib.Path(folder).glob("*/bin/nvdisasm")):
            return str(found)
    return shutil.which("nvdisasm")


class Operand:
    """An operand as text and in parts: kind is reg, pred, imm, const, memory, special, barrier or label."""

    def __init__(self, text):
        self.text = text
        self.negative = self.absolute = self.inverted = False
        self.suffix, self.index, self.value, self.terms = "", None, None, ()
        body = text.replace(".reuse", "")
        if re.fullmatch(r"-?0x[0-9a-f]+", body):
            self.kind, self.value = "imm", int(body, 16)
            return
        if re.fullmatch(r"[+-]?(\d[\d.]*(e[+-]?\d+)?|INF|QNAN|SNAN)", body):
            self.kind, self.value = "imm", body
            return
        if body.startswith("`("):
            self.kind, self.value = "label", body[2:-1]
            return
        if body[0] in "!~":
            self.inverted, body = True, body[1:]
        if body[0] == "-":
            self.negative, body = True, body[1:]
        if body[0] == "|":
            self.absolute = True
            body = re.sub(r"\|", "", body)
        if m := re.fullmatch(r"(U?)P(\d|T)((?:\.\w+)*)", body):
            self.kind, self.suffix = "pred", m[3]
            self.index = (PT if m[2] == "T" else int(m[2])) + (8 if m[1] else 0)
        elif m := re.fullmatch(r"(U?)R(\d+|Z)((?:\.\w+)*)", body):
            self.kind, self.suffix, self.index = "reg", m[3], register(m[1], m[2])
        elif m := re.fullmatch(r"c\[0x([0-9a-f]+)\]\[(.*)\]((?:\.\w+)*)", body):
            self.kind, self.value, self.terms, self.suffix = "const", int(m[1], 16), address_terms(m[2]), m[3]
        elif m := re.fullmatch(r"(?:desc\[UR\d+\])?\[(.*)\]", body):
            self.kind, self.terms = "memory", address_terms(m[1])
        elif body.startswith(("SR", "PR")):
            self.kind = "special"
        elif re.fullmatch(r"(B|SB)\d+", body):
            self.kind, self.index = "barrier", int(body.strip("SB"))
        else:
            raise Unsupported(f"operand {text!r}")


def register(uniform, number):
    if uniform:
        return UNIFORM + (63 if number == "Z" else int(number))
    return RZ if number == "Z" else int(number)


def address_terms(text):
    """[(register or None, scale or "64", constant)] of an address."""
    terms = []
    for part in text.split("+"):
        if m := re.fullmatch(r"(U?)R(\d+|Z)((?:\.\w+)*)", part):
            terms.append((register(m[1], m[2]), m[3], 0))
        elif re.fullmatch(r"-?0x[0-9a-f]+", part):
            terms.append((None, "", int(part, 16)))
        elif part:
            raise Unsupported(f"address {text!r}")
    return terms


class Instruction:
    """One instruction and its control bits: cycles to the next issue; scoreboards to wait for (a mask), and those set
    when the result is there (write) or the operands have been read (read); 7 is none."""

    def __init__(self, number, text, low, high):
        text = re.sub(r"\s*\(\*.*?\*\)", "", text)  # remarks
        self.number, self.text, self.bits = number, text, low >> 32  # a 32-bit immediate lies there
        control = high >> 41
        self.stall, self.write, self.read, self.wait = (control & 15, control >> 5 & 7, control >> 8 & 7,
                                                        control >> 11 & 63)  # fmt: skip
        self.guard, self.guard_inverted = PT, False
        if m := re.match(r"@(!?)(U?)P(\d|T)\s+", text):
            self.guard = (PT if m[3] == "T" else int(m[3])) + (8 if m[2] else 0)
            self.guard_inverted, text = bool(m[1]), text[m.end() :]
        self.opcode, _, rest = text.partition(" ")
        self.name, *self.modifiers = self.opcode.split(".")
        self.operands = [Operand(x.strip()) for x in re.split(r",| (?=`\()", rest) if x.strip()]
        if self.name.startswith(("H", "VH")):  # an immediate of two halves is printed as two numbers
            pairs = itertools.pairwise([None, *self.operands])
            self.operands = [x for before, x in pairs if not (before and before.kind == x.kind == "imm")]
        self.target = None  # number of the instruction that a branch names
        self.run = None  # compiled at first use

    def __contains__(self, modifier):
        return modifier in self.modifiers


class Kernel:
    """Code of a kernel, sizes of its parameters, and what a block of it takes."""

    def __init__(self, name, lines, registers, shared, base, parameters, constants):
        self.name, self.registers, self.shared = name, registers, shared
        self.base = base  # of the parameters, in constant bank 0
        self.parameters, self.constants = parameters, constants  # [(offset, size)]; {bank: bytes}
        self._lines, self._code = lines, None

    @property
    def code(self):
        """The instructions, decoded at first use."""
        if self._code is None:
            self._code, labels = [], {}
            for i, line in enumerate(self._lines):
                if m := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/", line):
                    high = re.search(r"/\* 0x([0-9a-f]{16}) \*/", self._lines[i + 1])
                    self._code.append(Instruction(len(self._code), m[2], int(m[3], 16), int(high[1], 16)))
                    assert int(m[1], 16) == 16 * self._code[-1].number
                elif m := re.match(r"(\S+):$", line):
                    labels[m[1]] = len(self._code)
            for instruction in self._code:
                for operand in instruction.operands:
                    if operand.kind == "label" and operand.value in labels:
                        instruction.target = labels[operand.value]
            self._lines = None
        return self._code


def load(cubin, nvdisasm, name_of=str):
    """{symbol: Kernel} of a cubin. `name_of` shortens a symbol."""
    data = pathlib.Path(cubin).read_bytes()

    def text_at(start):
        return data[start : data.index(b"\0", start)].decode()

    start, count, names = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 60))
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i) for i in range(count)]
    sections = {text_at(headers[names][4] + header[0]): header for header in headers}
    content = {name: data[header[4] : header[4] + header[5]] for name, header in sections.items()}
    strings, registers = headers[sections[".symtab"][6]][4], {}
    for entry, value in attributes(content[".nv.info"], 0x2F, "<II"):  # EIATTR_REGCOUNT
        registers[text_at(strings + struct.unpack_from("<I", content[".symtab"], 24 * entry)[0])] = value

    code = subprocess.run([nvdisasm, "-c", "-hex", cubin], capture_output=True, text=True, check=True).stdout
    kernels = {}
    for part in code.split("\n.text.")[1:]:
        symbol, _, lines = part.partition(":\n")
        found = attributes(content[f".nv.info.{symbol}"], 0x17, "<IHHI")  # EIATTR_KPARAM_INFO
        parameters = {ordinal: (offset, bits >> 18) for _, ordinal, offset, bits in found}
        shared = sections.get(f".nv.shared.{symbol}")
        ((_, base, _),) = attributes(content[f".nv.info.{symbol}"], 0x0A, "<IHH")  # EIATTR_PARAM_CBANK
        kernels[symbol] = Kernel(
            name_of(symbol),
            lines.splitlines(),
            registers[symbol],
            shared[5] if shared else SHARED_BASE,
            base,
            [parameters[k] for k in sorted(parameters)],
            {k: content[name] for k in range(18) if (name := f".nv.constant{k}.{symbol}") in content},
        )
    return kernels


def attributes(info, wanted, form):
    """Values of an attribute in a section .nv.info."""
    i = 0
    while i + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, i)
        i += 4
        if kind != 4:  # the value is in the 16 bits
            continue
        if attribute == wanted:
            yield struct.unpack_from(form, info, i)
        i += size
