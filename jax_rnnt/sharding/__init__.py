"""Losses whose classes or frames are split over devices. No public names: losses have `vocab_axis` and `frame_axis`.

`_over_mesh` enters `jax.shard_map` where the program is not yet one for each device. There, `_device` checks the arrays
of a device, and gives the loss's emission other rows (`_vocabulary`) and another exchange (`_vocabulary`, `_frames`);
the methods of a loss use this emission like any other. `_axes` has the collectives.
"""
