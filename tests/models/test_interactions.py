"""DeepFM and DCNv2 against slow oracles, the plain form of their formulas, and deepctr-torch with the same weights."""

import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from pydantic import ValidationError
from reference import encoders as reference
from torch import Tensor, nn

from ltrscale.models.encoders import DCNv2, DCNv2Config, DeepFM, DeepFMConfig, _CrossLayer, _factorization

NUMERIC_F = torch.tensor([True, False, True, True, False])
CARDINALITIES = [4, 3]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def deepctr() -> SimpleNamespace:
    """deepctr-torch; its import would ask PyPI for the newest version, so the network is blocked."""

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(pytest.importorskip("requests"), "get", no_network)
        pytest.importorskip("deepctr_torch")
        from deepctr_torch import inputs, layers, models

        for thread in set(threading.enumerate()) - before:
            thread.join()
    return SimpleNamespace(inputs=inputs, layers=layers, models=models)


def documents(n: int = 30, seed: int = 1) -> Tensor:
    """Numeric columns 0, 2 and 3; categories with 4 rows in column 1 and 3 in column 4."""
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(n, 5, generator=generator)
    x_NF[:, 1] = torch.randint(0, 4, (n,), generator=generator)
    x_NF[:, 4] = torch.randint(0, 3, (n,), generator=generator)
    return x_NF


def randomised(module: ModuleT) -> ModuleT:
    """The module with every parameter, including zeros, moved from its initial value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def deepfm(numeric_F: Tensor = NUMERIC_F, cardinalities: list[int] = CARDINALITIES, **settings: Any) -> DeepFM:
    config = DeepFMConfig.model_validate({"hidden": [6, 5], "embedding": 3, "dropout": 0, **settings})
    return randomised(DeepFM(config, numeric_F, cardinalities))


def dcnv2(numeric_F: Tensor = NUMERIC_F, cardinalities: list[int] = CARDINALITIES, **settings: Any) -> DCNv2:
    config = DCNv2Config.model_validate({"hidden": [6, 5], "embedding": 2, **settings})
    return randomised(DCNv2(config, numeric_F, cardinalities))


def test_factorization_is_the_sum_over_pairs() -> None:
    x_NP, vectors_PE = torch.randn(20, 4).double(), torch.randn(4, 3).double()
    embedded_NCE = torch.randn(20, 2, 3).double()
    actual_N = _factorization(x_NP, vectors_PE, embedded_NCE)
    for x_P, embedded_CE, actual in zip(x_NP, embedded_NCE, actual_N, strict=True):
        fields = [*zip(x_P.tolist(), vectors_PE, strict=True), *((1.0, vector) for vector in embedded_CE)]
        torch.testing.assert_close(actual, reference.factorization(fields), rtol=1e-12, atol=1e-12)
    assert not _factorization(x_NP[:, :1], vectors_PE[:1], embedded_NCE[:, :0]).any()  # one field makes no pair
    assert not _factorization(x_NP[:, :0], vectors_PE[:0], embedded_NCE[:, :0]).any()


def plain_deepfm(model: DeepFM, x_N: Tensor) -> Tensor:
    """The embedding of one document, from the fields' vectors one by one."""
    assert model.features.table is not None
    assert model.weights.table is not None
    numbers = x_N[[0, 2, 3]]
    rows = [int(x_N[1]), 4 + int(x_N[4])]  # the second feature's rows follow the four of the first
    categories = [model.features.table.weight[row] for row in rows]
    first = numbers @ model.weights_P + sum(model.weights.table.weight[row, 0] for row in rows)
    products = [x * vector for x, vector in zip(numbers, model.vectors_PE, strict=True)]
    second = reference.factorization([(1.0, vector) for vector in products + categories])
    h = torch.cat(products + categories)
    for layer in (model.first, *model.rest):
        h = layer(h)
    return torch.cat([first[None], second[None].float(), h])


def test_deepfm_is_built_from_the_vectors_of_its_fields() -> None:
    model, x_NF = deepfm(), documents()
    expected_ND = torch.stack([plain_deepfm(model, x_F) for x_F in x_NF])
    torch.testing.assert_close(model(x_NF), expected_ND, rtol=1e-4, atol=1e-5)


def test_deepfm_shares_the_gradient_of_the_plain_form() -> None:
    model, x_NF = deepfm(), documents(4)
    deep = slice(2, None)  # the oracle of the second-order term has no gradient
    model(x_NF)[:, deep].square().sum().backward()
    actual = [model.vectors_PE.grad, model.first.weight.grad]
    model.zero_grad()
    torch.stack([plain_deepfm(model, x_F)[deep] for x_F in x_NF]).square().sum().backward()
    torch.testing.assert_close(actual, [model.vectors_PE.grad, model.first.weight.grad], rtol=1e-4, atol=1e-5)


