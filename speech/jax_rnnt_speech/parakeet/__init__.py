"""Parakeet and Nemotron: checkpoints of Hugging Face, read, trained, written and decoded."""
