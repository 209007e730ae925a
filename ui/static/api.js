// Calls of /api/v1. The session cookie goes along by itself; every call that
// changes something carries a key, so that pressing twice or a retry does it once.

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the server answered ${status}`);
    this.status = status;
    this.type = body.type ?? "";
    this.errors = Array.isArray(body.errors) ? body.errors : [];
    this.open = body.open ?? "";
  }
}

async function answer(response) {
  const type = response.headers.get("Content-Type") ?? "";
  const body = type.includes("json") ? await response.json() : {};
  if (response.ok) return body;
  if (response.status === 401) {
    // The session has ended; signing in comes back to this page.
    location.reload();
  }
  throw new Problem(response.status, body);
}

export async function get(path, signal) {
  return answer(await fetch(path, { headers: { Accept: "application/json" }, signal }));
}

export async function change(method, path, body, key, headers) {
  return answer(await fetch(path, {
    method,
    headers: { Accept: "application/json", "Content-Type": "application/json", "Idempotency-Key": key, ...headers },
    body: method === "GET" ? undefined : JSON.stringify(body),
  }));
}

export function newKey() {
  // randomUUID exists in secure contexts only; a plain http address in a private
  // network is none.
  return crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}
