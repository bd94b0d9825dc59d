"""Parakeet and Nemotron in JAX: python -m jax_rnnt_speech.parakeet {transcribe,finetune} --help"""

from jax_rnnt_speech.parakeet.commands import main

main()
