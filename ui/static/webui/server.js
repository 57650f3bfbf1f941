// Calls to our REST routes, with the credential of whoever is logged in.
//
// The web UI keeps its token in sessionStorage. Xinference bans an address after ten refused
// credentials, so a token that was refused once is not sent again; the UI renews it by itself.

/** Where the server's root is, whatever prefix a proxy puts before it. */
const ROOT = new URL("../", import.meta.url);

let refusedToken = null;

/** Address of `path` (without a leading slash) on this server. */
export function address(path) {
  return new URL(path, ROOT).href;
}

/**
 * The JSON answer to a call, or null when there is none: not logged in, not allowed, no network.
 * What needs the answer does without.
 */
export async function ask(path, { body, signal } = {}) {
  const token = sessionStorage.getItem("token") ?? "";
  const headers = {};
  if (token.includes(".")) {
    // A JWT; without authentication the UI stores a word.
    if (token === refusedToken) return null;
    headers.Authorization = `Bearer ${token}`;
  }
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    const answer = await fetch(address(path), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (answer.status === 401) refusedToken = token;
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}
