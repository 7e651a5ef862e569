// What every page does: tables that say in each cell what it is, and texts that say what is known of a token.
document.querySelectorAll("table").forEach((table) => {
  const heads = [...table.querySelectorAll("thead th")], rows = [...table.querySelectorAll("tbody tr")];
  heads.forEach((head, n) => {
    const cells = rows.map((row) => row.children[n]).filter(Boolean);
    const words = n > 0 && cells.some(({ textContent }) => textContent !== "all" && /[a-z]{3}| to /i.test(textContent));  // they lie to the left
    [head, ...cells].forEach((cell) => cell.classList.toggle("words", words));
    cells.forEach((cell) => { cell.dataset.head = head.textContent; });
    if (n === 0) cells.forEach((cell) => cell.classList.toggle("short", cell.textContent.length <= 24));  // a name that is not to be cut
  });
});

// A table that does not fit becomes cards, of which the first few are shown until one asks for more.
const ROWS = 8;
const fits = new ResizeObserver((changes) => changes.forEach(({ target }) => {
  const table = target.querySelector("table");
  table.classList.remove("cards");
  table.classList.toggle("cards", target.scrollWidth > target.clientWidth);
}));
document.querySelectorAll(".wide").forEach((wide) => {
  const table = wide.querySelector("table"), rows = [...table.querySelectorAll("tbody tr")];
  rows.forEach((row, n) => row.classList.toggle("more", n >= ROWS));
  if (rows.length > ROWS) {
    const rest = document.createElement("button");
    rest.className = "rest";
    rest.textContent = `Show all ${rows.length} rows`;
    rest.addEventListener("click", () => { table.classList.add("all"); wide.focus(); });
    wide.after(rest);
  }
  fits.observe(wide);
});

// Of the token that is pointed at, tapped, or come to by the arrow keys it says what the page knows of it.
document.querySelectorAll(".text").forEach((part) => {
  const pre = part.querySelector("pre"), said = part.querySelector(".said"), tokens = [...pre.querySelectorAll("[data-t]")];
  let at = null;
  const tell = (token) => {
    at?.classList.remove("at");
    at = token;
    at.classList.add("at");
    said.textContent = `Token ${at.dataset.t}: ${at.title}`;
  };
  for (const kind of ["pointerover", "click"]) pre.addEventListener(kind, (event) => {
    const token = event.target.closest("[data-t]");
    if (token) tell(token);
  });
  pre.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    tell(tokens[Math.max(0, Math.min(tokens.length - 1, at ? tokens.indexOf(at) + way : 0))]);
    at.scrollIntoView({ block: "nearest" });
  });
});
