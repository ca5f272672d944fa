// Talks to the server; in an exported report, which has none, reads what the report holds.

const recorded = document.getElementById("recorded");
const answers = recorded ? JSON.parse(recorded.textContent) : null;
/** True if this page is an exported report. */
export const isReport = answers !== null;
/** When the report was made. */
export const exported = answers?.exported;
const kept = answers?.["/api/recorded"];
export const hasRollouts = answers === null || Boolean(kept?.rollouts.length);
export const hasComparisons = answers === null || Boolean(kept?.evaluations.length);
export const NOT_HERE = "This report does not hold that: watch.py shows it.";

/** An answer of the server that is a sentence for the reader. */
export class Refused extends Error {}

/** Parameters without the empty ones; arrays give several of one name. */
function queryOf(params) {
  const query = new URLSearchParams();
  for (const [key, value] of params instanceof URLSearchParams ? params : Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(key, each);
    }
  }
  return query;
}

/** The key under which report.py writes an answer. */
function keyOf(path, params) {
  const query = queryOf(params);
  query.sort();
  const words = [...query].map(([name, value]) => `${name}=${value}`);
  return words.length ? `${path}?${words.join("&")}` : path;
}

async function ask(path, params, signal) {
  let response;
  try {
    const query = queryOf(params);
    response = await fetch(query.size ? `${path}?${query}` : path, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer: is watch.py still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let sentence = text;
  try {
    sentence = JSON.parse(text).error;
  } catch {
    // Not every answer is JSON.
  }
  throw new Refused(sentence);
}

/** The JSON at `path`, such as "/api/runs"; `params` holds texts, numbers or arrays of them, empty ones are left out. */
export async function get(path, params = {}, { signal } = {}) {
  if (!isReport) return (await ask(path, params, signal)).json();
  const answer = answers[keyOf(path, params)];
  if (answer === undefined || answer === null) throw new Refused(NOT_HERE);
  return answer;
}

/** Calls `each` with every object of an NDJSON answer as it arrives. */
export async function stream(path, params, each, { signal } = {}) {
  if (isReport) throw new Refused(NOT_HERE);
  const response = await ask(path, params, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) if (line) each(JSON.parse(line));
    if (done) return;
  }
}

/** encodeURIComponent for a run's id in a path: its slashes must not end the segment. */
export const segment = encodeURIComponent;
