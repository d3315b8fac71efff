"""Where the workers of Ray Train meet: torch's store, on the address of its node alone.

By itself the store listens on every interface of its machine, and it asks nobody for a token. Ray Train has no public
way to choose the interface: what is used of its inside is looked at with each version, see `ltrscale.ray_internals`.
"""

import socket
from typing import Any

import ray
from ray.train.torch import TorchConfig, config
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_stores: list[TCPStore] = []
"""Of this process; torch keeps none before it has a process group."""


class OnItsNode(TorchConfig):  # type: ignore[misc]
    """Ray Train's settings of torch, with that store."""

    @property
    def backend_cls(self) -> type:
        """What sets up the workers."""
        return _Backend


class _Backend(config._TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set up the process group of all workers, in the process that directs them."""
        config.get_address_and_port = _serve  # asked of rank 0
        super().on_start(worker_group, backend_config)


def _serve() -> tuple[str, int]:
    """Open the store; returns its address and port. Torch takes the one that its process has at a port."""
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = int(server.getsockname()[1])
        _stores.append(
            TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
            )
        )
    return host, port
