"""Parakeet and Nemotron in JAX: python examples/parakeet {transcribe,finetune} --help"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its modules are those of a package
    try:
        from parakeet.commands import main

        main()
    except ModuleNotFoundError as error:
        raise SystemExit(f"examples/parakeet needs {error.name}: run pip install '.[examples]' in the clone.") from None
    except KeyboardInterrupt:
        print("parakeet: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
