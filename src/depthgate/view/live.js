// Follows a run: asks the server that gave this page for a new one, and shows what is on it.
(() => {
  let tag = "", seen = new Date();
  const sections = (of) => [...of.querySelectorAll("main > section")];
  // What a reader is at has a name that it keeps on the next page.
  const key = (e) => e.id || (e.matches("svg[data-plot]") ? `${e.closest(".by")?.dataset.axis} ${e.querySelector("title").textContent}` : e.getAttribute("aria-label"));
  const find = (name) => name && [...document.querySelectorAll("[id], [aria-label], svg[data-plot]")].find((e) => key(e) === name);
  const named = (selector, of) => [...document.querySelectorAll(selector)].map((e) => [key(e), of(e)]);

  function show(text) {
    const news = new DOMParser().parseFromString(text, "text/html");
    const axis = document.querySelector("input[name=axis]:checked"), held = key(document.activeElement);
    const read = named("svg[data-value]", (svg) => Number(svg.dataset.value)), scrolled = named(".wide", (e) => e.scrollLeft);
    const now = sections(document), next = sections(news);
    if (now.length !== next.length) return location.reload();
    now.forEach((old, i) => {
      if (old.innerHTML !== next[i].innerHTML) old.replaceWith(document.importNode(next[i], true));
    });
    if (axis) document.getElementById(axis.id).checked = true;
    for (const [name, left] of scrolled) { const table = find(name); if (table) table.scrollLeft = left; }
    for (const [name, detail] of read) find(name)?.dispatchEvent(new CustomEvent("again", { bubbles: true, detail }));
    find(held)?.focus({ preventScroll: true });
  }

  // Said once, not at every look: a screen reader reads it out.
  function say(text) {
    const status = document.getElementById("live"), full = text && `${text} What is shown is of ${seen.toLocaleTimeString()}.`;
    if (status.textContent !== full) status.textContent = full;
  }

  async function look() {
    try {
      const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" }), body = await answer.text();
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        show(body);
      }
      if (answer.ok || answer.status === 304) { seen = new Date(); say(""); }
      else say(new DOMParser().parseFromString(body, "text/html").querySelector("main p:not(#live)")?.textContent ?? `The server says ${answer.status}.`);
    } catch {
      say("The command that serves this page has ended, or cannot be reached.");
    }
    setTimeout(look, 2000);
  }
  setTimeout(look, 2000);
})();
