"""VIME-self, SubTab and their decoders: values against the plain loop, laws of masks, subsets and views, learning."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pretext as reference
from torch import Tensor, nn

from jobs.bench.pretend import counting, pretending
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.ranker import Projector, ProjectorConfig
from ltrscale.pretext import reconstruct
from ltrscale.pretext.augment import Draw
from ltrscale.pretext.reconstruct import (
    MAX_CLASSES,
    DecoderConfig,
    FeatureDecoder,
    Noise,
    SubTabConfig,
    _reconstruction_classes,
    _vime_corrupt,
    _VimeDecoder,
    feature_errors,
    subtab,
    vime,
)

DECODER_NUMERIC_F = torch.tensor([True, True, False, True])
DECODER_CARDINALITIES = [4]


def documents_decoder(n: int) -> Tensor:
    """Features that predict each other: a factor, its square, its category and its negative."""
    factor_N = torch.randn(n, generator=torch.Generator().manual_seed(0))
    category_N = (factor_N + 2).clamp(0, 3).floor()
    return torch.stack([factor_N, factor_N.square() - 1, category_N, -factor_N], 1)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoder_has_an_output_for_each_number_and_each_class(layers: int) -> None:
    decoder = FeatureDecoder(DecoderConfig(layers=layers, width=5), 8, DECODER_NUMERIC_F, [1000])
    assert decoder(torch.zeros(2, 8)).shape == (2, 3 + MAX_CLASSES)
    x_NF = documents_decoder(2)
    assert feature_errors(decoder(torch.zeros(2, 8)), x_NF, DECODER_NUMERIC_F, [1000]).shape == (2, 4)
    assert sum(isinstance(module, nn.Linear) for module in decoder.modules()) == layers


def test_vimes_estimators_share_nothing() -> None:
    decoder = _VimeDecoder(DecoderConfig(), 8, DECODER_NUMERIC_F, DECODER_CARDINALITIES)
    decoded_NO, logits_NF = decoder(torch.ones(2, 8))
    assert decoded_NO.shape == (2, 3 + 4)
    assert logits_NF.shape == (2, 4)
    grads = torch.autograd.grad(logits_NF.sum(), list(decoder.parameters()), allow_unused=True)
    names = [name for name, _ in decoder.named_parameters()]
    assert [name for name, grad in zip(names, grads, strict=True) if grad is not None] == [
        name for name in names if name.startswith("mask.")
    ]


def learned(parts: nn.ModuleList, loss: Callable[[torch.Generator], Tensor], steps: int) -> float:
    """The mean loss of the last steps as a share of that of the first steps."""
    optimizer, generator, losses = torch.optim.Adam(parts.parameters(), lr=3e-3), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        loss_N = loss(generator)
        losses.append(float(loss_N.detach().mean()))
        optimizer.zero_grad()
        torch.autograd.backward(loss_N.mean())
        optimizer.step()
    return sum(losses[-5:]) / sum(losses[:5])


@pytest.mark.slow
def test_vime_learns() -> None:
    torch.manual_seed(0)
    encoder = ResNetConfig(width=32, dropout=0).build(DECODER_NUMERIC_F, DECODER_CARDINALITIES)
    decoder = _VimeDecoder(DecoderConfig(), encoder.width, DECODER_NUMERIC_F, DECODER_CARDINALITIES)
    x_NF = documents_decoder(512)

    def loss(generator: torch.Generator) -> Tensor:
        corrupted_NF, changed_NF = _vime_corrupt(x_NF, rate=0.3, generator=generator)
        decoded_NO, logits_NF = decoder(encoder(corrupted_NF))
        return vime(decoded_NO, logits_NF, x_NF, changed_NF, DECODER_NUMERIC_F, DECODER_CARDINALITIES, alpha=2.0)

    assert learned(nn.ModuleList([encoder, decoder]), loss, steps=80) < 0.4


@pytest.mark.slow
def test_subtab_learns() -> None:
    torch.manual_seed(0)
    encoder = ResNetConfig(width=32, dropout=0).build(DECODER_NUMERIC_F, DECODER_CARDINALITIES)
    decoder = FeatureDecoder(DecoderConfig(layers=2), encoder.width, DECODER_NUMERIC_F, DECODER_CARDINALITIES)
    projector = Projector(encoder.width, ProjectorConfig(layers=1))
    x_NF, offsets_Q1 = documents_decoder(128), torch.tensor([0, 128])

    def loss(generator: torch.Generator) -> Tensor:
        views = SubTabConfig(rate=0.1).views(x_NF, Draw(DECODER_NUMERIC_F, offsets_Q1, generator))
        h_ND = encoder(views.flatten(0, 1))
        decoded_KNO, z_KNP = (part(h_ND).unflatten(0, views.shape[:2]) for part in (decoder, projector))
        return subtab(decoded_KNO, z_KNP, x_NF, offsets_Q1, DECODER_NUMERIC_F, DECODER_CARDINALITIES, temperature=0.1)

    assert learned(nn.ModuleList([encoder, decoder, projector]), loss, steps=80) < 0.5


NUMERIC_F = torch.tensor([True, False, True, False, True])
CARDINALITIES = [3, 700]
CLASSES = [None, 3, None, 256, None]  # as the plain loops take them: 700 indices are folded into 256
OUTPUTS = 3 + 3 + 256


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def documents(n: int, seed: int = 0) -> Tensor:
    """Float64 documents with two categorical features."""
    x_NF = torch.randn(n, 5, generator=generator(seed), dtype=torch.float64)
    x_NF[:, 1] = torch.randint(3, (n,), generator=generator(seed))
    x_NF[:, 3] = torch.randint(700, (n,), generator=generator(seed))
    return x_NF


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(100 + seed), dtype=torch.float64)


def test_errors_of_features_are_those_of_the_loop() -> None:
    x_NF, decoded_NO = documents(20), normal(20, OUTPUTS)
    assert (x_NF[:, 3] >= 256).any()
    errors_NF = feature_errors(decoded_NO, x_NF, NUMERIC_F, CARDINALITIES)
    for errors_F, decoded_O, x_F in zip(errors_NF, decoded_NO, x_NF, strict=True):
        torch.testing.assert_close(errors_F, torch.stack(reference.feature_errors(decoded_O, x_F, CLASSES)))


def test_a_perfect_reconstruction_has_no_error_and_a_wrong_category_costs_as_much_as_any_other() -> None:
    x_NF = documents(30)
    decoded_NO = torch.zeros(30, OUTPUTS, dtype=torch.float64)
    decoded_NO[:, :3] = x_NF[:, NUMERIC_F]
    uniform_NF = feature_errors(decoded_NO, x_NF, NUMERIC_F, CARDINALITIES)
    torch.testing.assert_close(uniform_NF[:, 1], torch.full((30,), math.log(3), dtype=torch.float64))
    torch.testing.assert_close(uniform_NF[:, 3], torch.full((30,), math.log(256), dtype=torch.float64))
    for i, x_F in enumerate(x_NF):
        decoded_NO[i, 3 + int(x_F[1])] = decoded_NO[i, 6 + int(x_F[3]) % 256] = 50.0
    assert feature_errors(decoded_NO, x_NF, NUMERIC_F, CARDINALITIES).max() < 1e-12


def test_classes_are_bounded() -> None:
    assert _reconstruction_classes([1, 256, 257, 10**6]) == [1, 256, reconstruct.MAX_CLASSES, reconstruct.MAX_CLASSES]


def test_vime_is_the_formula_and_its_gradient_that_of_the_loop() -> None:
    x_NF, decoded_NO, logits_NF = documents(6), normal(6, OUTPUTS).requires_grad_(), normal(6, 5, seed=1)
    logits_NF.requires_grad_()
    changed_NF = normal(6, 5, seed=2) > 0
    weights_N = normal(6, seed=3)
    loss_N = vime(decoded_NO, logits_NF, x_NF, changed_NF, NUMERIC_F, CARDINALITIES, alpha=1.7)
    expected_N = torch.stack(
        [
            reference.vime(decoded_NO[i], logits_NF[i], x_NF[i], changed_NF[i].tolist(), CLASSES, 1.7)
            for i in range(len(x_NF))
        ]
    )
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-10, atol=1e-10)
    inputs = [decoded_NO, logits_NF]
    grads = torch.autograd.grad((weights_N * loss_N).sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad((weights_N * expected_N).sum(), inputs))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_mask_of_vime_is_true_where_a_value_changed_and_nowhere_else(rate: float) -> None:
    x_NF = torch.cat([documents(4000), torch.zeros(4000, 1, dtype=torch.float64)], 1)
    x_NF[:, 0] = (x_NF[:, 0] > 1).double()  # few values: a draw is often the value itself
    before_NF = x_NF.clone()
    corrupted_NF, changed_NF = _vime_corrupt(x_NF, rate=rate, generator=generator())
    assert torch.equal(x_NF, before_NF)
    assert torch.equal(changed_NF, corrupted_NF != x_NF)
    assert not changed_NF[:, 5].any()
    columns = [[(c_N == v).double().mean() for v in c_N.unique()] for c_N in x_NF.T]
    for column_N, shares in zip(changed_NF.T, columns, strict=True):
        expected = rate * (1 - sum(float(share) ** 2 for share in shares))  # a draw of another value
        assert float(column_N.double().mean()) == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(4000))


def test_vime_corrupts_with_values_of_the_same_column_and_with_every_one_of_them_once() -> None:
    x_NF = documents(500)
    corrupted_NF, _ = _vime_corrupt(x_NF, rate=1.0, generator=generator())
    assert torch.equal(corrupted_NF.sort(0).values, x_NF.sort(0).values)
    rows = [{tuple(row) for row in values.tolist()} for values in (x_NF[:, [0, 2]], corrupted_NF[:, [0, 2]])]
    assert len(rows[0] & rows[1]) < 10  # each column has an order of its own: 1 pair of values is expected to stay
    again_NF, _ = _vime_corrupt(x_NF, rate=1.0, generator=generator())
    other_NF, _ = _vime_corrupt(x_NF, rate=1.0, generator=generator(1))
    assert torch.equal(again_NF, corrupted_NF)
    assert not torch.equal(other_NF, corrupted_NF)


@pytest.mark.parametrize("n", [0, 1])
def test_vime_of_no_or_one_document_corrupts_nothing(n: int) -> None:
    corrupted_NF, changed_NF = _vime_corrupt(documents(n), rate=0.9, generator=generator())
    assert torch.equal(corrupted_NF, documents(n))
    assert not changed_NF.any()
    loss_N = vime(normal(n, OUTPUTS), normal(n, 5), documents(n), changed_NF, NUMERIC_F, CARDINALITIES, alpha=2.0)
    assert loss_N.shape == (n,)
    assert loss_N.isfinite().all()


@given(st.integers(1, 150), st.integers(2, 8), st.floats(0, 0.99))
def test_subsets_cover_all_features_have_one_size_and_overlap_as_stated(
    n_features: int, subsets: int, overlap: float
) -> None:
    mask_KF = SubTabConfig(subsets=subsets, overlap=overlap).masks(n_features)
    block = math.ceil(n_features / subsets)
    shared = round(overlap * block)
    assert mask_KF.shape == (subsets, n_features)
    assert mask_KF.any(0).all()
    assert mask_KF.sum(1).tolist() == [min(n_features, block + shared)] * subsets
    for k in range(subsets):  # with its predecessor, the one of the first being the last
        common = int((mask_KF[k] & mask_KF[k - 1]).sum())
        assert common >= min(shared, n_features)
    if n_features % subsets == 0 and subsets > 2 and block + shared <= n_features:
        commons = [int((mask_KF[k] & mask_KF[k - 1]).sum()) for k in range(subsets)]
        assert commons == [shared] * subsets or shared > block * (subsets - 2)


@pytest.mark.parametrize("n_features", [1, 2, 3, 4, 5, 46, 136, 220, 700])
def test_four_subsets_with_three_quarters_of_overlap(n_features: int) -> None:
    """The setting of HOU24, section A.2.3."""
    mask_KF = SubTabConfig().masks(n_features)
    assert mask_KF.any(0).all()
    if n_features % 4 == 0:
        assert [int((mask_KF[k] & mask_KF[k - 1]).sum()) for k in range(4)] == [round(0.75 * n_features / 4)] * 4
        assert mask_KF.sum(1).tolist() == [n_features // 4 + round(0.75 * n_features / 4)] * 4


NOISES: list[Noise] = ["swap", "gaussian", "zero"]


@pytest.mark.parametrize("noise", NOISES)
def test_views_of_subsets_hold_the_subset_at_full_width_and_noise_at_its_rate(noise: Noise) -> None:
    x_NF = documents(5000)
    x_NF[:, [1, 3]] += 1  # so that 0 means a value outside the subset
    config = SubTabConfig(subsets=3, rate=0.4, noise=noise, scale=0.5)
    subsets_KF, views_KNF = config.masks(5), config.views(x_NF, Draw(NUMERIC_F, torch.tensor([0, 5000]), generator()))
    assert views_KNF.shape == (3, 5000, 5)
    for view_NF, subset_F in zip(views_KNF, subsets_KF, strict=True):
        assert not view_NF[:, ~subset_F].any()
        changed_F = (view_NF != x_NF).double().mean(0)
        for f in subset_F.nonzero()[:, 0].tolist():
            if noise == "gaussian" and not NUMERIC_F[f]:
                assert changed_F[f] == 0
            else:
                same = 1 / 3 if noise == "swap" and f == 1 else 0.0  # the value drawn is the value itself
                assert changed_F[f] == pytest.approx(0.4 * (1 - same), abs=5 * 0.5 / math.sqrt(5000))
        if noise == "gaussian":
            difference = (view_NF - x_NF)[:, NUMERIC_F & subset_F]
            assert difference[difference != 0].std() == pytest.approx(0.5, rel=0.05)
        else:
            allowed = [{0.0} if noise == "zero" else set(column_N.tolist()) for column_N in x_NF.T]
            changed_NF = (view_NF != x_NF) & subset_F
            assert all(set(view_NF[changed_NF[:, f], f].tolist()) <= allowed[f] for f in range(5))
    assert not torch.equal(views_KNF[0] != x_NF, views_KNF[1] != x_NF)


@pytest.mark.parametrize("noise", NOISES)
def test_views_of_subsets_follow_the_generator(noise: Noise) -> None:
    def views(seed: int, rate: float = 0.5) -> Tensor:
        draw = Draw(NUMERIC_F, torch.tensor([0, 50]), generator(seed))
        return SubTabConfig(rate=rate, noise=noise, scale=1).views(documents(50), draw)

    assert torch.equal(views(1), views(1))
    assert not torch.equal(views(1), views(2))
    assert torch.equal(views(1, rate=0.0), torch.where(SubTabConfig().masks(5)[:, None], documents(50), 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(("contrast", "distance"), [(1.0, 1.0), (0.0, 0.5), (2.0, 0.0)])
def test_subtab_is_the_formula_and_its_gradient_that_of_the_loop(contrast: float, distance: float) -> None:
    x_NF, decoded_KNO, z_KNP = documents(4), normal(3, 4, OUTPUTS).requires_grad_(), normal(3, 4, 6).requires_grad_()
    loss_N = subtab(
        decoded_KNO,
        z_KNP,
        x_NF,
        torch.tensor([0, 4]),
        NUMERIC_F,
        CARDINALITIES,
        temperature=0.2,
        contrast=contrast,
        distance=distance,
    )
    expected_N = reference.subtab(decoded_KNO, z_KNP, x_NF, CLASSES, 0.2, contrast, distance)
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-10, atol=1e-10)
    weights_N = normal(4, seed=5)
    inputs = [decoded_KNO, z_KNP]
    grads = torch.autograd.grad((weights_N * loss_N).sum(), inputs)
    expected = torch.autograd.grad((weights_N * expected_N).sum(), inputs)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-9)


def test_subtab_contrasts_within_groups_where_it_is_given_some() -> None:
    x_NF, decoded_KNO, z_KNP = documents(7), normal(2, 7, OUTPUTS), normal(2, 7, 6)

    def loss(rows: slice, offsets: list[int]) -> Tensor:
        parts = (decoded_KNO[:, rows], z_KNP[:, rows], x_NF[rows])
        return subtab(*parts, torch.tensor(offsets), NUMERIC_F, CARDINALITIES, temperature=0.1)

    apart_N = torch.cat([loss(slice(0, 3), [0, 3]), loss(slice(3, 7), [0, 4])])
    torch.testing.assert_close(loss(slice(0, 7), [0, 3, 7]), apart_N)
    assert (loss(slice(0, 7), [0, 7]) > apart_N).all()  # more documents to contrast with


@pytest.mark.parametrize("n", [0, 1, 3])
def test_subtab_and_vime_are_finite_for_few_documents_zero_vectors_and_half_precision(n: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        decoded_KNO = torch.full((4, n, OUTPUTS), 1e4, dtype=dtype, requires_grad=True)
        z_KNP = torch.zeros(4, n, 6, dtype=dtype, requires_grad=True)
        logits_NF = torch.full((n, 5), -1e4, dtype=dtype, requires_grad=True)
        x_NF = documents(n).float()
        offsets = torch.tensor([0, n])
        subtab_N = subtab(decoded_KNO, z_KNP, x_NF, offsets, NUMERIC_F, CARDINALITIES, temperature=0.01)
        changed_NF = torch.ones(n, 5, dtype=torch.bool)
        vime_N = vime(decoded_KNO[0], logits_NF, x_NF, changed_NF, NUMERIC_F, CARDINALITIES, alpha=2.0)
        assert subtab_N.dtype == vime_N.dtype == torch.float32
        assert subtab_N.isfinite().all()
        assert vime_N.isfinite().all()
        total = 1e-3 * (subtab_N.sum() + vime_N.sum())  # scaled, as half precision is trained
        grads = torch.autograd.grad(total, [decoded_KNO, z_KNP, logits_NF])
        assert all(grad.isfinite().all() for grad in grads)


def test_a_gpu_gives_the_same_errors_of_all_categories_at_once() -> None:
    generator, launches = torch.Generator().manual_seed(0), []
    for cardinalities in ([5], [5, 3, 1000, 1]):
        numeric_F = torch.tensor([True, *[False, True] * len(cardinalities)])
        x_NF = torch.randint(0, 900, (20, len(numeric_F)), generator=generator).float()
        outputs = int(numeric_F.sum()) + sum(min(256, n) for n in cardinalities)
        decoded_KNO = 30 * torch.randn(2, 20, outputs, generator=generator)
        decoded_KNO.requires_grad_()
        expected = feature_errors(decoded_KNO, x_NF, numeric_F, cardinalities)
        (gradient,) = torch.autograd.grad(expected.sum(), decoded_KNO)
        with pretending() as device:
            there = [values.detach().to(device) for values in (decoded_KNO, x_NF, numeric_F)]
            with counting() as counted:
                errors = feature_errors(there[0].requires_grad_(), *there[1:], cardinalities)
                (gradient_there,) = torch.autograd.grad(errors.sum(), there[0])
        assert not counted.counts.waits
        launches.append(counted.counts.launches)
        torch.testing.assert_close(errors.detach().cpu(), expected.detach())
        torch.testing.assert_close(gradient_there.cpu(), gradient)
    assert launches[0] == launches[1]