def deepctr_columns(deepctr: SimpleNamespace, embedding: int) -> list[Any]:
    """Columns that map our order to that of deepctr-torch, whose MLP reads categories first, then numbers."""
    sparse, dense = deepctr.inputs.SparseFeat, deepctr.inputs.DenseFeat
    category = {"embedding_dim": embedding}
    return [
        *(dense("n0", 1), sparse("c0", 4, **category), dense("n1", 1), dense("n2", 1)),
        sparse("c1", 3, **category),
    ]


def copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        assert target.shape == source.shape
        target.copy_(source)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_deepfm_is_deepctrs_under_a_linear_head(deepctr: SimpleNamespace, batch_norm: bool) -> None:
    columns = deepctr_columns(deepctr, 3)
    settings = {"dnn_hidden_units": (6, 5), "dnn_dropout": 0, "dnn_use_bn": batch_norm, "task": "regression"}
    theirs = randomised(deepctr.models.DeepFM(columns, columns, **settings))
    ours = deepfm(numeric_fields=False, batch_norm=batch_norm)
    head = nn.Linear(ours.width, 1)
    assert ours.features.table is not None
    assert ours.weights.table is not None
    copy(ours.features.table.weight, torch.cat([theirs.embedding_dict[name].weight for name in ("c0", "c1")]))
    first_order = theirs.linear_model.embedding_dict
    copy(ours.weights.table.weight, torch.cat([first_order[name].weight for name in ("c0", "c1")]))
    copy(ours.weights_P, theirs.linear_model.weight[:, 0])
    copy(ours.first.weight, theirs.dnn.linears[0].weight[:, [6, 7, 8, 0, 1, 2, 3, 4, 5]])
    copy(ours.first.bias, theirs.dnn.linears[0].bias)
    second = next(layer for layer in ours.rest if isinstance(layer, nn.Linear))
    second.load_state_dict(theirs.dnn.linears[1].state_dict())
    if batch_norm:
        norms = [layer for layer in ours.rest if hasattr(layer, "running_mean")]
        for norm, other in zip(norms, theirs.dnn.bn, strict=True):
            norm.load_state_dict({name: value for name, value in other.state_dict().items() if "num" not in name})
    copy(head.weight, torch.cat([torch.ones(1, 2), theirs.dnn_linear.weight], dim=1))
    copy(head.bias, theirs.out.bias)
    for module in (ours, theirs):
        module.eval()
    x_NF = documents()
    torch.testing.assert_close(head(ours(x_NF))[:, 0], theirs(x_NF)[:, 0], rtol=1e-5, atol=1e-5)


