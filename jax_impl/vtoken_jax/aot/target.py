"""The card that is compiled for: its description stands here, so that none is asked for."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

__all__ = ["ARCHITECTURE", "MAX_SHARED_BYTES", "Target"]

ARCHITECTURE = "sm_90a"
MAX_SHARED_BYTES = 232_448
"""Of a thread block."""

_KIND = "NVIDIA H100 80GB HBM3"
_DESCRIPTION = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: {MAX_SHARED_BYTES}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{_KIND}"
"""


class Target:
    """Compiles traced functions for one H100. Needs JAX's CUDA plugin and no card."""

    def __init__(self) -> None:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=_DESCRIPTION, topology="1x1x1"
        )
        self._sharding = SingleDeviceSharding(topology.devices[0])
        gpu = jax.sharding.AbstractDevice(device_kind=_KIND, num_cores=None, platform="gpu")
        self._mesh = jax.sharding.AbstractMesh((1,), ("gpu",), abstract_device=gpu)

    def place(self, arguments: Any) -> Any:
        """Shapes of ``arguments`` on the card."""
        make: Any = jax.ShapeDtypeStruct

        def on_card(leaf: Any) -> Any:
            return make(leaf.shape, leaf.dtype, sharding=self._sharding)

        return jax.tree.map(on_card, arguments)

    def compile(self, trace: Callable[[], Any]) -> Any:
        """What ``trace`` traces, of shapes that were placed here: a ``jax.stages.Compiled``."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            return trace().lower(lowering_platforms=("cuda",)).compile()
