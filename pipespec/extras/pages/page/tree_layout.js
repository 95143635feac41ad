// Where the nodes of a tree of draft tokens are drawn. Nothing here shows anything.

const [FULL, LOW, LOWEST] = [21, 6, 2]; // heights of rows in pixels
const MIN_FULL = 6;
const [WIDEST, NARROWEST] = [150, 30]; // columns

/** The nodes of a tree as the server tells it, by id. */
export function nodes(tree) {
  return tree.id.map((id, i) => ({
    id,
    parent: i ? tree.id[tree.parent[i]] : null,
    token: tree.token[i],
    text: tree.texts[i],
    logp: tree.logp[i],
    kind: i ? (tree.fed[i] ? "flight" : "waiting") : "root",
  }));
}

/** The nodes of a tree, and those of the one before that are no more: the way to the new root was
 * accepted, and what does not come from the new root was pruned. */
export function merged(before, now) {
  if (!before.length) return now;
  const old = new Map(before.map((node) => [node.id, node]));
  const present = new Set(now.map((node) => node.id));
  const [root] = now;
  const way = new Set();
  for (let id = old.get(root.id)?.parent ?? before[0].id; id !== null && id !== undefined; ) {
    if (id === root.id) return now; // nothing was decided
    way.add(id);
    id = old.get(id)?.parent;
  }
  const gone = before.filter(({ id }) => !present.has(id));
  const left = gone.map((node) => ({ ...node, kind: way.has(node.id) ? "accepted" : "pruned" }));
  // A token that was not in the tree follows what was the root.
  const planted = { ...root, parent: old.get(root.id)?.parent ?? before[0].id };
  const all = [...left, planted, ...now.slice(1)];
  const ids = new Set(all.map((node) => node.id));
  return all.filter((node) => node.parent === null || ids.has(node.parent));
}

export const isPruned = ({ kind }) => kind === "pruned";

/** Places for nodes: children right of their parents, the most probable on top and what was pruned
 * below. `logp` is that of the whole way from the root. */
export function placed(all) {
  const children = new Map();
  for (const node of all) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const places = new Map();
  let row = 0;
  const walk = (node, depth, before) => {
    const below = children.get(node.id) ?? [];
    below.sort((a, b) => isPruned(a) - isPruned(b) || b.logp - a.logp);
    const top = row;
    const isDraft = node.kind === "flight" || node.kind === "waiting" || isPruned(node);
    const logp = isDraft ? before + node.logp : 0;
    for (const child of below) walk(child, depth + 1, logp);
    if (!below.length) row += 1;
    places.set(node.id, { node, depth, logp, row: below.length ? top : row - 1 });
  };
  for (const root of children.get(null) ?? []) walk(root, 0, 0);
  return [...places.values()];
}

/** Rows that fit into a height: the most probable ones are high enough for text, the others low.
 * By row its `top`, its `height` and whether it `isFull`. */
export function rows(places, height) {
  const best = [];
  for (const { node, row, logp } of places) {
    best[row] = Math.max(best[row] ?? -Infinity, isPruned(node) ? logp - 1e6 : logp);
  }
  const room = Math.floor((height - best.length * LOW) / (FULL - LOW));
  const full = Math.min(best.length, Math.max(room, MIN_FULL));
  const order = best.map((_, row) => row).sort((a, b) => best[b] - best[a]);
  const isFull = new Set(order.slice(0, full));
  const low = Math.max(LOWEST, Math.min(LOW, (height - full * FULL) / (best.length - full)));
  let top = 0;
  return best.map((_, row) => {
    const its = { top, height: isFull.has(row) ? FULL : low, isFull: isFull.has(row) };
    top += its.height;
    return its;
  });
}

/** The width of columns, of which so many share a width. */
export function columnWidth(columns, width) {
  return Math.max(NARROWEST, Math.min(WIDEST, Math.floor(width / columns)));
}
