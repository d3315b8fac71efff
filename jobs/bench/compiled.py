"""Bytes that a compiled step of SimCLR-Rank moves, as Inductor counts them, which needs neither a GPU nor its code.

Shapes: N documents, F features.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from jobs.bench.pretend import counting, pretending
from ltrscale import layout
from ltrscale.batch import QueryGroups, length_chunks
from ltrscale.devices import block_entries
from ltrscale.lengths import best_cuts
from ltrscale.pretext import fused
from ltrscale.pretext.augment import Draw
from ltrscale.pretext.objective import Pretrainer, Siamese
from ltrscale.training.settings import Precision


def bytes_compiled(net: Pretrainer, groups: QueryGroups, precision: Precision) -> float:
    """Bytes that each document of a compiled step moves: its compiled parts in both directions, and drawing its views.

    Updates of weights are left out: they do not grow with the documents. On a GPU, Inductor may cut long reductions in
    two, and read their parts once more.

    Raises:
        torch._dynamo.exc.Unsupported: a part is not one graph.
    """
    counted: list[int] = []
    compiled: Any = partial(torch.compile, dynamic=True, fullgraph=True, backend=_backend(counted))
    transform, encoder, projector = (compiled(part) for part in (net.transform, net.encoder, net.projector))
    similar = fused.Similarities(10.0, with_positive=True, half=precision != "float32")
    with mock.patch.object(layout, "filled", _as_on_a_gpu):
        chunks = length_chunks(groups.offsets_Q1, budget=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        x_NF = transform(groups.features_NF)
        z0_NP, z1_NP = (projector(encoder(x_NF)) for _ in range(2))
    compiled(fused.info_nce)(z0_NP, z1_NP, chunks, similar).sum().backward()
    return float(sum(counted) + _of_views(net, x_NF)) / groups.n_documents


def _of_views(net: Pretrainer, x_NF: Tensor) -> int:
    assert isinstance(net.method, Siamese)
    with pretending(values=False) as device, counting() as counted:
        draw = Draw(net.transform.numeric_F, torch.tensor([0, len(x_NF)]), torch.Generator(device))
        net.method.views(net, x_NF.to(device), draw)
    moved: int = counted.counts.touched
    return moved


def _as_on_a_gpu(lengths_G: Any, power: int, _: int) -> list[int]:
    return best_cuts(lengths_G, power, block_entries(torch.device("meta")))


def _backend(counted: list[int]) -> Any:
    """Lower and schedule each graph as Inductor does; when one runs, as it is, its bytes are noted."""

    def count(graph: Any, inputs: Sequence[Any], *, is_backward: bool = False) -> Callable[..., Any]:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        lowering = GraphLowering(copy.deepcopy(graph), shape_env=mode.shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering._update_scheduler()
            moved = lowering.count_bytes()[0]

        def run(*arguments: Any) -> Any:
            counted.append(moved)
            return graph.forward(*arguments)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def partition(graph: Any, inputs: Sequence[Any], **settings: Any) -> Any:
        with V.set_fake_mode(TracingContext.get().fake_mode):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, **settings)

    return aot_autograd(
        fw_compiler=count,
        inference_compiler=count,
        bw_compiler=partial(count, is_backward=True),
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
