"""Devices that are not there, for which XLA compiles: it is imported before JAX."""

import os
import pathlib
import sys

# Else libtpu asks a metadata server for them, and waits; a lock file would allow one process at a time.
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
    JAX_RNNT_KERNELS="all",  # also those that no device has shown to be right
)
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # after an installed one, with names of kernels
sys.path.extend([f"{sys.path[-1]}/benchmarks", f"{sys.path[-1]}/tests/support"])

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

ROOT = pathlib.Path(__file__).resolve().parents[2]
TPUS = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
GPUS = "h100", "b200"
GPU_OPTIONS = {"xla_gpu_autotune_level": 0}  # to try products would need the GPU


def mesh(device, count=1):
    """Of so many devices of one kind, along "data"."""
    if device in TPUS:
        found = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[device])
    else:
        config = (ROOT / f"lab/tests/{device}.txtpb").read_text()
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}")
    return Mesh(np.array(found.devices[:count]), ("data",))
