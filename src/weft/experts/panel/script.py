"""The page's own script: it asks for the status every two seconds and puts in what has changed. No library.

    /status.json?page ──> {status, title, parts} ──> each part that differs takes the place of the old one

The server renders, here and for those without scripts alike, so there is one description of the page. The parts
come escaped, and the policy of the page runs no script but this one.
"""

SCRIPT = """
"use strict";
(() => {
  const PERIOD = 2000, PATIENCE = 5000;
  const main = document.querySelector("main"), pulse = document.getElementById("pulse");
  let timer = 0, asking = false;
  const tell = (state, words) => {
    if (pulse.dataset.state !== state) { pulse.dataset.state = state; pulse.textContent = words; }
  };
  const put = (parts) => {
    const fresh = new DOMParser().parseFromString("<main>" + parts + "</main>", "text/html").querySelector("main");
    const ids = (from) => Array.from(from.children, (part) => part.id).join();
    if (ids(fresh) !== ids(main)) { main.replaceChildren(...fresh.children); return; }
    Array.from(fresh.children).forEach((part, place) => {
      if (part.outerHTML !== main.children[place].outerHTML) main.children[place].replaceWith(part);
    });
  };
  const turn = async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      const answer = await fetch("/status.json?page", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error("status " + answer.status);
      const found = await answer.json();
      put(found.parts);
      document.title = found.title;
      tell("live", "live");
    } catch {
      tell("lost", "no answer since " + new Date().toLocaleTimeString());
    }
    asking = false;
    clearTimeout(timer);
    timer = setTimeout(turn, PERIOD);
  };
  document.addEventListener("visibilitychange", turn);
  tell("live", "live");
  timer = setTimeout(turn, PERIOD);
})();
"""
