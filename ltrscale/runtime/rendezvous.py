"""The rendezvous of the workers of Ray Train: torch's store, listening only on the address of its node.

By default the store listens on every interface of its machine and requires no token. Ray Train has no public way to
choose the interface. This module uses its internals, which
are checked with each version, see `ltrscale.runtime.ray_internals`.
"""

import socket
from typing import Any

import ray
from ray.train.torch import TorchConfig, config
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_stores: list[TCPStore] = []
"""Keeps the stores of this process alive: torch holds none before it has a process group."""


class OnItsNode(TorchConfig):  # type: ignore[misc]
    """Ray Train's settings of torch, with the store on the node's address."""

    @property
    def backend_cls(self) -> type:
        """The class that sets up the workers."""
        return _Backend


class _Backend(config._TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set up the process group of all workers; runs in Ray Train's controller."""
        config.get_address_and_port = _serve  # the base class runs this function on rank 0
        super().on_start(worker_group, backend_config)


def _serve() -> tuple[str, int]:
    """Open the store; returns its address and port. Torch then reuses this store, which its process has at the port."""
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
