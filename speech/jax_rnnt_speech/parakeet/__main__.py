"""Parakeet and Nemotron in JAX: python -m jax_rnnt_speech.parakeet {transcribe,finetune} --help"""

import sys

from jax_rnnt_speech.parakeet.commands import main

try:
    main()
except KeyboardInterrupt:
    print("parakeet: interrupted", file=sys.stderr)
    raise SystemExit(130) from None
