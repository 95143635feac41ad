"""The recurrence of linear attention along the paths of a tree, without a state for each node.

A layer's state S (`[key size, value size]` for each head) changes with every token i after p:

    S_i = a_i S_p + k_i u_i^T        o_i = S_i^T q_i
    u_i = b_i (v_i - a_i S_p^T k_i)  gated delta rule (Yang et al. 2412.06464, section 3; Kimi
                                     Linear 2510.26692 has a decay for each channel of the keys)
    u_i = dt_i x_i                   Mamba 2 (Dao and Gu 2405.21060, section 6), k = B, q = C

With S the state at the tip and A(j, i) the product of the decays after j down to i, the same is

    o_i = A(tip, i) S^T q_i + sum over ancestors j of i, and i itself, of A(j, i) (k_j . q_i) u_j
    u_i = b_i (v_i - A(tip, i) S^T k_i - sum over ancestors j of i of A(j, i) (k_j . k_i) u_j)

so a node needs its k, u and log decay alone, as attention needs its K and V. The u of a batch are
the solution of a unit lower triangular system, parents first. Decays are products in log space:
sums of the log decays along the path itself, never differences of sums, so that neither long texts
nor strong decays lose digits. docs/how-it-works/linear-attention.md derives all of it.

Shapes: B sequences, R rows and C columns (nodes that rows may descend from, the rows included, by
rising position), L nodes of the longest path, G key heads, H value heads (a multiple of G), key
size K, value size V. A decay has one number for each head (D = 1) or for each channel (D = K).
Everything is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor, valid: Tensor) -> Tensor:
    """The state `[B, H, K, V]` after C tokens of a path.

    `keys` `[B, C, G, K]`, `updates` (u) `[B, C, H, V]`, log `decays` `[B, C, H, D]`; `valid` bool
    `[B, C]`: columns that are none are padding, at the end.
    """
    decays = decays * valid[..., None, None]
    total = decays.sum(1)  # [B, H, D]
    weighted = _to_heads(keys, updates.shape[2], 2) * _behind(decays, 1).exp()
    updates = updates * valid[..., None, None]
    return state * total.exp()[..., None] + torch.einsum("bchk,bchv->bhkv", weighted, updates)


def _behind(decays: Tensor, dim: int) -> Tensor:
    """The sums of what is behind each one in dimension `dim`."""
    sums = decays.flip(dim).cumsum(dim).flip(dim)
    none = torch.zeros_like(sums.narrow(dim, 0, 1))
    return torch.cat((sums.narrow(dim, 1, sums.shape[dim] - 1), none), dim)


class Paths:
    """The decays between the rows of some trees and their ancestors.

    `from_tip` is A(tip, i), `[B, R, H, D]`. Where decays have one number for a head, those between
    all rows and columns are computed at once; where they have one for a channel, those along the
    paths alone, which are much shorter than the tree is wide.
    """

    def __init__(self, decays: Tensor, ancestors: Tensor, path: Tensor):
        """Log `decays` `[B, C, H, D]` of the columns; bool `ancestors` `[B, R, C]`, the row
        included; the same as columns by rising position, int64 `path` `[B, R, L]`, filled up with
        C."""
        mask = ancestors.to(decays.dtype)
        self.from_tip = torch.einsum("brc,bchd->brhd", mask, decays).exp()
        self._path, self._width = path, decays.shape[1]
        self._by_channel = decays.shape[-1] > 1
        if self._by_channel:
            self._weights = _behind(self._along(decays), 2).exp_()
        else:
            mask = mask[..., None]
            self._weights = _behind(decays[:, None, ..., 0] * mask, 2).exp_().mul_(mask)

    def _along(self, columns: Tensor) -> Tensor:
        """What columns `[B, C, ...]` have, along the paths, `[B, R, L, ...]`; 0 beside them."""
        batch = torch.arange(len(columns), device=columns.device)[:, None, None]
        filled = torch.cat((columns, torch.zeros_like(columns[:, :1])), 1)
        return filled[batch, self._path]

    def scores(self, rows: Tensor, keys: Tensor, heads: int) -> Tensor:
        """A(j, i) (k_j . x_i) of rows x `[B, R, G, K]` and columns k `[B, C, G, K]`:
        `[B, heads, R, C]`."""
        if not self._by_channel:
            products = torch.einsum("brgk,bcgk->bgrc", rows, keys)
            return _to_heads(products, heads, 1) * self._weights.permute(0, 3, 1, 2)
        products = torch.einsum("brhk,brlhk->bhrl", rows, self._weights * self._along(keys))
        dense = products.new_zeros(*products.shape[:3], self._width + 1)
        path = self._path[:, None].expand(-1, heads, -1, -1)
        return dense.scatter_(3, path, products)[..., :-1]


def read_state(state: Tensor, rows: Tensor, from_tip: Tensor) -> Tensor:
    """A(tip, i) S^T x_i of rows x `[B, R, G, K]`: `[B, H, R, V]`."""
    heads = state.shape[1]
    decayed = _to_heads(rows, heads, 2) * from_tip
    return torch.matmul(decayed.transpose(1, 2), state)


def delta_updates(
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    paths: Paths,
    column_keys: Tensor,
    column_updates: Tensor,
    own: Tensor,
) -> Tensor:
    """The u of the delta rule, `[B, R, H, V]`.

    `keys` `[B, R, G, K]`, `values` `[B, R, H, V]` and `strengths` (b) `[B, R, H]` are the rows';
    `column_keys` `[B, C, G, K]` and `column_updates` `[B, C, H, V]` those of the columns, 0 where a
    column is a row of this batch; `own` int64 `[B, R]` is the column of each row. Parents come
    before their children.
    """
    heads = values.shape[2]
    scores = paths.scores(keys, column_keys, heads)
    seen = read_state(state, keys, paths.from_tip) + torch.matmul(
        scores, column_updates.transpose(1, 2)
    )
    strength = strengths.transpose(1, 2)[..., None]  # [B, H, R, 1]
    right = strength * (values.transpose(1, 2) - seen)
    rows = own[:, None, None, :].expand(-1, heads, scores.shape[2], -1)
    system = strength * scores.gather(3, rows)  # the diagonal is not read
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solved.transpose(1, 2)


def outputs(
    state: Tensor, queries: Tensor, paths: Paths, column_keys: Tensor, column_updates: Tensor
) -> Tensor:
    """o of rows with `queries` `[B, R, G, K]`, `[B, R, H, V]`; the columns' u include the rows'."""
    scores = paths.scores(queries, column_keys, state.shape[1])
    seen = read_state(state, queries, paths.from_tip)
    return (seen + torch.matmul(scores, column_updates.transpose(1, 2))).transpose(1, 2)


def _to_heads(values: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each of the key heads in dimension `dim` for its value heads."""
    if values.shape[dim] == heads:
        return values
    return values.repeat_interleave(heads // values.shape[dim], dim=dim)
