// Follows a run: asks the server that gave this page for a new one, and shows what is on it.
(() => {
  let tag = "";
  const sections = (of) => [...of.querySelectorAll("main > section")];

  function show(text) {
    const news = new DOMParser().parseFromString(text, "text/html");
    const axis = document.querySelector("input[name=axis]:checked"), held = document.activeElement.id;
    const now = sections(document), next = sections(news);
    if (now.length !== next.length) document.querySelector("main").replaceWith(document.importNode(news.querySelector("main"), true));
    else now.forEach((old, i) => {
      if (old.innerHTML !== next[i].innerHTML) old.replaceWith(document.importNode(next[i], true));
    });
    if (axis) document.getElementById(axis.id).checked = true;
    if (held) document.getElementById(held)?.focus();
  }

  async function look() {
    try {
      const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        show(await answer.text());
      }
      document.body.dataset.live = "yes";
    } catch {
      document.body.dataset.live = "no";  // the command has ended: what is shown stays
    }
    setTimeout(look, 2000);
  }
  setTimeout(look, 2000);
})();