def test_deepfm_with_numeric_fields_is_deepctrs_layers(deepctr: SimpleNamespace) -> None:
    ours, x_NF = deepfm(), documents()
    x_NP, embedded_NCE = ours.features.split(x_NF)
    fields_NFE = torch.cat([x_NP[:, :, None] * ours.vectors_PE, embedded_NCE], dim=1)
    dnn = deepctr.layers.DNN(15, (6, 5))
    dnn.linears[0].load_state_dict(ours.first.state_dict())
    dnn.linears[1].load_state_dict(next(layer for layer in ours.rest if isinstance(layer, nn.Linear)).state_dict())
    h_ND = ours(x_NF)
    torch.testing.assert_close(h_ND[:, 1], deepctr.layers.FM()(fields_NFE)[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h_ND[:, 2:], dnn(fields_NFE.flatten(1)), rtol=1e-5, atol=1e-5)


def test_cross_layers_are_the_papers() -> None:
    model = dcnv2(cross_layers=3, structure="parallel").double()
    x0_ND = model.features(documents().double())
    layers = [(layer.linear.weight, layer.linear.bias) for layer in model.cross]
    expected_ND = torch.stack([reference.cross(x0_D, layers) for x0_D in x0_ND])
    actual_ND = model(documents().double())[:, : x0_ND.shape[1]]
    torch.testing.assert_close(actual_ND, expected_ND, rtol=1e-12, atol=1e-12)


def test_low_rank_is_the_full_layer_with_the_product_of_its_matrices() -> None:
    low, full = randomised(_CrossLayer(9, rank=2)), _CrossLayer(9)
    assert isinstance(low.down, nn.Linear)
    copy(full.linear.weight, low.linear.weight @ low.down.weight)
    copy(full.linear.bias, low.linear.bias)
    x0_ND, x_ND = torch.randn(2, 10, 9)
    torch.testing.assert_close(low(x0_ND, x_ND), full(x0_ND, x_ND))
    assert sum(p.numel() for p in low.parameters()) == 9 * 2 + 2 * 9 + 9


@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("rank", [None, 2])
def test_parallel_dcnv2_is_deepctrs_under_a_linear_head(
    deepctr: SimpleNamespace, layers: int, rank: int | None
) -> None:
    columns = deepctr_columns(deepctr, 2)
    settings = {"dnn_hidden_units": (6, 5), "cross_num": layers, "cross_parameterization": "matrix"}
    theirs = randomised(deepctr.models.DCN(columns, columns, **settings, task="regression"))
    ours = dcnv2(cross_layers=layers, rank=rank, structure="parallel")
    head = nn.Linear(ours.width, 1)
    assert ours.features.table is not None
    copy(ours.features.table.weight, torch.cat([theirs.embedding_dict[name].weight for name in ("c0", "c1")]))
    order = [4, 5, 6, 0, 1, 2, 3]  # theirs: embeddings, then numbers
    for i, layer in enumerate(ours.cross):
        weight = layer.linear.weight if rank is None else layer.linear.weight @ layer.down.weight
        theirs.crossnet.kernels.data[i][torch.tensor(order)[:, None], torch.tensor(order)] = weight.detach()
        theirs.crossnet.bias.data[i][order] = layer.linear.bias.detach()[:, None]
    linears = [layer for layer in ours.mlp if isinstance(layer, nn.Linear)]
    copy(linears[0].weight, theirs.dnn.linears[0].weight[:, order])
    copy(linears[0].bias, theirs.dnn.linears[0].bias)
    linears[1].load_state_dict(theirs.dnn.linears[1].state_dict())
    copy(head.weight, theirs.dnn_linear.weight[:, [*order, *range(7, 12)]])
    copy(head.bias, theirs.out.bias)
    x_NF = documents()
    nothing_N = theirs.linear_model(x_NF)[:, 0]  # the library adds a linear model, which the paper does not have
    torch.testing.assert_close(head(ours(x_NF))[:, 0], theirs(x_NF)[:, 0] - nothing_N, rtol=1e-4, atol=1e-4)


def test_stacked_dcnv2_puts_the_mlp_on_the_cross_layers() -> None:
    stacked, parallel = dcnv2(structure="stacked"), dcnv2(structure="parallel")
    parallel.load_state_dict(stacked.state_dict())
    x_NF = documents()
    crossed_ND = parallel(x_NF)[:, :7]
    torch.testing.assert_close(stacked(x_NF), stacked.mlp(crossed_ND))
    torch.testing.assert_close(parallel(x_NF)[:, 7:], parallel.mlp(parallel.features(x_NF)))


def test_fresh_second_order_terms_have_a_deviation_of_about_one() -> None:
    for width, embedding in ((10, 8), (136, 8), (136, 32)):
        x_NF = torch.randn(2000, width)
        numeric_F = torch.ones(width, dtype=torch.bool)
        config = DeepFMConfig(embedding=embedding, hidden=(1,))
        with torch.no_grad():
            spread = [float(DeepFM(config, numeric_F, [])(x_NF)[:, 1].std()) for _ in range(10)]
        assert 0.5 < sum(spread) / len(spread) < 1.5


def test_second_order_terms_survive_bfloat16() -> None:
    model, x_NF = deepfm(), documents()
    with torch.autocast("cpu", torch.bfloat16):
        h_ND = model(x_NF)
    torch.testing.assert_close(h_ND[:, :2].float(), model(x_NF)[:, :2])
    assert not torch.equal(h_ND[:, 2:].float(), model(x_NF)[:, 2:])


MAKERS: dict[str, Callable[..., DeepFM | DCNv2]] = {"deepfm": deepfm, "dcnv2": dcnv2}


@pytest.mark.parametrize("kind", MAKERS)
def test_wrong_sizes_are_refused(kind: str) -> None:
    for wrong in ({"hidden": []}, {"hidden": [0]}, {"embedding": 0}, {"dropout": 1.0}, {"layers": 3}):
        with pytest.raises(ValidationError):
            MAKERS[kind](**wrong)
    with pytest.raises(ValidationError):
        dcnv2(cross_layers=0)
    with pytest.raises(ValidationError):
        dcnv2(rank=0)
