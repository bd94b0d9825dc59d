"""Speech recognition on any corpus: python examples/asr {train,transcribe,stream,corpus} --help"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its modules are those of a package
    try:
        from asr.commands import main
    except ModuleNotFoundError as error:
        raise SystemExit(f"examples/asr needs {error.name}: run pip install '.[examples]' in the clone.") from None
    main()
