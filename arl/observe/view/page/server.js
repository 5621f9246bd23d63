// The server's JSON. A wrong answer becomes an Error with the server's own sentence.

export const setKey = (key) => sessionStorage.setItem("arl-key", key);

const given = /[#&]key=([^&]*)/.exec(location.hash);
if (given) {
  setKey(decodeURIComponent(given[1]));
  history.replaceState(null, "", location.hash.startsWith("#/") ? location.hash.replace(given[0], "") : location.pathname);
}

export class KeyNeeded extends Error {}

export const queryOf = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, v]) => v !== undefined && v !== null && v !== "")).toString();

async function ask(path, query, signal) {
  const key = sessionStorage.getItem("arl-key");
  const text = queryOf(query);
  let response;
  try {
    response = await fetch(`api/${path}${text && `?${text}`}`, { signal, headers: key ? { Authorization: `Bearer ${key}` } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server of this page does not answer. Does `arl view` still run?");
  }
  if (response.status === 401) throw new KeyNeeded("This server asks for its key.");
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error ?? `The server answered ${response.status}.`);
}

export const get = async (path, query = {}, signal) => (await ask(path, query, signal)).json();

// A picture as a URL that an <img> can show: of itself it would not send the key.
export async function picture(path, signal) {
  const blob = await (await ask(path, {}, signal)).blob();
  return new Promise((done, fail) => {
    const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => fail(reader.error) });
    reader.readAsDataURL(blob);
  });
}

// Calls `tell` with each event of the run until `signal` ends it, and `lost` with true or false as the connection comes and goes.
export async function follow(run, tell, lost, signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 15000)) {
    try {
      const reader = (await ask(`runs/${run}/stream`, {}, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
      lost(false);
      wait = 500;
      let rest = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const lines = (rest + part.value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line.startsWith("data:")) tell(JSON.parse(line.slice(5)));
      }
    } catch (error) {
      if (error instanceof KeyNeeded) return;
    }
    if (signal.aborted) return;
    lost(true);
    await new Promise((done) => setTimeout(done, wait));
  }
}
