"""`rotate_rows` on CUDA: every kernel, layouts, sizes and borders."""

from __future__ import annotations

import pytest
import torch

from kvweave import InvalidArgument, ops
from scarce_memory import no_room_on_gpu
from versions import needs_cuda

pytestmark = needs_cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRINGS = ["half", "interleaved"]


def turns(generator: torch.Generator, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Cos and sin [2, R, W] on the host."""
    angles = 100 * torch.rand(rows, width // 2, generator=generator)
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(dtype)


def rows_of(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("width", [0, 24, 64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (9, 3), (5, 0)])
def test_every_kernel_has_the_bits_of_the_cpu(generator, dtype, pairing, width, heads) -> None:
    """Heads in pairs and odd ones; a width that 16 bytes divide and one that they do not."""
    given = [rows_of(generator, dtype, 37, count, 128) for count in heads if count]
    cos, sin = turns(generator, 37, width, dtype)
    there = [x.cuda() for x in given]
    apart = [torch.full_like(x, torch.nan) for x in there]
    on_device = cos.cuda(), sin.cuda()
    both = (*there, None)[:2]
    ops.rotate_rows(*both, *on_device, pairing=pairing, out=(*apart, None)[:2])
    assert all(torch.equal(x.cpu(), y) for x, y in zip(there, given, strict=True))
    ops.rotate_rows(*both, *on_device, pairing=pairing)
    ops.rotate_rows(*(*given, None)[:2], cos, sin, pairing=pairing)
    for wanted, read, written in zip(given, there, apart, strict=True):
        assert torch.equal(read.cpu(), wanted)
        assert torch.equal(written.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_views_of_a_fused_projection(generator, dtype, pairing) -> None:
    """On and off the boundaries of 16 bytes; what lies between stays."""
    cos, sin = turns(generator, 50, 64, dtype)
    for shift in (0, 1, 8):
        fused = rows_of(generator, dtype, 50, 12 * 64 + shift)
        there = fused.cuda()
        for x, c, s in ((fused, cos, sin), (there, cos.cuda(), sin.cuda())):
            q = x[:, shift : shift + 7 * 64].unflatten(1, (7, 64))
            k = x[:, shift + 8 * 64 : shift + 10 * 64].unflatten(1, (2, 64))
            ops.rotate_rows(q, k, c, s, pairing=pairing)
        assert torch.equal(there.cpu(), fused)


def test_one_angle_for_all_rows(generator) -> None:
    q = rows_of(generator, torch.bfloat16, 9, 4, 64)
    cos, sin = turns(generator, 1, 64, torch.bfloat16)
    there = q.cuda()
    ops.rotate_rows(there, None, cos.cuda().expand(9, 64), sin.cuda().expand(9, 64))
    ops.rotate_rows(q, None, cos.expand(9, 64), sin.expand(9, 64))
    assert torch.equal(there.cpu(), q)


def test_long_prompts_are_beyond_no_index(generator) -> None:
    """Elements past 2^31 in a row-strided tensor, each row as it is alone."""
    rows, stride = 32 * 1024, 70_000
    storage = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    q = storage.as_strided((rows, 32, 128), (stride, 128, 1))
    some = rows_of(generator, torch.bfloat16, 64, 32, 128)
    q.copy_(some.cuda().repeat(rows // 64, 1, 1))
    cos, sin = (t.cuda() for t in turns(generator, 64, 128, torch.bfloat16))
    ops.rotate_rows(q, None, *(t.repeat(rows // 64, 1) for t in (cos, sin)))
    ops.rotate_rows(some, None, cos.cpu(), sin.cpu())
    assert torch.equal(q, some.cuda().repeat(rows // 64, 1, 1))


def test_it_needs_no_memory(generator) -> None:
    q, k = (rows_of(generator, torch.bfloat16, 5, heads, 64).cuda() for heads in (4, 2))
    cos, sin = (t.cuda() for t in turns(generator, 5, 64, torch.bfloat16))
    ops.rotate_rows(q, k, cos, sin)
    with no_room_on_gpu():
        ops.rotate_rows(q, k, cos, sin)


BAD = [
    ({"k": torch.ones(3, 2, 16)}, "k: expected a tensor on cuda:0, got cpu"),
    ({"cos": torch.ones(3, 16)}, "cos: expected a tensor on cuda:0, got cpu"),
    ({"q": torch.ones(3, 4, 16).double().cuda}, "q: expected float32, bfloat16 or float16"),
    ({"sin": torch.ones(3, 16).half().cuda}, "sin: expected float32, got float16"),
    ({"cos": torch.ones(2, 16).cuda}, "cos: expected 3 elements, got 2"),
    (
        {"cos": torch.ones(3, 15).cuda, "sin": torch.ones(3, 15).cuda},
        "rotary_dim: expected an even",
    ),
    (
        {"cos": torch.ones(3, 18).cuda, "sin": torch.ones(3, 18).cuda},
        "rotary_dim: expected at most",
    ),
    ({"k": torch.ones(3, 2, 8).cuda}, "head_dim of k: expected 16, got 8"),
    ({"q": lambda: torch.ones(1, 4, 16).cuda().expand(3, 4, 16)}, "q: expected vectors of 16"),
    ({"pairing": "quarter"}, "pairing: expected half or interleaved"),
    ({"backend": "cpu"}, "q: expected a tensor on cpu, got cuda:0"),
]


@pytest.mark.parametrize(("other", "words"), BAD)
def test_it_refuses_and_writes_nothing(other, words) -> None:
    made = {"q": torch.ones(3, 4, 16).cuda(), "k": torch.ones(3, 2, 16).cuda()}
    made |= {name: torch.full((3, 16), 0.5).cuda() for name in ("cos", "sin")}
    made |= {name: x() if callable(x) else x for name, x in other.items()}
    with pytest.raises(InvalidArgument, match=words):
        ops.rotate_rows(**made)
    assert all((made[name] == 1).all() for name in ("q", "k"))


def test_queries_and_keys_lie_apart() -> None:
    x = torch.ones(3, 6, 16).cuda()
    turn = torch.full((3, 16), 0.5).cuda()
    with pytest.raises(InvalidArgument, match="q: expected memory of its own, apart from k"):
        ops.rotate_rows(x[:, :4], x[:, 3:5], turn, turn)
    assert (x == 1).all()
