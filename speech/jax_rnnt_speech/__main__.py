"""Speech recognition on any corpus: rnnt-speech {train,transcribe,stream,corpus} --help"""

from jax_rnnt_speech.commands import main

main()
