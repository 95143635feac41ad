"""What a layer with a running state keeps, and how it computes batches of tree rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipespec.engine.recurrence import tree_rules
from pipespec.engine.recurrence.recurrent_plan import NONE, RecurrentPlan
from pipespec.system.device_copy import to_device_together
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers.activations import ACT2FN

# The pools that have a row for each state; the others have one for each node.
_BY_STATE = ("tails", "states")


def on_device(plan: RecurrentPlan[np.ndarray], device: torch.device) -> RecurrentPlan[Tensor]:
    """A plan with tensors on the device of the layers for its arrays."""
    arrays: list[np.ndarray] = []
    _with_arrays(plan, arrays.append)
    moved = iter(to_device_together(arrays, device))
    found: RecurrentPlan[Tensor] = _with_arrays(plan, lambda _: next(moved))
    return found


def _with_arrays(plan: Any, call: Callable[[np.ndarray], Any]) -> Any:
    """A plan, or a part of one, with what `call` returns for each of its arrays, in order."""
    if isinstance(plan, np.ndarray):
        return call(plan)
    if isinstance(plan, list):
        return [_with_arrays(each, call) for each in plan]
    if is_dataclass(plan):
        parts = {each.name: getattr(plan, each.name) for each in fields(plan)}
        made = {name: _with_arrays(part, call) for name, part in parts.items()}
        return type(plan)(**made)  # type: ignore[misc]
    return plan


@dataclass(slots=True, eq=False)
class RecurrentState:
    """What a module keeps between batches: pools, in float32 but for the inputs of its convolution,
    which reads `history` inputs before a row.

    inputs `[entries, channels]`, tails `[states, history, channels]`: of the convolution.
    keys `[entries, G, K]`, updates `[entries, H, V]`, decays `[entries, H, D]`, states `[states, H,
    K, V]`: of the recurrence (`pipespec.engine.recurrence.tree_rules`).
    """

    history: int
    current: Callable[[], RecurrentPlan[Tensor]]  # the plan of the batch that is computed
    pools: dict[str, Tensor] = field(default_factory=dict)
    num_growths: int = 0  # how often a pool was replaced by a larger one

    def copy(self, to: int, source: int, num_states: int) -> None:
        for name in _BY_STATE:
            if name in self.pools:
                pool = self._pool(name, num_states, self.pools[name])
                pool[to] = pool[source]

    def has_room(self, plan: RecurrentPlan[Any]) -> bool:
        return all(
            len(pool) >= (plan.num_states if name in _BY_STATE else plan.capacity)
            for name, pool in self.pools.items()
        )

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """`causal_conv1d_fn` of `[1, channels, rows]`, with weight `[channels, kernel]`; the inputs
        before each row are those of its own path."""
        plan, dtype = self.current(), hidden_states.dtype
        rows = hidden_states[0].T
        entries = self._pool("inputs", plan.capacity, rows)
        tails = self._pool("tails", plan.num_states, rows[:, None].expand(-1, self.history, -1))
        tails.index_fill_(0, plan.fresh, 0)
        kept = tails.index_select(0, plan.states).flatten(0, 1)
        sources = torch.cat((entries.index_select(0, plan.entries), rows, kept))
        total = rows.float() * weight[:, -1].float()
        for distance in range(1, self.history + 1):
            before = sources.index_select(0, plan.before[:, distance - 1])
            total += before.float() * weight[:, -1 - distance].float()
        if bias is not None:
            total += bias.float()
        out = total.to(weight.dtype)
        if activation is not None:
            out = ACT2FN[activation](out)
        newest = sources.index_select(0, plan.tails.flatten())
        tails.index_copy_(0, plan.states, newest.unflatten(0, (-1, self.history)))
        entries.index_copy_(0, plan.stored_entries, rows.index_select(0, plan.stored_rows))
        return out.to(dtype).T.unsqueeze(0)

    def apply_delta_rule(self, kernel: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
        """The gated delta rule; `kernel` is the model's own, for prompts."""

        def rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            use_qk_l2norm_in_kernel: bool = False,
            **_: Any,
        ) -> tuple[Tensor, None]:
            assert use_qk_l2norm_in_kernel
            given = (query, key, value, g, beta)

            def prompt(rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
                out, new = kernel(
                    *(each[:, rows] for each in given[:3]),
                    g=g[:, rows],
                    beta=beta[:, rows],
                    initial_state=state[None],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                return out[0], new[0]

            queries, keys, values, decays, strengths = (each[0].float() for each in given)
            queries = _normalised(queries) * queries.shape[-1] ** -0.5
            rows = _Rows(queries, _normalised(keys), values, decays, strengths)
            return self._recur(rows, prompt).to(query.dtype)[None], None

        return rule

    def scan(self, kernel: Callable[..., Any]) -> Callable[..., Tensor]:
        """The scan of Mamba 2; `kernel` is the model's own, for prompts."""

        def scan(
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,  # noqa: N803 - the names of Transformers
            B: Tensor,  # noqa: N803
            C: Tensor,  # noqa: N803
            chunk_size: int,
            D: Tensor | None = None,  # noqa: N803
            dt_bias: Tensor | None = None,
            dt_softplus: bool = False,
            dt_limit: tuple[float, float] = (0.0, float("inf")),
            **_: Any,
        ) -> Tensor:
            how = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "D": D}

            def prompt(rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
                out, new = kernel(
                    *(hidden_states[:, rows], dt[:, rows], A, B[:, rows], C[:, rows]),
                    chunk_size=chunk_size,
                    **how,
                    return_final_states=True,
                    initial_states=state.transpose(1, 2)[None],
                )
                return out[0], new[0].transpose(1, 2)

            steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            steps = functional.softplus(steps) if dt_softplus else steps
            steps = torch.clamp(steps, *dt_limit)[0].float()
            inputs = hidden_states[0].float()
            rows = _Rows(C[0].float(), B[0].float(), inputs * steps[..., None], steps * A.float())
            skip = None if D is None else D.float()[:, None] * inputs
            return self._recur(rows, prompt, skip)[None]

        return scan

    def _recur(
        self,
        rows: _Rows,
        prompt: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
        skip: Tensor | None = None,
    ) -> Tensor:
        """o of all rows `[rows, H, V]`, with `skip` added; the pools are those of the plan
        afterwards."""
        plan = self.current()
        decays = rows.decays if rows.decays.ndim == 3 else rows.decays[..., None]
        heads, value_size = rows.values.shape[1:]
        shape = (0, heads, rows.keys.shape[-1], value_size)
        states = self._pool("states", plan.num_states, rows.keys.new_empty(shape))
        keys = self._pool("keys", plan.capacity, rows.keys)
        updates = self._pool("updates", plan.capacity, rows.values)
        log_decays = self._pool("decays", plan.capacity, decays)
        states.index_fill_(0, plan.fresh, 0)

        def sources(pool: Tensor, own: Tensor) -> Tensor:
            return torch.cat((pool.index_select(0, plan.entries), own, torch.zeros_like(pool[:1])))

        all_keys, all_decays = sources(keys, rows.keys), sources(log_decays, decays)
        own = torch.zeros_like(rows.values) if rows.strengths is not None else rows.values
        all_updates = sources(updates, own)
        first = len(plan.entries)
        if (fold := plan.fold) is not None:
            folded = tree_rules.fold(
                states.index_select(0, fold.states),
                _at(all_keys, fold.sources),
                _at(all_updates, fold.sources),
                _at(all_decays, fold.sources),
                fold.valid,
            )
            states.index_copy_(0, fold.states, folded)
        out = torch.empty_like(rows.values)
        for run in plan.runs:
            if run.rows.start < run.rows.stop:
                found, states[run.state] = prompt(run.rows, states[run.state])
                out[run.rows] = found.float()
            if run.kept != NONE:
                states[run.kept] = states[run.state]
        for trees in plan.trees:
            state = states.index_select(0, trees.states)
            column_keys = _at(all_keys, trees.columns)
            column_decays = _at(all_decays, trees.columns)
            paths = tree_rules.Paths(column_decays, trees.ancestors, trees.path, trees.first)
            mine = trees.rows
            own_queries, own_keys = _at(rows.queries, mine), _at(rows.keys, mine)
            if rows.strengths is None:
                (scores,) = paths.scores(column_keys, own_queries)
            else:
                scores, key_scores = paths.scores(column_keys, own_queries, own_keys)
                solved = tree_rules.delta_updates(
                    tree_rules.read_state(state, own_keys, paths.from_tip),
                    _at(rows.values, mine),
                    _at(rows.strengths, mine),
                    key_scores,
                    _at(all_updates, trees.columns),
                    trees.own,
                )
                alone = solved.flatten(0, 1).index_select(0, trees.places)
                all_updates.index_copy_(0, first + trees.alone, alone)
            column_updates = _at(all_updates, trees.columns)
            read = tree_rules.read_state(state, own_queries, paths.from_tip)
            found = tree_rules.outputs(read, scores, column_updates).flatten(0, 1)
            found = found.index_select(0, trees.places)
            if skip is not None:
                found = found + skip.index_select(0, trees.alone)
            out.index_copy_(0, trees.alone, found)
            if trees.commits:
                folded = tree_rules.fold(
                    state, column_keys, column_updates, column_decays, trees.committed
                )
                states.index_copy_(0, trees.states, folded)
        own_rows = slice(first, first + len(out))
        for pool, found in ((keys, all_keys), (updates, all_updates), (log_decays, all_decays)):
            stored = found[own_rows].index_select(0, plan.stored_rows)
            pool.index_copy_(0, plan.stored_entries, stored)
        return out

    def _pool(self, name: str, count: int, like: Tensor) -> Tensor:
        """The pool of this name, with room for `count` rows like those of `like`."""
        pool = self.pools.get(name)
        if pool is None or len(pool) < count:
            if pool is not None:  # a quarter more, as each growth copies the pool
                count = max(count, len(pool) + len(pool) // 4)
            grown = like.new_zeros((count, *like.shape[1:]))
            if pool is not None:
                grown[: len(pool)] = pool
            self.pools[name] = pool = grown
            self.num_growths += 1
        return pool


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What a batch's rows bring: queries and keys `[rows, G, K]`, values `[rows, H, V]` (u if there
    are no strengths), log decays `[rows, H]` or `[rows, H, K]`, strengths `[rows, H]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    strengths: Tensor | None = None


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`, which PyTorch copies more slowly."""
    return values.index_select(0, index.flatten()).unflatten(0, index.shape)


def _normalised(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)
