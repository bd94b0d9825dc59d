"""Are the kernels' sources those that every check of the emulation and the sanitizers has passed?

    python lab/emulation/checked.py            exit status 0 if they are, 1 if not
    python lab/emulation/checked.py --write    records them: the last step of lab/kernels.sh

CI then repeats a part of the checks, else all of them. A record is a SHA-256 of the names and the bytes of all inputs.
"""

import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "xla_kernels/checked.txt"


def digest():
    """Of the kernels, the emulation and the flags of both."""
    found = [ROOT / "CMakeLists.txt"]
    for folder in ("xla_kernels", "lab/emulation"):
        found += (path for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cc", ".cu", ".cuh", ".py"))
    total = hashlib.sha256()
    for path in sorted(found):
        total.update(
            f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes().replace(b"\r\n", b"\n") + b"\0"
        )
    return total.hexdigest()


def main():
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(digest() + "\n")
        return 0
    if sys.argv[1:]:
        sys.exit(__doc__)
    return int(not RECORD.exists() or RECORD.read_text().strip() != digest())


if __name__ == "__main__":
    sys.exit(main())
