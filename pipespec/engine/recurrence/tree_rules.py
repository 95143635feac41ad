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
the solution of a unit lower triangular system, parents first. Decays are sums of log decays along
the path itself, never differences of sums, or by channel products of factors, so that neither long
texts nor strong decays lose digits. docs/how-it-works/linear-attention.md derives it all.

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
    `[B, C]`: the other columns count as none, whatever they hold.
    """
    beside = ~valid[..., None, None]
    decays, keys, updates = (each.masked_fill(beside, 0) for each in (decays, keys, updates))
    total = decays.sum(1)  # [B, H, D]
    weighted = _to_heads(keys, updates.shape[2], 2) * _behind(decays, 1).exp()
    return state * total.exp()[..., None] + torch.einsum("bchk,bchv->bhkv", weighted, updates)


def _behind(decays: Tensor, dim: int) -> Tensor:
    """The sums of what is behind each one in dimension `dim`."""
    sums = decays.flip(dim).cumsum(dim).flip(dim)
    none = torch.zeros_like(sums.narrow(dim, 0, 1))
    return torch.cat((sums.narrow(dim, 1, sums.shape[dim] - 1), none), dim)


class Paths:
    """The decays between rows and their ancestors. Once the `scores` are computed, `from_tip` is
    A(tip, i), `[B, R, H, D]`."""

    from_tip: Tensor

    def __init__(self, decays: Tensor, ancestors: Tensor, path: Tensor, first: tuple[int, ...]):
        """Log `decays` `[B, C, H, D]` of the columns; `ancestors` `[B, R, C]`, 1 or 0, the row
        included; the same as columns, the nearest first, int64 `path` `[B, R, L]`, filled up with
        C; `first` `[L]` is the first row that has so many."""
        self._decays, self._ancestors, self._path, self._first = decays, ancestors, path, first

    def scores(self, keys: Tensor, *rows: Tensor) -> list[Tensor]:
        """A(j, i) (k_j . x_i) of columns k `[B, C, G, K]` and each of several x of the rows,
        `[B, R, G, K]`: `[B, H, R, C]`."""
        if self._decays.shape[-1] > 1:
            return self._scores_by_channel(keys, rows)
        self.from_tip = torch.einsum("brc,bchd->brhd", self._ancestors, self._decays).exp()
        mask = self._ancestors[..., None]
        weights = _behind(self._decays[:, None, ..., 0] * mask, 2).exp_().mul_(mask)
        weights = weights.permute(0, 3, 1, 2)
        products = (torch.einsum("brgk,bcgk->bgrc", each, keys) for each in rows)
        return [_to_heads(each, weights.shape[1], 1) * weights for each in products]

    def _scores_by_channel(self, keys: Tensor, rows: tuple[Tensor, ...]) -> list[Tensor]:
        """Along the paths, which are much shorter than the tree is wide; one ancestor of every row
        after another, in the same memory, so that what is computed stays in the caches."""
        size, width, heads = keys.shape[:3]
        none = torch.zeros_like(keys[:, :1])
        all_keys = torch.cat((keys, none), 1).flatten(0, 1)
        all_factors = torch.cat((self._decays, none), 1).exp_().flatten(0, 1)
        starts = torch.arange(size, device=keys.device)[:, None] * (width + 1)
        found = [each.new_zeros(size, heads, each.shape[1], width + 1) for each in rows]
        all_behind = torch.ones_like(rows[0])
        gathered, multiplied = (torch.empty_like(rows[0]).flatten(0, 1) for _ in range(2))
        for first, ancestor in zip(self._first, self._path.unbind(2), strict=True):
            ancestor, behind = ancestor[:, first:], all_behind[:, first:]
            at = (ancestor + starts).flatten()
            own, products = (each[: len(at)] for each in (gathered, multiplied))
            weighted = torch.index_select(all_keys, 0, at, out=own).view_as(behind).mul_(behind)
            place = ancestor[:, None, :, None].expand(-1, heads, -1, 1)
            for scores, each in zip(found, rows, strict=True):
                torch.mul(weighted, each[:, first:], out=products.view_as(behind))
                of_rows = products.view_as(behind).sum(-1).transpose(1, 2)
                scores[:, :, first:].scatter_(3, place, of_rows[..., None])
            behind *= torch.index_select(all_factors, 0, at, out=own).view_as(behind)
        self.from_tip = all_behind
        return [scores[..., :-1] for scores in found]


def read_state(state: Tensor, rows: Tensor, from_tip: Tensor) -> Tensor:
    """A(tip, i) S^T x_i of rows x `[B, R, G, K]`: `[B, H, R, V]`."""
    heads = state.shape[1]
    decayed = _to_heads(rows, heads, 2) * from_tip
    return torch.matmul(decayed.transpose(1, 2), state)


def delta_updates(
    read: Tensor,
    values: Tensor,
    strengths: Tensor,
    scores: Tensor,
    column_updates: Tensor,
    own: Tensor,
) -> Tensor:
    """The u of the delta rule, `[B, R, H, V]`.

    `read` `[B, H, R, V]` is what the rows' keys read of the state; `values` `[B, R, H, V]` and
    `strengths` (b) `[B, R, H]` are the rows'; `scores` `[B, H, R, C]` those of their keys;
    `column_updates` `[B, C, H, V]` are 0 where a column is a row of this batch; `own` int64 `[B,
    R]` is the column of each row. Parents come before their children.
    """
    heads = values.shape[2]
    seen = _add_updates(read, scores, column_updates)
    strength = strengths.transpose(1, 2)[..., None]  # [B, H, R, 1]
    right = (values.transpose(1, 2) - seen).mul_(strength)
    columns = own[:, None, None, :].expand(-1, heads, scores.shape[2], -1)
    system = scores.gather(3, columns).mul_(strength)  # the diagonal is not read
    # As U^T (I + L)^T = R^T: LAPACK's order of matrices, in which nothing has to be copied.
    solved = torch.linalg.solve_triangular(
        system.mT, right.mT, upper=True, left=False, unitriangular=True
    )
    return solved.mT.transpose(1, 2)


def outputs(read: Tensor, scores: Tensor, column_updates: Tensor) -> Tensor:
    """o of rows, `[B, R, H, V]`: what their queries read of the state, `[B, H, R, V]`, and by their
    `scores` `[B, H, R, C]` of the columns' u `[B, C, H, V]`, the rows' own included."""
    return _add_updates(read, scores, column_updates).transpose(1, 2)


def _add_updates(read: Tensor, scores: Tensor, column_updates: Tensor) -> Tensor:
    updates = column_updates.transpose(1, 2).flatten(0, 1)
    return torch.baddbmm(read.flatten(0, 1), scores.flatten(0, 1), updates).view_as(read)


def _to_heads(values: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each of the key heads in dimension `dim` for its value heads."""
    if values.shape[dim] == heads:
        return values
    return values.repeat_interleave(heads // values.shape[dim], dim=dim)
