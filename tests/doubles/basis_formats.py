"""Any format of pages in a basis, drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from kvweave import ops
from packed_texts import SCALES

ODD_NUMBERS = st.lists(
    st.tuples(
        st.integers(0, 149),
        st.integers(0, 127),
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 6e4, 1e-7, 3e38]),
    ),
    max_size=6,
)
"""A token, a channel and what is to stand there, as `packed_texts.put_odd` takes them."""


@st.composite
def top_r_formats(draw, dims: Sequence[int], tokens: Sequence[int]) -> ops.PackedFormat:
    """Any top-r format of one of these head dims, in pages of one of these sizes."""
    dim, group = draw(st.sampled_from(dims)), draw(st.sampled_from([1, 2, 4]))
    numbers = draw(st.sampled_from(["bf16", "fp8", "int4"]))
    step = max(group, 2) if numbers == "int4" else group
    channels = group * draw(st.integers(step // group, dim // group))
    kept = step * draw(st.integers(1, channels // step))
    page, scales = draw(st.sampled_from(tokens)), draw(st.sampled_from(list(SCALES)))
    sizes = {"kept": kept, "group": group, "channels": channels, "numbers": numbers}
    return ops.PackedFormat("top-r", dim, page, scales, **sizes)


@st.composite
def plane_formats(draw, dims: Sequence[int], tokens: Sequence[int]) -> ops.PackedFormat:
    """Any planes, of a byte to 8 bits a channel."""
    dim, page = draw(st.sampled_from(dims)), draw(st.sampled_from(tokens))
    size = draw(st.integers(1, 2 * dim) | st.integers(dim // 2, dim))
    return ops.PackedFormat(
        "planes", dim, page, draw(st.sampled_from(list(SCALES))), token_bytes=size
    )
