"""`python -m jax_rnnt_speech` is the command rnnt-speech."""

from jax_rnnt_speech.cli import main

main()
