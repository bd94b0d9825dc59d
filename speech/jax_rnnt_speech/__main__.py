"""`python -m jax_rnnt_speech` is the command rnnt-speech."""

from jax_rnnt_speech.commands import main

main()
