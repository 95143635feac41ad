"""The Triton kernels of `TritonBackend`. Upper-case parameters are compile-time constants; shapes
among them are powers of two.

Triton compiles a kernel anew where an integer is 1 or becomes a multiple of 16, or where a pointer
becomes aligned to 16 bytes, unless told not to. What differs between batches must not do that, or
a batch would be compiled for seconds in the middle of a request.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["write"])
def store(
    key,
    value,
    keys,
    values,
    write,
    kv_heads,
    dim,
    value_dim,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(write + row).to(tl.int64)
    here, there = row * kv_heads + head, slot * kv_heads + head
    d = tl.arange(0, DIM)
    tl.store(keys + there * dim + d, tl.load(key + here * dim + d, d < dim), d < dim)
    d = tl.arange(0, VALUE)
    moved = tl.load(value + here * value_dim + d, d < value_dim)
    tl.store(values + there * value_dim + d, moved, d < value_dim)


@triton.jit(
    do_not_specialize=["rows", "words", "span"],
    do_not_specialize_on_alignment=[
        "tiles",
        "positions",
        "firsts",
        "prefixes",
        "trees",
        "tree_firsts",
        "mask",
        "tree_positions",
        "slots",
    ],
)
def attend(
    query,
    keys,
    values,
    parts,
    weights,
    tiles,
    positions,
    firsts,
    prefixes,
    trees,
    tree_firsts,
    mask,
    tree_positions,
    slots,
    rows,
    words,
    scaling,
    softcap,
    span,
    kv_heads,
    group,
    dim,
    value_dim,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    TAKEN: tl.constexpr,
    PAIRS: tl.constexpr,
    BITS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Attention of some rows of one segment and some heads that share a KV head to a part of the
    keys."""
    tile, heads, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    top = tl.load(tiles + 3 * tile)
    count = tl.load(tiles + 3 * tile + 1)
    splits = tl.load(tiles + 3 * tile + 2)
    if split < splits and top < rows:
        blocks = tl.cdiv(group, TAKEN)
        kv_head, block = heads // blocks, heads % blocks
        # Pairs of a row and a head, one after another.
        pair = tl.arange(0, PAIRS)
        row, member = top + pair // TAKEN, block * TAKEN + pair % TAKEN
        there = (pair // TAKEN < count) & (member < group)
        head = kv_head * group + member
        place = (row * kv_heads * group + head).to(tl.int64)
        d = tl.arange(0, DIM)
        e = tl.arange(0, VALUE)
        q = tl.load(
            query + place[:, None] * dim + d[None, :], there[:, None] & (d[None, :] < dim), 0.0
        )
        position = tl.load(positions + row, there, 0)
        first = tl.load(firsts + top)
        prefix = tl.load(prefixes + top)
        tree_first = tl.load(tree_firsts + top)
        end = prefix + tl.load(trees + top)
        begin = 0
        since = position
        if WINDOWED:
            since = position - span + 1
        if CHUNKED:
            since = position - position % span
        if WINDOWED or CHUNKED:
            earliest = tl.min(tl.where(there, since, 2147483647), 0)
            begin = tl.minimum(tl.maximum(earliest, 0), prefix)
        each = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
        low = begin + split * each
        high = tl.minimum(low + each, end)
        best = tl.full([PAIRS], -float("inf"), tl.float32)
        total = tl.zeros([PAIRS], tl.float32)
        out = tl.zeros([PAIRS, VALUE], tl.float32)
        for start in range(low, high, KEYS):
            i = start + tl.arange(0, KEYS)
            slot = tl.load(slots + first + i, i < high, 0).to(tl.int64) * kv_heads + kv_head
            k = tl.load(
                keys + slot[None, :] * dim + d[:, None],
                (i[None, :] < high) & (d[:, None] < dim),
                0.0,
            )
            score = tl.dot(q, k, input_precision=PRECISE) * scaling
            if CAPPED:
                # tanh, of which Triton has no portable version.
                score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
            seen = there[:, None] & (i[None, :] < high)
            at = i
            if start + KEYS > prefix:
                j = tl.maximum(i - prefix, 0)
                beyond = (i >= prefix) & (i < high)
                word = tl.load(
                    mask + row[:, None] * words + (j // BITS)[None, :],
                    there[:, None] & beyond[None, :],
                    -1,
                )
                seen = seen & ((word >> (j % BITS)[None, :]) & 1 == 1)
                if WINDOWED or CHUNKED:
                    at = tl.where(beyond, tl.load(tree_positions + tree_first + j, beyond, 0), i)
            if WINDOWED or CHUNKED:
                seen = seen & (at[None, :] >= since[:, None])
            score = tl.where(seen, score, -float("inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            # A pair that has seen no key yet has the maximum -inf.
            base = tl.where(higher == -float("inf"), 0.0, higher)
            kept = tl.exp(best - base)
            weight = tl.exp(score - base[:, None])
            total = total * kept + tl.sum(weight, 1)
            v = tl.load(
                values + slot[:, None] * value_dim + e[None, :],
                (i[:, None] < high) & (e[None, :] < value_dim),
                0.0,
            )
            out = out * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISE)
            best = higher
        # The output of this part alone, and the logarithm of its weight.
        part = split.to(tl.int64) * rows * kv_heads * group + place
        some = total > 0
        sure = tl.where(some, total, 1.0)
        tl.store(weights + part, tl.where(some, best + tl.log(sure), -float("inf")), there)
        tl.store(
            parts + part[:, None] * value_dim + e[None, :],
            out / sure[:, None],
            there[:, None] & (e[None, :] < value_dim),
        )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["splits"])
def merge(
    parts,
    weights,
    splits,
    sinks,
    out,
    rows,
    value_dim,
    VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of one row and head."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = (row * heads + head).to(tl.int64)
    s = tl.arange(0, SPLIT)
    e = tl.arange(0, VALUE)
    part = s.to(tl.int64) * rows * heads + place
    there = s < tl.load(splits + row)
    weight = tl.load(weights + part, there, -float("inf"))
    best = tl.max(weight, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        best = tl.maximum(best, sink)
    weight = tl.exp(weight - best)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - best)
    value = tl.load(
        parts + part[:, None] * value_dim + e[None, :],
        there[:, None] & (e[None, :] < value_dim),
        0.0,
    )
    merged = tl.sum(value * weight[:, None], 0) / total
    tl.store(out + place * value_dim + e, merged, e < value_dim)
