"""Logits that never exist as a whole: a joint network makes them tile by tile, or a kernel by blocks. No public names.

`_tiles` is the emission, `_tile_blocks` the list of blocks that count, `_tile_sizes` chooses their sizes, `_networks`
defines joint networks here, and `joint` has the kernels of TPUs and GPUs.
"""
