"""Which of the workers this process is."""

import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """This worker's rank and the number of workers; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
