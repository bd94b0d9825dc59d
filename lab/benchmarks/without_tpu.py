"""Settings with which libtpu compiles where there is no TPU: it is imported before JAX."""

import os

# Else libtpu asks a metadata server for them, and waits; a lock file would allow one process at a time.
os.environ |= dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
)
