"""On a GPU everything gives what it gives on a CPU, and stays on the GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import oracle
import pytest
import torch
from torch import nn

import mbpa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
D, CLASSES, ENTRIES, K = 12, 5, 300, 9


def heads() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": nn.Linear(D, CLASSES),
        "mlp": nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, CLASSES)),
    }


RULES = {
    "span": mbpa.Gradient(0.3, 6, decay=0.1, momentum=0.5),
    "one step": mbpa.Gradient(0.3, 1),
    "rmsprop": mbpa.RMSprop(0.05, 4, decay=0.1),
    "adam": mbpa.Adam(0.05, 4),
}


def examples(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(ENTRIES, D, generator=generator).to(dtype)
    labels = torch.randint(CLASSES, (ENTRIES,), generator=generator)
    return keys, labels, torch.randn(64, D, generator=generator).to(dtype)


def make_model(
    head: nn.Module, predictor: mbpa.Predictor, device: str, dtype: torch.dtype
) -> mbpa.MbPA:
    memory = mbpa.ExactMemory(ENTRIES, D, dtype=dtype, device=device)
    model = mbpa.MbPA(
        head=copy.deepcopy(head).to(device, dtype), memory=memory, predictor=predictor
    )
    keys, labels, _ = examples(dtype)
    model.write(keys.to(device), labels.to(device))
    return model


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_adaptation_equals_the_loop(head: str, rule: str) -> None:
    network = heads()[head]
    predictor = mbpa.Adapted(RULES[rule], k=K)
    keys, labels, queries = examples(torch.float64)
    arguments = RULES[rule], "cross_entropy", None
    wide, _ = oracle.adapted_outputs(
        copy.deepcopy(network).double(), *arguments, queries[:4], keys, labels, K
    )
    narrow, _ = oracle.adapted_outputs(
        network, *arguments, queries[:4].float(), keys.float(), labels, K
    )
    wide, narrow = wide.log_softmax(1), narrow.log_softmax(1)
    double = make_model(network, predictor, "cuda", torch.float64)(queries.cuda())
    assert double.is_cuda
    assert (double[:4].cpu() - wide).abs().max() <= 1e-9
    single = make_model(network, predictor, "cuda", torch.float32)(queries.float().cuda())
    tolerance = max(1e-4, 3 * float((narrow - wide).abs().max()))
    assert (single[:4].cpu() - wide).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_memory_on_the_gpu_keeps_the_contract(dtype: torch.dtype) -> None:
    memory = mbpa.ExactMemory(ENTRIES, D, dtype=dtype)
    keys, labels, queries = examples(dtype)
    memory.write(keys, labels)
    before = memory.read(queries, 20)
    assert memory.to("cuda").device == torch.device("cuda", 0)
    after = memory.read(queries.cuda(), 20)
    assert after.keys.is_cuda
    assert torch.equal(after.ids.cpu(), before.ids)
    assert (after.distances.cpu() - before.distances).abs().max() < 1e-4
    with pytest.raises(ValueError, match="on the memory's device cuda:0, got cpu"):
        memory.read(queries, 20)
    memory.to("cpu")
    assert torch.equal(memory.read(queries, 20).ids, before.ids)


def test_tf32_products_do_not_change_what_is_found() -> None:
    torch.manual_seed(0)
    memory = mbpa.ExactMemory(2000, 64, device="cuda")
    keys = 30 + torch.randn(2000, 64, device="cuda") * 0.1
    memory.write(keys, torch.zeros(2000, dtype=torch.int64))
    queries = keys[:50] + 1e-4
    exact = memory.read(queries, 10)
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(memory.read(queries, 10).ids, exact.ids)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
    distances = (keys[None] - queries[:, None]).square().sum(-1)
    assert torch.equal(exact.ids, distances.topk(10, largest=False).indices)


@pytest.mark.parametrize("mixed", [False, True])
def test_streams_score_alike(mixed: bool) -> None:
    predictor = mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5),
        mbpa.NeighborVote(mbpa.exp_dot(0.2), k=1000),
        weights=(0.6, 0.2, 0.2),
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, D), nn.Tanh(), nn.Linear(D, CLASSES))
    inputs, labels = torch.randn(200, 8), torch.randint(CLASSES, (200,))

    def scores(device: str, is_mixed: bool) -> torch.Tensor:
        embed, head = mbpa.split(copy.deepcopy(network).to(device), at="2")
        memory = mbpa.ExactMemory(90, D, device=device)
        model = mbpa.MbPA(embed, head, memory=memory, predictor=predictor)
        with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
            return mbpa.score_stream(model, inputs.to(device), labels.to(device), block=33).cpu()

    difference = (scores("cuda", mixed) - scores("cpu", False)).abs().max()
    assert difference < (0.2 if mixed else 1e-4)


def test_checkpoints_travel_between_devices(tmp_path: Path) -> None:
    head = heads()["linear"]
    predictor = mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5)
    model = make_model(head, predictor, "cuda", torch.float32)
    model.grow(CLASSES + 1)
    model.save(tmp_path)
    queries = examples(torch.float32)[2]
    on_gpu = mbpa.MbPA.load(tmp_path, head=copy.deepcopy(head).cuda())
    assert torch.equal(on_gpu(queries.cuda()), model(queries.cuda()))
    on_cpu = mbpa.MbPA.load(tmp_path, head=head)
    assert (on_cpu(queries) - model(queries.cuda()).cpu()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_conformance_suite_passes_on_the_gpu(dtype: torch.dtype) -> None:
    mbpa.testing.check_memory(
        lambda capacity, key_dim: mbpa.ExactMemory(capacity, key_dim, dtype=dtype, device="cuda")
    )
