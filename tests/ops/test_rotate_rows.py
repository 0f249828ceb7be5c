"""Rotation of new queries and keys, every version: against f64, torch and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmConfig, LlamaConfig
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from kvweave import InvalidArgument, ops
from rotary import rotated_by_torch
from versions import CPU, CUDA, RUNNABLE, VERSIONS, needs_cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of an element, of the sum of its two products: one rounding, some more of f32."""
PAIRINGS = ["half", "interleaved"]


def turns(generator: torch.Generator, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Cos and sin [2, R, W] of any angles, halves repeated."""
    angles = 100 * torch.rand(rows, width // 2, generator=generator, dtype=torch.float64)
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(dtype)


def vectors(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def by_numpy(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str) -> tuple:
    """X rotated by index arithmetic in f64, and the size of the sums that make each element."""
    got, c, s = (t.double().numpy() for t in (x, cos, sin))
    width = c.shape[1]
    half = width // 2
    every = np.arange(half)
    first, second = (every, every + half) if pairing == "half" else (2 * every, 2 * every + 1)
    out, size = got.copy(), np.abs(got)
    a, b = got[..., first], got[..., second]
    c, s = c[:, None, :half], s[:, None, :half]
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    size[..., first], size[..., second] = abs(a * c) + abs(b * s), abs(a * s) + abs(b * c)
    return torch.from_numpy(out), torch.from_numpy(size)


def expect_near(got: torch.Tensor, x: torch.Tensor, cos, sin, pairing: str) -> None:
    wanted, size = by_numpy(x, cos, sin, pairing)
    limit = CLOSE[x.dtype] * size + torch.finfo(x.dtype).tiny
    assert bool(((got.double() - wanted).abs() <= limit).all())
    width = cos.shape[1]
    assert torch.equal(got[..., width:], x[..., width:])


@settings(max_examples=80)
@given(
    rows=st.integers(0, 9),
    heads=st.tuples(st.integers(1, 9), st.integers(0, 4)),
    dim=st.sampled_from([2, 8, 10, 64, 80, 128]),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    pairing=st.sampled_from(PAIRINGS),
    dtype=st.sampled_from(DTYPES),
    apart=st.booleans(),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_every_shape_turns_as_f64_says(
    rows, heads, dim, share, pairing, dtype, apart, version, seed
) -> None:
    """Keys are left out where there are no heads of them; results go elsewhere where `apart`."""
    generator = torch.Generator().manual_seed(seed)
    width = int(dim * share) // 2 * 2
    cos, sin = turns(generator, rows, width, dtype)
    given_ = [vectors(generator, rows, count, dim, dtype=dtype) for count in heads if count]
    inputs = [x.clone() for x in given_]
    out = [torch.full_like(x, torch.nan) for x in given_]
    both = (*inputs, None)[:2]
    named = {"out": (*out, None)[:2]} if apart else {}
    version.rotate_rows(*both, cos, sin, pairing=pairing, **named)
    for x, read, written in zip(given_, inputs, out, strict=True):
        expect_near(written if apart else read, x, cos, sin, pairing)
        assert not apart or torch.equal(read, x)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("width", [20, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_torch_computes(generator, version, dtype, width, pairing) -> None:
    """In f32 the very bits of the plain expression, on a CPU and on CUDA alike."""
    q, k = (vectors(generator, 33, heads, 64, dtype=dtype) for heads in (9, 3))
    cos, sin = turns(generator, 33, width, dtype)
    wanted = [rotated_by_torch(x, cos, sin, pairing) for x in (q, k)]
    version.rotate_rows(q, k, cos, sin, pairing=pairing)
    for got, expected in zip((q, k), wanted, strict=True):
        if dtype == torch.float32 and version.name != "reference":
            assert torch.equal(got, expected)
        else:
            limit = 6 * CLOSE[dtype]
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("module", "rotary", "config", "pairing", "factor"),
    [
        (modeling_llama, modeling_llama.LlamaRotaryEmbedding, LlamaConfig, "half", 1.0),
        (modeling_glm, modeling_glm.GlmRotaryEmbedding, GlmConfig, "interleaved", 0.5),
    ],
)
def test_it_is_transformers_rotation(
    generator, version, module, rotary, config, pairing, factor
) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    made = config(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=parameters)
    cos, sin = rotary(made)(torch.zeros(1), torch.tensor([[0, 1, 17, 900, 100_000]]))
    q, k = (vectors(generator, 5, heads, 32, dtype=torch.float32) for heads in (4, 2))
    batched = [x.transpose(0, 1)[None] for x in (q, k)]
    wanted = [x[0].transpose(0, 1) for x in module.apply_rotary_pos_emb(*batched, cos, sin)]
    version.rotate_rows(q, k, cos[0], sin[0], pairing=pairing)
    torch.testing.assert_close(q, wanted[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(k, wanted[1], rtol=0, atol=1e-6)


@needs_cuda
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_and_cuda_have_the_same_bits(generator, dtype, pairing) -> None:
    q, k = (vectors(generator, 70, heads, 96, dtype=dtype) for heads in (5, 2))
    cos, sin = turns(generator, 70, 64, dtype)
    there = q.clone(), k.clone()
    CUDA.rotate_rows(*there, cos, sin, pairing=pairing)
    CPU.rotate_rows(q, k, cos, sin, pairing=pairing)
    assert torch.equal(there[0], q)
    assert torch.equal(there[1], k)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_strides_change_no_bit(generator, version, dtype, pairing) -> None:
    """Views of one fused projection, of a transposed one, odd strides, one row alone."""
    rows, dim = 40, 64
    q, k = (vectors(generator, rows, heads, dim, dtype=dtype) for heads in (5, 2))
    cos, sin = turns(generator, rows, dim, dtype)
    wanted = q.clone(), k.clone()
    version.rotate_rows(*wanted, cos, sin, pairing=pairing)

    fused = vectors(generator, rows, 10, dim, dtype=dtype)
    fused[:, 1:6], fused[:, 7:9] = q, k
    before = fused.clone()
    version.rotate_rows(fused[:, 1:6], fused[:, 7:9], cos, sin, pairing=pairing)
    assert torch.equal(fused[:, 1:6], wanted[0])
    assert torch.equal(fused[:, 7:9], wanted[1])
    assert torch.equal(fused[:, [0, 6, 9]], before[:, [0, 6, 9]])

    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    odd = torch.zeros(rows, 2, dim + 3, dtype=dtype)[..., 1 : dim + 1]
    odd.copy_(k)
    wide = torch.zeros(2, rows, dim + 1, dtype=dtype)
    wide[..., :dim] = torch.stack((cos, sin))
    version.rotate_rows(heads_first, odd, *wide[..., :dim], pairing=pairing)
    assert torch.equal(heads_first, wanted[0])
    assert torch.equal(odd, wanted[1])

    for row in (0, 17, 39):
        some = slice(row, row + 1)
        alone = q[some].clone()
        version.rotate_rows(alone, None, cos[some], sin[some], pairing=pairing)
        assert torch.equal(alone, wanted[0][some])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_angle_may_be_that_of_all_rows(generator, backend) -> None:
    q = vectors(generator, 6, 2, 8, dtype=torch.float32)
    cos, sin = turns(generator, 1, 8, torch.float32)
    wanted = rotated_by_torch(q, cos, sin)
    ops.rotate_rows(q, None, cos.expand(6, 8), sin.expand(6, 8), backend=backend)
    torch.testing.assert_close(q, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_reaches_its_pair_alone(generator, version, dtype) -> None:
    """Nor do the second halves of cos and sin, which nobody reads."""
    q = vectors(generator, 3, 2, 16, dtype=dtype)
    cos, sin = turns(generator, 3, 16, dtype)
    wanted = q.clone()
    version.rotate_rows(wanted, None, cos, sin)
    hostile = q.clone()
    hostile[1, 0, 3], hostile[2, 1, 12] = torch.nan, torch.inf
    cos[:, 8:] = torch.nan
    version.rotate_rows(hostile, None, cos, sin)
    touched = torch.zeros(3, 2, 16, dtype=torch.bool)
    touched[1, 0, [3, 11]] = True
    touched[2, 1, [4, 12]] = True
    assert torch.equal(hostile.isfinite(), ~touched)
    assert torch.equal(hostile[~touched], wanted[~touched])


@pytest.mark.parametrize("version", VERSIONS)
def test_many_rows_are_all_rotated(generator, version) -> None:
    """More than one thread's share on a CPU, and many thread blocks."""
    q, k = (vectors(generator, 1500, heads, 64, dtype=torch.float32) for heads in (3, 1))
    cos, sin = turns(generator, 1500, 64, torch.float32)
    wanted = [rotated_by_torch(x, cos, sin) for x in (q, k)]
    version.rotate_rows(q, k, cos, sin)
    torch.testing.assert_close(q, wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k, wanted[1], rtol=1e-6, atol=1e-6)


def call() -> dict:
    return {
        "q": torch.ones(3, 4, 16),
        "k": torch.ones(3, 2, 16),
        "cos": torch.zeros(3, 8),
        "sin": torch.ones(3, 8),
    }


SHARED = torch.ones(3, 6, 16)
BAD: list[tuple[dict, str]] = [
    ({"q": torch.ones(3, 4, 16).double()}, "q: expected float32, bfloat16 or float16, got float64"),
    ({"q": torch.ones(3, 4, 16).to(torch.float8_e4m3fn)}, "q: expected .*, got float8_e4m3fn"),
    ({"q": torch.ones(3, 64)}, r"q: expected shape \[R, heads, D\], got \[3, 64\]"),
    ({"q": torch.ones(3, 4, 32)[..., ::2]}, "q: expected a contiguous last axis, got strides"),
    ({"q": torch.ones(1, 4, 16).expand(3, 4, 16)}, "q: expected vectors of 16 elements that share"),
    ({"q": torch.ones(3, 70).unfold(1, 16, 8)[:, :4]}, "q: expected vectors of 16 elements that"),
    ({"q": torch.ones(3, 4, 16, requires_grad=True)}, "not differentiable"),
    ({"q": torch.ones(3, 4, 16, device="meta")}, "q: expected a tensor whose memory can be shared"),
    ({"q": SHARED[:, :4], "k": SHARED[:, 3:5]}, "q: expected memory of its own, apart from k"),
    (
        {"q": SHARED[:, :4], "cos": SHARED[:, 1, :8]},
        "q: expected memory of its own, apart from cos",
    ),
    ({"k": torch.ones(3, 2, 16).half()}, "k: expected float32, got float16"),
    ({"k": torch.ones(2, 2, 16)}, "cos: expected 2 elements, got 3"),
    ({"k": torch.ones(3, 2, 8)}, "head_dim of k: expected 16, got 8"),
    ({"k": torch.ones(3, 2, 16).numpy()}, "k: expected a tensor of torch, got an object of type"),
    ({"cos": torch.ones(3, 8).half()}, "cos: expected float32, got float16"),
    ({"cos": torch.ones(3, 1, 8)}, r"cos: expected shape \[R, W\], got \[3, 1, 8\]"),
    ({"cos": torch.ones(4, 8)}, "cos: expected 3 elements, got 4"),
    ({"cos": torch.ones(3, 16)[:, ::2]}, "cos: expected a contiguous last axis"),
    ({"sin": torch.ones(3, 6)}, "sin: expected the width 8 of cos, got 6"),
    ({"sin": None}, "sin: expected a tensor of torch, got an object of type NoneType"),
    ({"cos": torch.ones(3, 7), "sin": torch.ones(3, 7)}, "rotary_dim: expected an even number"),
    ({"cos": torch.ones(3, 18), "sin": torch.ones(3, 18)}, "rotary_dim: expected at most the head"),
    ({"pairing": "quarter"}, 'pairing: expected half or interleaved, got "quarter"'),
    ({"backend": "cuda"}, "q: expected a tensor on cuda, got one on cpu"),
    ({"backend": "gpu"}, "backend: expected cpu, cuda, reference or None"),
    ({"out": (torch.ones(3, 4, 16), None)}, "out of k: expected a tensor, got None"),
    ({"k": None, "out": (torch.ones(3, 4, 16),) * 2}, "out of k: expected None, got a tensor"),
    ({"out": (torch.ones(3, 4, 8), torch.ones(3, 2, 8))}, r"out of q: expected shape \[3, 4, 16\]"),
    ({"out": (torch.ones(3, 4, 16), torch.ones(3, 2, 16).half())}, "out of k: expected float32"),
    ({"out": (SHARED[:, :4], SHARED[:, 3:5])}, "out of q: expected memory of its own, apart from"),
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("other", "words"), BAD)
def test_it_refuses_and_writes_nothing(other, words, backend) -> None:
    given_ = {**call(), "backend": backend, **other}
    before = {name: x.clone() for name, x in given_.items() if isinstance(x, torch.Tensor)}
    with torch.enable_grad(), pytest.raises(InvalidArgument, match=words):
        ops.rotate_rows(**given_)
    for name, was in before.items():
        assert was.device.type == "meta" or torch.equal(given_[name], was)


def test_results_lie_apart_from_what_is_read() -> None:
    made = call()
    with pytest.raises(InvalidArgument, match="out of q: expected memory of its own, apart from q"):
        ops.rotate_rows(**made, out=(made["q"], torch.ones(3, 2, 16)))
    with pytest.raises(InvalidArgument, match="out of k: expected memory of its own, apart from q"):
        ops.rotate_rows(**made, out=(torch.ones(3, 4, 16), made["q"][:, :2]))
