"""What each instruction does. An opcode is a function under `@op`: it reads the instruction once and returns
run(warp, mask), which executes it for the lanes of the mask.

A register is a row of 32 words, a predicate a mask of 32 bits. Instructions of the uniform datapath are the vector
instructions of the same name, on registers whose lanes are equal. An opcode or a form of it that is missing raises
Unsupported and names it.

Opcodes of arithmetic are in arithmetic.py, the others in machine.py; what they share is in operands.py.

Approximations: MUFU results are rounded from double precision; DFMA rounds the product to 64 bits first.
"""

import machine  # noqa: F401  its opcodes enter the table as it is imported
from arithmetic import from_half, to_half
from operands import FULL, STACK, compile_instruction

__all__ = ["FULL", "STACK", "compile_instruction", "from_half", "to_half"]
