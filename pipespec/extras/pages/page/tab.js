// What this tab keeps: in its session storage, or for as long as the page where that is blocked.

const kept = new Map();

/** What was remembered under a name; null: nothing. */
export function recall(name) {
  try {
    return kept.get(name) ?? sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  kept.set(name, value);
  try {
    sessionStorage.setItem(name, value);
  } catch {
    return; // it lasts as long as the page
  }
}
