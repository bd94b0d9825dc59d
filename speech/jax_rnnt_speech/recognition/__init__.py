"""From audio to text: searches, streams, windows of long recordings, transcripts, error rates."""
